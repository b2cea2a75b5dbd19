"""Small deliveries for the tests of planning, in round figures, to be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kdn.delivery.flight import ThroughputEstimator
from kdn.delivery.plan import Link, Offer, Plan, Progress, Situation

KLD = (0.04, 0.01, 0.001)
ENDS = (100, 300, 900)


@dataclass(frozen=True)
class Steady:
    """A model of so many tokens a second, and a decoder of so many seconds a chunk and level."""

    tokens_per_s: float = 10.0
    level_s: float = 0.0

    def decode_s(self, num_tokens: int, levels: int) -> float:
        return self.level_s * levels

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) / self.tokens_per_s


SPEEDS = Steady()


def offers(count: int) -> tuple[Offer, ...]:
    """Chunks of 10 tokens: a second each for the model."""
    return tuple(Offer(10, ENDS, KLD) for _ in range(count))


def situation(
    count: int = 10,
    *,
    now_s: float = 0.0,
    deadline_s: float = 2.5,
    rate: float = 1000.0,
    low_rate: float | None = None,
    enough_kld: float = 0.0,
    speeds: Steady = SPEEDS,
    progress: dict[int, Progress] | None = None,
) -> Situation:
    return Situation(
        now_s=now_s,
        deadline_s=deadline_s,
        enough_kld=enough_kld,
        offers=offers(count),
        progress=tuple((progress or {}).get(i, Progress()) for i in range(count)),
        link=Link(rate, rate if low_rate is None else low_rate, 0.0),
        speeds=speeds,
    )


ALL_THERE = situation(
    10,
    now_s=2.2,
    deadline_s=2.5,
    progress={i: Progress(computed=True) if i < 2 else Progress(900, 3) for i in range(10)},
)
"""The model has read two chunks; eight are decoded at all levels."""

situations = st.builds(
    lambda now, left, rate, low, level_s, speed, states, enough: Situation(
        now_s=now,
        deadline_s=now + left,
        enough_kld=enough,
        offers=offers(len(states)),
        progress=tuple(
            Progress(ENDS[max(a, d) - 1] + part if max(a, d) else part, d) for a, d, part in states
        ),
        link=Link(rate, rate * low, 0.01),
        speeds=Steady(speed, level_s),
    ),
    st.floats(0, 10), st.floats(-1, 20), st.floats(1, 1e6), st.floats(0.01, 1),
    st.floats(0, 0.5), st.floats(0.1, 1000),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=9
    ),
    st.sampled_from([0.0, 0.01]),
)  # fmt: skip


def levels_of(plan: Plan, count: int) -> list[int]:
    levels = [0] * count
    for fetch in plan.fetches:
        levels[fetch.chunk] = max(levels[fetch.chunk], fetch.levels)
    return levels


def check_plan(plan: Plan, at: Situation) -> None:
    """It fetches nothing that is decoded, and forgets no chunk."""
    count = len(at.offers)
    assert 0 <= plan.recompute <= count
    assert len(set(plan.fetches)) == len(plan.fetches)
    for fetch in plan.fetches:
        assert at.progress[fetch.chunk].decoded < fetch.levels <= len(ENDS)
    # whatever is neither the model's nor in the cache is on the list
    absent = {i for i in range(plan.recompute, count) if not at.progress[i].decoded}
    # or waits for more levels, or its turn
    whole = {i for i in absent if at.progress[i].arrived_bytes >= ENDS[0]}
    assert absent - whole <= {fetch.chunk for fetch in plan.fetches}
    assert math.isfinite(plan.done_s)
    assert 0 <= plan.kld <= KLD[0]


def fed(estimator: ThroughputEstimator, rate: float, start_s: float, end_s: float) -> None:
    for t_s in np.arange(start_s, end_s, 0.01):
        estimator.add(int(rate * 0.01), float(t_s))
