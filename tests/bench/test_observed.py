"""The benchmark of what being watched costs: it watches, and its arithmetic is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from kdn.bench.observed.command import collector, compare_nodes, compared

pytest.importorskip("opentelemetry.sdk")


def test_cost_is_the_median_over_pairs() -> None:
    found = compared("it", [(1.0, 1.01), (2.0, 2.0), (1.0, 1.5), (1.0, 1.03)])
    assert found.cost == pytest.approx(0.02)
    assert found.low == pytest.approx(0.01)
    assert found.high == pytest.approx(0.03)
    assert found.pairs == 4


@pytest.mark.alone
def test_traces_of_a_watched_node_arrive(tmp_path: Path) -> None:
    with collector() as sink:
        [row] = compare_nodes(tmp_path, sink, 4, Console(quiet=True))
        assert sink.taken_bytes() > 0
    assert row.unwatched > 0
    assert row.watched > 0
