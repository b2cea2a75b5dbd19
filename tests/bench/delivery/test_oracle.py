"""The oracle against every schedule there is, on deliveries small enough to try them all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from kdn.bench.delivery.oracle import Oracle
from kdn.bench.delivery.policies import POLICIES
from kdn.bench.delivery.simulate import Scenario, simulate
from kdn.bench.delivery.trace import LinkTrace
from kdn.delivery.estimate import Estimator
from kdn.delivery.plan import Link, Offer
from tests.delivery.deliveries import Steady, offers


def schedules(scenario: Scenario) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    """When each way of delivering ends, its divergence, and its levels (0: read by the model)."""
    count = len(scenario.offers)
    tokens = sum(offer.num_tokens for offer in scenario.offers)
    for first in range(count + 1):
        model_s = sum(scenario.prefill_s(i) for i in range(first))
        rest = range(first, count)
        for levels in product(*(range(1, len(scenario.offers[i].level_ends) + 1) for i in rest)):
            chosen = dict(zip(rest, levels, strict=True))
            kld = sum(
                scenario.offers[i].num_tokens / tokens * scenario.offers[i].expected_kld[n - 1]
                for i, n in chosen.items()
            )
            end_s = min(loading_s(scenario, order, chosen) for order in permutations(rest))
            yield max(model_s, end_s), kld, levels


def loading_s(scenario: Scenario, order: tuple[int, ...], levels: dict[int, int]) -> float:
    free_s, total = 0.0, 0
    for chunk in order:
        total += scenario.offers[chunk].level_ends[levels[chunk] - 1]
        free_s = max(free_s, scenario.arrived_s(total)) + scenario.decode_s(chunk, levels[chunk])
    return free_s


def random_scenario(seed: int) -> Scenario:
    rng = np.random.default_rng(seed)
    offers = []
    for _ in range(4):
        sizes = np.cumsum(rng.integers(50, 400, 3))
        kld = np.sort(rng.uniform(0.001, 0.05, 3))[::-1]
        offers.append(Offer(int(rng.integers(5, 20)), tuple(sizes.tolist()), tuple(kld.tolist())))
    rates = rng.uniform(0, 600, 8)
    return Scenario(
        offers=tuple(offers),
        speeds=Steady(float(rng.uniform(3, 30)), float(rng.uniform(0.01, 0.4))),
        trace=LinkTrace(np.arange(8) * 0.5, rates, 4.0, float(rng.uniform(0, 4))),
        latency_s=0.05,
        deadline_s=0.0,
        decode_slow=tuple(rng.uniform(0.9, 1.1, 4).tolist()),
        prefill_slow=tuple(rng.uniform(0.9, 1.1, 4).tolist()),
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_is_better(seed: int) -> None:
    scenario = random_scenario(seed)
    oracle = Oracle(scenario)
    least_s = oracle.least_s()
    ways = list(schedules(scenario))
    fastest_s = min(end_s for end_s, _, _ in ways)
    assert fastest_s - 1e-9 <= least_s <= 1.15 * fastest_s
    gaps = []
    for factor in (1.0, 1.1, 1.5, 2, 4):
        in_time = [kld for end_s, kld, _ in ways if end_s <= factor * least_s]
        bound = oracle.best_kld(factor * least_s)
        assert bound <= min(in_time) + 1e-9
        gaps.append(min(in_time) - bound)
    assert np.mean(gaps) < 0.01  # a bound, and not a trivial one


def test_no_time_no_delivery() -> None:
    scenario = random_scenario(3)
    oracle = Oracle(scenario)
    assert math.isinf(oracle.best_kld(0.2 * oracle.least_s()))
    model_s = sum(scenario.prefill_s(i) for i in range(4))
    assert oracle.best_kld(model_s) == 0
    assert oracle.least_s() <= model_s


def test_by_hand() -> None:
    # 5 chunks of 100, 300 or 900 bytes, 1,000 bytes a second, no decoding, a slow model
    scenario = Scenario(offers(5), Steady(1.0), LinkTrace.steady(1000.0), 0.1, 0.0)
    oracle = Oracle(scenario)
    assert oracle.least_s() == pytest.approx(0.6)
    assert oracle.best_kld(0.6) == pytest.approx(0.04)
    assert oracle.best_kld(1.6) == pytest.approx(0.01)
    assert oracle.best_kld(1.1) == pytest.approx((3 * 0.04 + 2 * 0.01) / 5)  # no half steps


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_policy_beats_it(name: str, seed: int) -> None:
    scenario = random_scenario(seed)
    oracle = Oracle(scenario)
    for factor in (1.1, 2.0):
        deadline_s = factor * oracle.least_s()
        timed = replace(scenario, deadline_s=deadline_s)
        outcome = simulate(timed, POLICIES[name], Estimator(Link(500.0, 50.0, 0.05)))
        if outcome.met:
            assert outcome.kld >= oracle.best_kld(deadline_s) - 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_of_equal_chunks_is_better(seed: int) -> None:
    """Chunks of one profile: numbers per level are tried, and the bound is nearly reached."""
    scenario = random_scenario(seed)
    rng = np.random.default_rng(seed)
    kld = tuple(np.sort(rng.uniform(0.001, 0.05, 3))[::-1].tolist())
    equal = tuple(
        Offer(10, tuple(int(end * factor) for end in (100, 300, 900)), kld)
        for factor in np.exp(rng.normal(0, 0.1, 4))
    )
    scenario = replace(scenario, offers=equal)
    oracle = Oracle(scenario)
    ways = list(schedules(scenario))
    gaps = []
    for factor in (1.1, 1.5, 2, 4):
        deadline_s = factor * oracle.least_s()
        best = min(kld for end_s, kld, _ in ways if end_s <= deadline_s)
        bound = oracle.best_kld(deadline_s)
        assert bound <= best + 1e-9
        gaps.append(best - bound)
    assert np.mean(gaps) < 0.004
