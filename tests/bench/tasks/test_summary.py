"""Figures that can be worked out by hand, and which verdict they lead to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kdn.bench.tasks.problems import Task
from kdn.bench.tasks.summary import Row, rows_of, verdicts
from kdn.bench.tasks.ways import DEFAULT, EXACT


def task(kind: str = "lines", chance: float | None = None) -> Task:
    return Task("t", kind, "right", "as it is", [], chance=chance)


def contexts(exact: list[list[float]], default: list[list[float]]) -> list[dict[str, Any]]:
    def way(size: int, scores: list[float], agreed: list[float]) -> dict[str, Any]:
        return {"bytes": size, "scores": scores, "agreements": agreed}

    return [
        {
            "ways": {
                EXACT: way(1600, one, [1.0] * len(one)),
                DEFAULT: way(100, other, [float(a == b) for a, b in zip(one, other, strict=True)]),
            }
        }
        for one, other in zip(exact, default, strict=True)
    ]


def rows(kind: str, exact: list[list[float]], default: list[list[float]]) -> list[Row]:
    return rows_of(task(kind), contexts(exact, default), [EXACT, DEFAULT])


def test_scores_are_compared_in_pairs() -> None:
    first, second = rows("lines", [[1, 1], [1, 0], [0, 1]], [[1, 0], [1, 0], [1, 1]])
    assert first.score == second.score == pytest.approx(4 / 6)
    assert first.kept == second.kept == first.agreement == 1
    assert second.agreement == pytest.approx(4 / 6)
    assert (second.items, second.contexts, second.ratio) == (6, 3, 16)
    assert second.kept_interval is not None
    low, high = second.kept_interval
    assert low < 1 < high


def test_what_is_the_same_everywhere_is_sure() -> None:
    rng = np.random.default_rng(0)
    scores = [[float(one)] for one in rng.integers(0, 2, 50)]
    _, same = rows("lines", scores, scores)
    assert (same.kept, same.kept_interval) == (1.0, (1.0, 1.0))
    low, high = same.score_interval
    assert low < same.score < high


def test_more_items_make_narrower_intervals() -> None:
    def width(count: int) -> float:
        exact = [[1.0]] * count
        default = [[0.0] if i % 10 == 0 else [1.0] for i in range(count)]
        interval = rows("lines", exact, default)[1].kept_interval
        assert interval is not None
        assert interval[0] < 0.9 < interval[1]
        return interval[1] - interval[0]

    assert width(400) < width(40) / 2


def test_perplexities_are_compared_the_other_way_round() -> None:
    exact, default = rows("perplexity", [[2.0], [3.0]], [[2.1], [3.1]])
    assert exact.score == pytest.approx(math.exp(2.5))
    assert default.score == pytest.approx(math.exp(2.6))
    assert default.kept == pytest.approx(math.exp(-0.1))


@pytest.mark.parametrize(("wrong", "passes"), [(0, True), (2, True), (3, False)])
def test_98_percent_are_asked_for(wrong: int, passes: bool) -> None:
    default = [[0.0]] * wrong + [[1.0]] * (100 - wrong)
    found, notes = verdicts([task()], rows("lines", [[1.0]] * 100, default))
    [(name, verdict)] = found.items()
    assert verdict is passes
    assert f"keeps {100 - wrong}.0%" in name
    assert "100 items" in name
    assert any("too few items" in note for note in notes) == bool(wrong)


def test_a_task_that_the_model_does_not_solve_is_told_apart() -> None:
    scores = [[1.0], [0.0], [0.0], [0.0]] * 5
    of = task("choices", chance=0.25)
    found, notes = verdicts([of], rows_of(of, contexts(scores, scores), [EXACT, DEFAULT]))
    assert list(found.values()) == [True]
    assert any("not clearly better than chance (25%)" in note for note in notes)
    nothing = [[0.0]] * 4
    found, notes = verdicts([of], rows_of(of, contexts(nothing, nothing), [EXACT, DEFAULT]))
    assert not found
    assert "scores 0" in notes[0]
