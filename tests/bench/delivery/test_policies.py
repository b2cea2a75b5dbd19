"""The policies to compare with, in situations simple enough to know their answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdn.bench.delivery.policies import POLICIES, LastBytes, cachegen, fixed, mpc
from kdn.delivery.estimate import UNKNOWN
from kdn.delivery.plan import Fetch, Link, Progress, Situation
from tests.delivery.deliveries import (
    ALL_THERE,
    KLD,
    check_plan,
    fed,
    levels_of,
    situation,
    situations,
)

RIVALS = ("fixed", "cachegen", "mpc")


def test_fixed_never_changes() -> None:
    for rate in (1.0, 1e9):
        plan = fixed(situation(4, rate=rate))
        assert plan.fetches == tuple(Fetch(i, 2) for i in range(4))
        assert plan.recompute == 0


def test_the_papers_rule() -> None:
    # text if the model can read it all in time
    assert cachegen(situation(4, deadline_s=4.5)).recompute == 4
    # one chunk at a middle level while no throughput is known
    assert cachegen(situation(4, deadline_s=3.0)).fetches == (Fetch(0, 2),)
    # then the finest that fits for all the rest: 3 chunks in 2 s
    begun = {0: Progress(300, 0)}
    at = situation(4, now_s=1.0, deadline_s=3.0, progress=begun)
    for rate, level in ((1400, 3), (500, 2), (200, 1), (10, 1)):
        told = cachegen(replace(at, link=Link(rate, rate, 0.0)))
        assert levels_of(told, 4) == [2, level, level, level], rate
        assert [f.chunk for f in told.fetches] == [0, 1, 2, 3]


def test_mpc_trusts_the_low_rate_only() -> None:
    plan = mpc(situation(10, deadline_s=2.5, rate=1e6, low_rate=900))
    assert plan.recompute == 2
    assert sorted(levels_of(plan, 10)[2:]) == [1, 2, 2, 2, 2, 2, 2, 2]


def test_mpc_lets_the_model_read_all_over_a_hopeless_link() -> None:
    assert mpc(situation(10, deadline_s=4.0, rate=1.0)).recompute == 10


@pytest.mark.parametrize("name", RIVALS)
def test_nothing_is_left_to_do_when_all_is_there(name: str) -> None:
    plan = POLICIES[name](ALL_THERE)
    assert plan.fetches == ()
    assert plan.kld == pytest.approx(0.8 * KLD[2])


@settings(max_examples=300, deadline=None)
@given(situations, st.sampled_from(RIVALS))
def test_every_plan_makes_sense(at: Situation, name: str) -> None:
    plan = POLICIES[name](at)
    if name == "cachegen" and not any(one.arrived_bytes for one in at.progress):
        assert len(plan.fetches) <= 1  # begins with one chunk, or with the model
    else:
        check_plan(plan, at)


def test_the_papers_rule_looks_at_one_chunk_only() -> None:
    last = LastBytes(100_000)
    assert last.link() == UNKNOWN
    last.started(0.0)
    fed(last, 1e6, 0.05, 1.0)
    fed(last, 5e6, 1.0, 1.1)
    assert last.link().rate == pytest.approx(5e6, rel=0.01)
    last.idle(1.1)
    last.started(9.0)
    fed(last, 5e6, 9.1, 9.3)
    assert last.link().rate == pytest.approx(5e6, rel=0.01)
