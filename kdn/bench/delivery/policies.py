"""The policies by name: the default beside simple ones, and how the CacheGen paper sees a link.

The simple ones (a fixed level, the paper's rule, robust MPC) choose once per chunk and fetch chunk
by chunk, as with streams that are stored once per level.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from kdn.delivery.estimate import UNKNOWN
from kdn.delivery.outlook import Ints, Outlook
from kdn.delivery.plan import Fetch, Link, Plan, Policy, Situation
from kdn.delivery.planner import default
from kdn.delivery.steps import Steps

FIXED_LEVELS = 2
FIRST_LEVELS = 2
"""The paper's first chunk has a middle level, as no throughput is known yet."""


def fixed(situation: Situation) -> Plan:
    """Every chunk at the same level, whatever happens."""
    outlook = Outlook(situation)
    levels = np.minimum(FIXED_LEVELS, outlook.table.levels)
    return _in_order(outlook, levels, 0)


def cachegen(situation: Situation) -> Plan:
    """The least lossy choice that fits the time left if the last chunk's throughput holds: text if
    the model can read all that is missing, else one level for all that is missing, decoding times
    included. What cannot fit goes at the coarsest level. Text is chosen for a beginning only: what
    follows something loaded is loaded."""
    outlook = Outlook(situation)
    table = outlook.table
    # What has begun to arrive is decided: the fewest levels that hold what is here.
    begun = np.minimum((outlook.bytes[:, None] > table.ends).sum(axis=1) + 1, table.levels)
    open_ = outlook.bytes == 0
    open_[: outlook.computed] = False
    nothing_loaded = bool(open_[outlook.computed :].all())
    if nothing_loaded and outlook.computed_s()[-1] <= situation.deadline_s:
        return _in_order(outlook, table.levels, len(outlook))
    if nothing_loaded and not outlook.computed:  # one chunk tells the throughput
        first = np.minimum(FIRST_LEVELS, table.levels)
        return replace(_in_order(outlook, first, 0), fetches=(table.fetches[0][int(first[0]) - 1],))
    for level in range(int(table.levels.max()), 0, -1):
        levels = np.where(open_, np.minimum(level, table.levels), begun)
        done_s = outlook.loaded_s(levels, situation.link.rate)[outlook.computed]
        if done_s <= situation.deadline_s:
            break
    return _in_order(outlook, levels, outlook.computed)


def mpc(situation: Situation) -> Plan:
    """Model predictive control against a low estimate: the model reads what it can in time, and of
    all chunks left the levels are raised evenly as long as everything fits at `low_rate`."""
    outlook = Outlook(situation)
    table = outlook.table
    least = np.maximum(np.maximum(outlook.arrived, outlook.decoded), 1)
    recompute = outlook.in_time()
    rate = situation.link.low_rate
    if outlook.loaded_s(least, rate)[recompute] > situation.deadline_s:
        recompute, _ = outlook.soonest(least, rate)
    steps = Steps(outlook, least, recompute)
    levels = steps.levels_with(steps.fitting(outlook.left_s, rate))
    wanted = list(enumerate(levels.tolist()))[: recompute - 1 if recompute else None : -1]
    fetches = [table.fetches[chunk][level - 1] for chunk, level in wanted]
    return _plan(outlook, fetches, levels, recompute)


def _in_order(outlook: Outlook, levels: Ints, recompute: int) -> Plan:
    """From the front to the back."""
    wanted = enumerate(levels.tolist()[recompute:], recompute)
    fetches = [outlook.table.fetches[chunk][level - 1] for chunk, level in wanted]
    return _plan(outlook, fetches, levels, recompute)


def _plan(outlook: Outlook, fetches: list[Fetch], levels: Ints, recompute: int) -> Plan:
    first = max(recompute, outlook.computed)
    decoded = outlook.decoded.tolist()
    todo = tuple(one for one in fetches if one.chunk >= first and decoded[one.chunk] < one.levels)
    done_s = outlook.loaded_s(levels, outlook.situation.link.rate)[recompute]
    done_s = max(done_s, outlook.computed_s()[recompute])
    kld = outlook.kld_with(np.maximum(levels, outlook.decoded), first)
    return Plan(todo, recompute, float(done_s), kld)


POLICIES: dict[str, Policy] = {
    "fixed": fixed,
    "cachegen": cachegen,
    "mpc": mpc,
    "default": default,
}


class LastBytes:
    """The mean rate of the latest bytes, as many as a chunk has: what the CacheGen paper assumes to
    hold for the next chunk. No uncertainty."""

    def __init__(self, num_bytes: int, prior: Link = UNKNOWN) -> None:
        self._want = num_bytes
        self._prior = prior
        self._last_s: float | None = None
        self._samples: deque[tuple[int, float]] = deque()
        self._sum_bytes = 0
        self._sum_s = 0.0

    def started(self, t_s: float) -> None:
        self._last_s = None

    def idle(self, t_s: float) -> None:
        self._last_s = None

    def add(self, num_bytes: int, t_s: float) -> None:
        if self._last_s is not None:
            sample = (num_bytes, max(0.0, t_s - self._last_s))
            self._samples.append(sample)
            self._sum_bytes += sample[0]
            self._sum_s += sample[1]
            while self._sum_bytes - self._samples[0][0] >= self._want:
                gone = self._samples.popleft()
                self._sum_bytes -= gone[0]
                self._sum_s -= gone[1]
        self._last_s = t_s

    def link(self) -> Link:
        if self._sum_s <= 0 or self._sum_bytes <= 0:
            return self._prior
        rate = self._sum_bytes / self._sum_s
        return Link(rate, rate, self._prior.latency_s)
