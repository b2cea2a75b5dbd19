"""Throughput from arrivals: exact on a steady link, awake to changes, blind to idle time."""

from __future__ import annotations

import numpy as np
import pytest

from kdn.bench.delivery.trace import LinkTrace
from kdn.delivery.estimate import UNKNOWN, Estimator
from tests.delivery.deliveries import fed


def test_before_anything_arrives_the_prior_holds_and_wanes() -> None:
    estimator = Estimator()
    assert estimator.link() == UNKNOWN
    estimator.started(5.0)
    assert estimator.link() == UNKNOWN
    estimator.add(0, 5.03)  # the first byte
    for t_s in (5.1, 5.5, 6.0):
        estimator.add(0, t_s)
    assert estimator.link().rate < UNKNOWN.rate / 10
    assert estimator.link().low_rate > 0


def test_a_steady_link_is_found_and_becomes_sure() -> None:
    estimator = Estimator()
    estimator.started(0.0)
    fed(estimator, 1e6, 0.2, 0.3)
    early = estimator.link()
    fed(estimator, 1e6, 0.3, 4.0)
    late = estimator.link()
    assert late.rate == pytest.approx(1e6, rel=0.01)
    assert late.latency_s == pytest.approx(0.2)
    assert early.low_rate / early.rate < late.low_rate / late.rate
    assert 0.8e6 < late.low_rate < 1e6


@pytest.mark.parametrize("told", [True, False])
def test_idle_time_does_not_count(told: bool) -> None:
    estimator = Estimator()
    estimator.started(0.0)
    fed(estimator, 2e6, 0.05, 1.0)
    before = estimator.link()
    estimator.idle(1.0)
    if told:
        estimator.started(60.0)
    fed(estimator, 2e6, 60.05, 60.2)
    after = estimator.link()
    assert after.rate == pytest.approx(before.rate, rel=0.02)
    assert after.latency_s == pytest.approx(0.05)


def test_a_stall_is_seen_while_it_lasts() -> None:
    estimator = Estimator()
    estimator.started(0.0)
    fed(estimator, 1e6, 0.01, 1.0)
    for t_s in np.arange(1.0, 2.0, 0.05):
        estimator.add(0, float(t_s))
    assert estimator.link().rate < 0.4e6


def test_a_faster_link_is_seen_within_its_own_time() -> None:
    estimator = Estimator()
    estimator.started(0.0)
    fed(estimator, 1e6, 0.01, 1.0)
    fed(estimator, 9e6, 1.0, 2.0)
    assert estimator.link().rate > 6e6


def test_it_works_in_milliseconds_too() -> None:
    estimator = Estimator()
    estimator.started(0.0)
    estimator.add(0, 0.010)
    for i in range(1, 20):
        estimator.add(1_000_000, 0.010 + i * 0.0003)
    assert estimator.link().rate == pytest.approx(1e6 / 0.0003, rel=0.01)


def test_low_rate_is_exceeded_about_nine_times_of_ten() -> None:
    rng = np.random.default_rng(0)
    above = []
    for _ in range(200):
        # Rates that wander, each held for a second.
        walk = np.exp(np.cumsum(rng.normal(0, 0.25, 60)) * 0.5)
        trace = LinkTrace(np.arange(60.0), 1e6 * walk, 60.0)
        estimator = Estimator()
        estimator.started(0.0)
        for t_s in np.arange(0.0, 20.0, 0.1):
            estimator.add(int(trace.bytes_by(t_s + 0.1) - trace.bytes_by(t_s)), float(t_s))
        future = (trace.bytes_by(25.0) - trace.bytes_by(20.0)) / 5
        above.append(future > estimator.link().low_rate)
    assert 0.8 < np.mean(above) < 0.99
