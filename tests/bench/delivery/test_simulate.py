"""The virtual clock: runs that can be worked out by hand, and rules that hold in any run."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kdn.bench.delivery.policies import POLICIES, LastBytes
from kdn.bench.delivery.simulate import Scenario, SimulatedResult, simulate
from kdn.bench.delivery.trace import LinkTrace
from kdn.delivery.estimate import Estimator
from kdn.delivery.plan import Fetch, Link, Plan, Situation
from tests.delivery.deliveries import ENDS, KLD, Steady, offers

PRIOR = Link(1000.0, 100.0, 0.1)


def steady(count: int = 4, rate: float = 1000.0, **changes: object) -> Scenario:
    base = Scenario(offers(count), Steady(0.1, 0.05), LinkTrace.steady(rate), 0.1, 5.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def run(scenario: Scenario, name: str) -> SimulatedResult:
    meter = LastBytes(100, PRIOR) if name == "cachegen" else Estimator(PRIOR)
    return simulate(scenario, POLICIES[name], meter)


def test_fixed_by_hand() -> None:
    outcome = run(steady(4), "fixed")
    # 0.1 s round trip, four times 300 bytes at 1,000 a second, the last one's decoding of 0.1 s
    assert outcome.ttft_s == pytest.approx(0.1 + 1.2 + 0.1)
    assert outcome.met
    assert outcome.kld == pytest.approx(KLD[1])
    assert outcome.levels == (2, 2, 2, 2)
    assert outcome.num_bytes == 1200


def test_requests_are_pipelined() -> None:
    """A round trip as long as the transfer itself costs its length once, not once per request."""
    outcome = run(steady(20, latency_s=1.0, deadline_s=60.0), "fixed")
    assert outcome.ttft_s == pytest.approx(1.0 + 6.0 + 0.1, rel=0.05)


def test_link_decoder_and_model_work_side_by_side() -> None:
    def two_ways(situation: Situation) -> Plan:
        todo = [Fetch(c, 1) for c in (3, 2) if not situation.progress[c].decoded]
        return Plan(tuple(todo), 2, 0.0, 0.0)

    outcome = simulate(steady(4, speeds=Steady(10.0, 0.05)), two_ways, Estimator(PRIOR))
    assert outcome.ttft_s == pytest.approx(2.0)  # the model's two chunks; all else was done by then
    assert outcome.levels == (0, 0, 1, 1)
    assert outcome.kld == pytest.approx(KLD[0] / 2)
    spans = {(e.what, e.chunk): (e.start_s, e.end_s) for e in outcome.events}
    assert spans["load", 3] == pytest.approx((0.1, 0.2))
    assert spans["load", 2] == pytest.approx((0.2, 0.3))
    assert spans["decode", 3] == pytest.approx((0.2, 0.25))
    assert spans["compute", 1] == pytest.approx((1.0, 2.0))


def test_default_ends_by_the_deadline_with_what_it_has() -> None:
    outcome = run(steady(4, rate=1000.0, deadline_s=1.5), "default")
    assert outcome.met
    assert outcome.ttft_s <= 1.5
    assert outcome.levels == (2, 2, 2, 2)


def test_default_survives_a_link_that_dies() -> None:
    trace = LinkTrace(np.array([0.0, 0.8, 60.0]), np.array([1000.0, 0.0, 1000.0]), 61.0)
    scenario = steady(4, deadline_s=3.0, trace=trace)
    assert run(scenario, "default").met  # every coarsest level came first
    assert not run(scenario, "fixed").met
    dead = LinkTrace(np.array([0.0, 0.2, 1e6]), np.array([1000.0, 0.0, 1000.0]), 1e6 + 1)
    late = run(steady(4, deadline_s=3.0, trace=dead, speeds=Steady(10.0)), "default")
    assert late.ttft_s <= 4.0 + 1e-6  # the model alone takes 4 s


@settings(max_examples=60, deadline=None)
@example([0.0, 0.0], 0.5, 0.0, 16.0, 1, "default")
@given(
    st.lists(st.floats(0, 3000), min_size=1, max_size=8),
    st.floats(0.2, 8), st.floats(0, 0.3), st.floats(0.5, 100), st.integers(1, 9),
    st.sampled_from(sorted(POLICIES)),
)  # fmt: skip
def test_every_run_ends_complete(
    rates: list[float], deadline_s: float, level_s: float, speed: float, count: int, name: str
) -> None:
    trace = LinkTrace(np.arange(len(rates)) / 2, np.array([*rates[:-1], 500.0]), len(rates) / 2)
    scenario = Scenario(offers(count), Steady(speed, level_s), trace, 0.05, deadline_s)
    outcome = run(scenario, name)
    assert outcome == run(scenario, name)
    assert outcome.met == (outcome.ttft_s <= deadline_s)
    told = [0.0 if n == 0 else KLD[n - 1] for n in outcome.levels]
    assert outcome.kld == pytest.approx(sum(told) / count)
    assert outcome.num_bytes >= sum(ENDS[n - 1] for n in outcome.levels if n)
    for what in ("load", "decode", "compute"):
        spans = [(e.start_s, e.end_s) for e in outcome.events if e.what == what]
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans)), what
    if name == "default":
        # A link that brings nothing is given up no later than by a chunk's reading.
        chunk_s = 10 / speed
        assert outcome.ttft_s <= max(1.05 * count * chunk_s, deadline_s) + chunk_s
    assert math.isfinite(outcome.ttft_s)
