"""The benchmark of what being watched costs: it sees whether it watches, and its arithmetic."""

from __future__ import annotations

from pathlib import Path
from urllib.request import urlopen

import pytest
from rich.console import Console

from kdn.bench.node_servers import start_kdn
from kdn.bench.observed import command
from kdn.bench.observed.command import (
    NODE,
    Scraper,
    collector,
    compare_nodes,
    compared,
)
from kdn.errors import KdnError


def test_cost_is_the_median_over_pairs() -> None:
    found = compared("it", [(1.0, 1.01), (2.0, 2.0), (1.0, 1.5), (1.0, 1.03)])
    assert found.cost == pytest.approx(0.02)
    assert found.low == pytest.approx(0.01)
    assert found.high == pytest.approx(0.03)
    assert found.pairs == 4


def test_a_collector_counts_for_each_sender() -> None:
    with collector() as sink:
        urlopen(f"{sink.url}/node/v1/traces", b"x" * 300, timeout=5.0).read()
        sink.wait(NODE, 300)
        assert sink.taken_bytes("client") == 0
        with pytest.raises(KdnError, match=r"expected 301 bytes of traces of the node, found 300"):
            sink.wait(NODE, 301, 0.2)


def test_a_scraper_counts_pages_that_came(tmp_path: Path) -> None:
    with start_kdn(tmp_path) as server:
        scraper = Scraper(server)
        with scraper.reading():
            urlopen(f"http://{server.address[0]}:{server.address[1]}/healthz", timeout=5.0).read()
        assert scraper.times == 1
    with scraper.reading():
        pass
    assert scraper.times == 1  # nobody is there any more


@pytest.mark.alone
def test_a_watched_node_is_traced_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setattr(command, "WINDOW_S", 0.2)
    monkeypatch.setattr(command, "SET_BYTES", 8 << 20)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")  # so little time is enough
    with collector() as sink:
        [row] = compare_nodes(tmp_path, sink, 4, Console(quiet=True))
    assert row.pairs == 4
    assert 0.2 < row.watched / row.unwatched < 5
