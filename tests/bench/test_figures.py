"""The headline and the comparison at equal quality, on points whose answer is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kdn.bench.figures import CodecRow, compare, ratio_at_quality
from kdn.calibrate.ratios import ratio_at

ROW = CodecRow("klt", 0, "wt", 100.0, 1.0, 16.0, 0.01, 0.1, 0.05, 0.9, 8.0, 1.0, 0.1, 9.0)


def curve(codec: str, *points: tuple[float, float, float], text: str = "wt") -> list[CodecRow]:
    return [
        replace(ROW, codec=codec, text=text, level=i, ratio=r, kld=k, recall_kld=recall)
        for i, (r, k, recall) in enumerate(points)
    ]


def test_interpolates_on_log_scale() -> None:
    points = [(64.0, 0.1), (16.0, 0.001), (4.0, 0.0001)]
    assert ratio_at(points, 0.01) == pytest.approx(32.0)
    assert ratio_at(points, 0.001) == pytest.approx(16.0)
    assert ratio_at(points, math.sqrt(0.001 * 0.0001)) == pytest.approx(8.0)


def test_assumes_nothing_beyond_the_levels() -> None:
    points = [(64.0, 0.1), (16.0, 0.02)]
    assert ratio_at(points, 0.5) == 64.0
    assert ratio_at(points, 0.01) == 0.0
    assert ratio_at([], 0.01) == 0.0
    assert ratio_at([(1.0, 0.0), (2.0, 0.1)], 0.1) == 2.0
    assert 1.0 < ratio_at([(1.0, 0.0), (2.0, 0.1)], 0.01) < 2.0
    assert ratio_at([(1.0, 0.0), (2.0, 0.1)], 0.0) == 1.0


def test_takes_the_coarsest_crossing_of_a_curve_that_turns() -> None:
    points = [(64.0, 0.1), (32.0, 0.005), (16.0, 0.02), (8.0, 0.001)]
    assert 32.0 < ratio_at(points, 0.01) < 64.0


def test_the_headline_meets_both_limits() -> None:
    rows = [
        *curve("a", (64.0, 0.1, 0.06), (16.0, 0.001, 0.01)),  # continuation binds
        *curve("b", (64.0, 0.005, 0.5), (16.0, 0.001, 0.005)),  # recall binds
        *curve("c", (64.0, 0.005, 0.5), (16.0, 0.001, 0.2)),  # never good enough
        *curve("a", (8.0, 0.001, 0.01), text="py"),
    ]
    headline = ratio_at_quality(rows)
    assert headline["a"] == {"wt": pytest.approx(32.0), "py": 8.0}
    assert headline["b"] == {"wt": pytest.approx(32.0)}
    assert headline["c"] == {"wt": 0.0}


def test_rivals_are_compared_at_no_worse_than_klts_own_quality() -> None:
    rows = [
        *curve("klt", (64.0, 0.01, 0.05), (16.0, 0.0001, 0.001)),
        *curve("close", (32.0, 0.1, 0.05), (8.0, 0.001, 0.0005)),
        *curve("single", (2.0, 0.001, 0.001)),
        *curve("elsewhere", (2.0, 0.001, 0.001), text="py"),
    ]
    found = {(c.rival, c.level): c for c in compare(rows)}
    assert set(found) == {("close", 0), ("close", 1), ("single", 0), ("single", 1)}
    assert found["close", 0].factor == pytest.approx(4.0)  # 16 at KLD 0.01; recall allows 32
    assert not found["close", 0].at_coarsest
    assert found["close", 1].factor is None
    assert found["single", 0].factor == pytest.approx(32.0)
    assert found["single", 0].at_coarsest
    assert found["single", 1].factor is None
