"""Plans in situations simple enough to know the answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from kdn.delivery.outlook import Outlook
from kdn.delivery.plan import Fetch, Progress, Reading, Situation
from kdn.delivery.planner import default
from tests.delivery.deliveries import (
    ALL_THERE,
    ENDS,
    KLD,
    Steady,
    check_plan,
    levels_of,
    offers,
    situation,
    situations,
)

HERE = {level: Progress(arrived_bytes=ENDS[level - 1]) for level in (1, 2, 3)}


def test_the_model_reads_what_it_can_in_time_and_the_rest_comes_from_the_back() -> None:
    plan = default(situation(10, deadline_s=2.5, low_rate=10))
    assert plan.recompute == 2
    assert [f.chunk for f in plan.fetches[:8]] == [9, 8, 7, 6, 5, 4, 3, 2]
    assert {f.levels for f in plan.fetches[:8]} == {1}


def test_levels_that_surely_arrive_are_fetched_chunk_by_chunk() -> None:
    plan = default(situation(10, deadline_s=2.5, rate=1e6))
    assert [f.levels for f in plan.fetches] == [1] * 8 + [3] * 8


def test_a_decoder_slower_than_the_link_is_fed_whole_chunks_at_once() -> None:
    speeds = Steady(tokens_per_s=0.1, level_s=0.08)
    fed = default(situation(10, deadline_s=2.5, rate=1e5, speeds=speeds))
    assert fed.fetches[0].levels == 3
    assert sum(f.levels == 1 for f in fed.fetches[:4]) > 0  # coarsest ones while it decodes
    assert {f.chunk for f in fed.fetches} == set(range(10))
    unsafe = default(situation(10, deadline_s=2.5, rate=1e5, low_rate=100.0, speeds=speeds))
    assert [f.levels for f in unsafe.fetches[:10]] == [1] * 10


def test_levels_that_may_arrive_are_fetched_level_by_level() -> None:
    # 8 chunks, coarsest levels take 0.8 s, second ones 1.6 s more: most fit, none is sure
    plan = default(situation(10, deadline_s=2.5, rate=1000, low_rate=300))
    assert [f.levels for f in plan.fetches[8:16]] == [2] * 8
    assert {f.levels for f in plan.fetches[16:]} == {3}
    assert plan.kld == pytest.approx((8 * KLD[1]) / 10, rel=0.15)


def test_with_a_hopeless_link_the_model_reads_everything() -> None:
    plan = default(situation(10, deadline_s=4.0, rate=1.0))
    assert plan.recompute == 10
    assert plan.done_s == pytest.approx(10, rel=0.05)


def test_a_link_too_slow_for_the_deadline_meets_the_model_in_the_middle() -> None:
    # a chunk takes a second either way
    plan = default(situation(10, deadline_s=2.0, rate=100.0))
    assert plan.recompute == 5
    assert plan.done_s == pytest.approx(5, rel=0.05)


def test_time_gone_by_counts_for_a_model_that_is_behind() -> None:
    late = default(situation(10, now_s=2.4, deadline_s=3.5, rate=1e6))
    assert late.recompute <= 2
    done = {0: Progress(computed=True), 1: Progress(computed=True)}
    on_time = default(situation(10, now_s=2.1, deadline_s=3.5, rate=1e6, progress=done))
    assert on_time.recompute == 3


def test_good_enough_soon_ends_the_fetching_early() -> None:
    plan = default(situation(10, deadline_s=60.0, rate=1e6, enough_kld=0.01))
    assert set(levels_of(plan, 10)[plan.recompute :]) == {2}
    assert plan.done_s < 1.1
    endless = default(situation(10, deadline_s=math.inf, rate=1e6, enough_kld=0.01))
    assert endless == plan
    everything = default(situation(10, deadline_s=math.inf, rate=1e6))
    assert set(levels_of(everything, 10)[everything.recompute :]) == {3}


def test_good_enough_is_a_mean_and_the_end_counts_most() -> None:
    # at two levels .01 each, at three .001: .006 is reached with five of ten at three
    mean = default(situation(10, deadline_s=60.0, rate=1e6, enough_kld=0.006))
    levels = levels_of(mean, 10)
    assert levels.count(2) == 5
    assert levels.count(3) == 5
    assert mean.kld <= 0.006
    first = situation(10, deadline_s=60.0, rate=1e6, enough_kld=0.006)
    weighed = tuple(replace(one, weight=9.0 if i == 9 else 1.0) for i, one in enumerate(offers(10)))
    # the last chunk is half of the mean: with it at three, .0055 is reached
    plan = default(replace(first, offers=weighed))
    assert levels_of(plan, 10) == [2] * 9 + [3]
    assert plan.kld == pytest.approx((KLD[1] + KLD[2]) / 2)


def test_no_chunk_is_left_so_coarse_that_it_is_forgotten() -> None:
    # the model reads half, exactly; .01 on average would allow .02 for the others
    plan = default(situation(10, deadline_s=60.0, rate=300.0, enough_kld=0.01))
    assert plan.recompute > 0
    assert set(levels_of(plan, 10)[plan.recompute :]) == {2}


def test_a_piece_in_hand_is_done_all_at_once() -> None:
    # two chunks since 0.5 s: both at 2.5 s and a little, not one at 1.5 s
    busy = replace(situation(10, now_s=1.0, deadline_s=2.0), reading=Reading(2, 0.5))
    assert Outlook(busy).computed_s()[:4] == pytest.approx([1.0, 2.56, 2.56, 3.59])
    assert Outlook(busy).in_time() == 0
    late = replace(busy, now_s=4.5, deadline_s=10.0)
    assert Outlook(late).computed_s()[2] == pytest.approx(4.9)


def test_on_a_shared_processor_the_model_reads_along_only_if_that_is_worth_it() -> None:
    speeds = Steady(tokens_per_s=10.0, level_s=0.0)
    for rate, least, most in ((1200.0, 0, 0), (400.0, 3, 5)):  # all in 2.5 s, or in 7.5 s
        one = situation(10, deadline_s=math.inf, rate=rate, enough_kld=0.01, speeds=speeds)
        assert least <= default(replace(one, shared=True)).recompute <= most
        assert default(one).recompute > 0


def test_a_chunk_waits_for_its_levels_only_while_there_is_time() -> None:
    # decoding takes 0.1 s a level; the decoder has no time for a chunk twice
    speeds = Steady(tokens_per_s=0.1, level_s=0.1)
    progress = dict.fromkeys(range(10), HERE[1])
    first = situation(10, deadline_s=2.1, rate=1e6, speeds=speeds, progress=progress)
    plan = default(first)
    assert plan.fetches[0].levels == 2  # all ten fit at two levels: no decoding at one
    late = replace(first, now_s=1.05)
    assert default(late).fetches[0] == Fetch(0, 1)
    idle = replace(first, deadline_s=30.0)  # at leisure: what is here, and later again
    assert default(idle).fetches[0] == Fetch(0, 1)


def test_what_arrived_is_decoded_no_finer_than_there_is_time_for() -> None:
    speeds = Steady(tokens_per_s=0.1, level_s=0.1)
    progress = dict.fromkeys(range(10), HERE[3])
    plan = default(situation(10, deadline_s=1.05, rate=1e6, speeds=speeds, progress=progress))
    assert [f.levels for f in plan.fetches] == [1] * 10


def test_nothing_is_left_to_do_when_all_is_there() -> None:
    plan = default(ALL_THERE)
    assert plan.fetches == ()
    assert plan.kld == pytest.approx(0.8 * KLD[2])


@settings(max_examples=300, deadline=None)
@given(situations)
def test_every_plan_makes_sense(at: Situation) -> None:
    plan = default(at)
    check_plan(plan, at)
    if at.now_s == 0:
        alone_s = at.speeds.prefill_s(0, 10 * len(at.offers)) * 1.03
        assert plan.done_s <= max(alone_s, at.deadline_s) + 1e-9
