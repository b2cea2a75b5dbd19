"""Reports and measurements of the same questions."""

from __future__ import annotations

import numpy as np
import pytest

from kdn.bench.blend.methods import Method
from kdn.bench.blend.paired import Entry, measured, pooled, reported
from kdn.bench.blend.rows import BlendRow, Outcome

SETS = {"a, first half": "a", "a, second half": "a"}
SEAMS = Method("seams", "repaired")


def outcome(question: str, kld: float, method: Method = SEAMS) -> Outcome:
    return Outcome(method, "exact", 2 * kld, kld, True, 1.0, 1.0, 0.1, 9, 9, question)


def entries(half: str, expected: dict[str, float], found: dict[str, list[float]]) -> list[Entry]:
    answers = {one: {0.0: (2 * kld, kld)} for one, kld in expected.items()}
    outcomes = [outcome(one, kld) for one, klds in found.items() for kld in klds]
    return [*reported(half, answers), *measured(half, outcomes)]


def test_only_questions_that_stand_on_both_sides_count_each_once() -> None:
    every = entries("a, first half", {"x": 3.0, "y": 1.0, "u": 50.0}, {"x": [1.0, 3.0], "y": [2.0]})
    every += entries("a, second half", {"z": 2.0}, {"z": [1.0], "v": [70.0]})
    every += entries("b", {"x": 9.0}, {"x": [1.0]})  # no half: measured by other seams
    first, mean = pooled(every, SETS)
    assert (mean["expected"], mean["measured"]) == (2.0, pytest.approx(5 / 3))
    assert mean["off"] == pytest.approx(6 / 5 - 1)
    assert (mean["data"], mean["codec"], mean["share"], mean["items"]) == ("a", "exact", 0.0, 3)
    assert mean["interval"] is None  # of three questions nothing can be said
    assert (first["figure"], first["expected"]) == ("kld_first", 4.0)


def test_what_differs_between_questions_does_not_widen_the_interval() -> None:
    random = np.random.default_rng(0)
    klds = np.exp(1.2 * random.standard_normal(40))

    def interval(noise: float) -> tuple[float, float]:
        expected = 1.2 * klds * np.exp(noise * random.standard_normal(40) - noise**2 / 2)
        every = entries(
            "a, first half",
            {str(i): kld for i, kld in enumerate(expected)},
            {str(i): [kld] for i, kld in enumerate(klds)},
        )
        low, high = next(pooled(every, SETS))["interval"]
        return float(low), float(high)

    assert interval(0.0) == pytest.approx((0.2, 0.2))
    low, high = interval(0.5)
    assert low < 0.2 < high
    assert 0.1 < high - low < 0.8


def test_other_ways_are_no_part_of_it() -> None:
    assert not [*measured("a, first half", [outcome("x", 1.0, Method("join", "joined"))])]


def test_orders_of_a_question_make_no_mean_surer() -> None:
    klds = [0.1, 0.3, 0.2, 0.9, 0.4, 0.2]
    once = [outcome(str(i), kld) for i, kld in enumerate(klds)]
    one, four = BlendRow.of("a", once), BlendRow.of("a", once * 4)
    assert (four.items, four.answers) == (6, 24)
    assert four.kld == pytest.approx(one.kld)
    assert four.kld_interval == pytest.approx(one.kld_interval)
