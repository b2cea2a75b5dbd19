"""Intervals of means hold the true mean about as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from kdn.engines.uncertainty import LEAST_NUMBERS, mean_interval


@pytest.mark.parametrize("deviation", [0.5, 1.0])
def test_nine_of_ten_intervals_hold_the_mean(deviation: float) -> None:
    random = np.random.default_rng(0)
    mean = np.exp(deviation**2 / 2)
    found = [mean_interval(random.lognormal(0, deviation, 30)) for _ in range(200)]
    held = [one is not None and one[0] <= mean <= one[1] for one in found]
    assert 0.82 <= np.mean(held) <= 0.97


def test_a_large_number_moves_the_upper_end_more() -> None:
    low, high = mean_interval([1.0, 1.2, 0.8, 0.9, 1.1, 1.0, 9.0]) or (0.0, 0.0)
    mean = 15 / 7
    assert 0 <= low < mean < high
    assert high - mean > mean - low


def test_the_interval_stays_within_the_numbers() -> None:
    """Most samples lack the one large number, and say by themselves that they are sure."""
    rare = [1e-5 * (1 + i % 3) for i in range(39)] + [0.4]
    low, high = mean_interval(rare) or (0.0, 0.0)
    assert min(rare) <= low < np.mean(rare) < high <= 0.4
    low, high = mean_interval([0.0, 0.0, 0.0, 0.0, 1.0]) or (0.0, 0.0)
    assert (low, high) == (0.0, 1.0)


def test_equal_numbers_leave_no_doubt_and_few_leave_nothing_to_say() -> None:
    assert mean_interval([0.5] * 8) == (0.5, 0.5)
    assert mean_interval([0.0] * 8) == (0.0, 0.0)
    assert mean_interval([1.0] * (LEAST_NUMBERS - 1)) is None
    assert mean_interval([1.0, 2.0, 3.0, 2.0, 1.0]) == mean_interval([1.0, 2.0, 3.0, 2.0, 1.0])
