"""The default policy: level by level, the surest first, with the model reading from the front.

Streams are layered, so nothing fetched is ever wasted by a later choice, and what counts is only
the order. That makes the plan robust without trusting the estimate:

- The model reads from the front as many chunks as it can before the deadline. That depends on its
  own speed only, costs the link nothing and is exact.
- The coarsest level of all other chunks comes first, from the back. Should it not be there in
  time, what is missing lies next to where the model is: it just reads on, and the whole hardly ever
  takes longer than reading everything. A model that has no time for a chunk before the deadline
  waits for the link instead; if that fails, it begins late, by less than it takes to read a chunk.
- Then the levels that will surely arrive (at `low_rate`), chunk by chunk, so that each is decoded
  once; then everything else, best gain for its cost first, which is nearly level by level. At the
  deadline the best that arrived is used.
- A chunk waits for decoding until it has the levels that are expected, as long as the decoder has
  the time to spare for all chunks; if it has time for both, it decodes what there is meanwhile.

If what is asked for (`enough_kld`) can surely be had before the deadline, the aim is to have it
soon.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from kdn.delivery.outlook import Ints, Outlook
from kdn.delivery.plan import Fetch, Plan, Situation
from kdn.delivery.steps import Steps

SAFETY = 3
"""Coarsest levels need not come first if so much less than `low_rate` would bring them in time."""
WORST = 3
"""No chunk is to be more times worse than what is asked of the mean."""
_ROUNDING = 1 + 1e-9
_FED = 16
"""Chunks for which it is thought through when the decoder will need them."""


def default(situation: Situation) -> Plan:
    outlook = Outlook(situation)
    soon = _enough_soon(outlook)
    return soon or _best_by_deadline(outlook)


def _enough_soon(outlook: Outlook) -> Plan | None:
    """All good enough as soon as possible, if that is before the deadline for sure."""
    situation, rate = outlook.situation, outlook.situation.link.low_rate
    endless = math.isinf(situation.deadline_s)
    if not endless and situation.enough_kld < outlook.table.kld.min():
        return None
    levels = _enough(outlook, outlook.computed)
    recompute, done_s = outlook.soonest(levels, rate)
    if recompute > outlook.computed:
        # What the model reads is exact, so that the rest may be coarser.
        levels = _enough(outlook, recompute)
        recompute, done_s = outlook.soonest(levels, rate, recompute)
    kld = outlook.kld_with(levels, recompute)
    if not endless and (done_s > situation.deadline_s or kld > situation.enough_kld * _ROUNDING):
        return None
    fetches = [
        outlook.table.fetches[chunk][int(levels[chunk]) - 1]
        for chunk in range(len(outlook) - 1, recompute - 1, -1)
        if outlook.decoded[chunk] < levels[chunk]
    ]
    return Plan(tuple(fetches), recompute, done_s, kld)


def _enough(outlook: Outlook, first: int) -> Ints:
    """Levels with which the mean is good enough if the model reads all before `first`: the cheapest
    such, but none so coarse that what the chunk holds would be forgotten."""
    tolerable = outlook.table.kld <= WORST * outlook.situation.enough_kld
    least = np.where(tolerable.any(axis=1), tolerable.argmax(axis=1) + 1, outlook.table.levels)
    steps = Steps(outlook, np.maximum(least, outlook.decoded), first)
    return steps.levels_with(steps.enough())


def _best_by_deadline(outlook: Outlook) -> Plan:
    situation = outlook.situation
    rate, low_rate = situation.link.rate, situation.link.low_rate
    base = np.maximum(outlook.decoded, 1)
    first = max(outlook.in_time(), outlook.computed)
    steps = Steps(outlook, base, first)
    left_s = outlook.left_s
    expected, sure = steps.fitting(left_s, rate), steps.fitting(left_s, low_rate)
    targets = steps.levels_with(expected)
    sure_levels = steps.levels_with(min(sure, expected))
    coarsest, surely = _coarsest(outlook, first), _surely(outlook, sure_levels, base, first)
    to_load = _fed(outlook, coarsest, surely, left_s)
    to_load += _further(outlook, sure_levels, steps, steps.fitting(left_s, math.inf))
    spare_s = max((left_s - steps.work_s(expected)) / 2, _until_ready_s(outlook, targets, to_load))
    fetches = _to_decode(outlook, targets, first, spare_s) + to_load
    recompute, done_s = first, situation.now_s + steps.end_s(expected, rate)
    if done_s > situation.deadline_s:
        recompute, done_s = outlook.soonest(targets, rate, first)
    done_s = max(done_s, float(outlook.computed_s()[recompute]))
    return Plan(tuple(fetches), recompute, done_s, outlook.kld_with(targets, recompute))


def _to_decode(outlook: Outlook, targets: Ints, first: int, spare_s: float) -> list[Fetch]:
    """What has arrived and is to be decoded now, that which is not in the cache at all first."""
    table = outlook.table
    here = np.flatnonzero(outlook.arrived[first:] > outlook.decoded[first:]) + first
    ready = here[(outlook.arrived[here] >= targets[here]) & (targets[here] > outlook.decoded[here])]
    ready = ready[outlook.decoded[ready].argsort(kind="stable")]
    if len(ready):
        return [table.fetches[chunk][targets[chunk] - 1] for chunk in ready.tolist()]
    early = here[targets[here] > outlook.arrived[here]]
    early = early[outlook.decoded[early].argsort(kind="stable")]
    found = [table.fetches[chunk][outlook.arrived[chunk] - 1] for chunk in early[:1].tolist()]
    return [one for one in found if table.decode_s[one.chunk, one.levels - 1] <= spare_s]


def _coarsest(outlook: Outlook, first: int) -> list[Fetch]:
    """From the back."""
    chunks = np.flatnonzero(outlook.arrived[first:] == 0)[::-1] + first
    return [outlook.table.fetches[chunk][0] for chunk in chunks.tolist()]


def _fed(
    outlook: Outlook, coarsest: list[Fetch], surely: list[Fetch], left_s: float
) -> list[Fetch]:
    """Coarsest levels first. If they are safe and decoding takes longer than loading, whole chunks
    come among them just in time for the decoder, which else would have to wait or to decode the
    coarsest for want of better."""
    table, link = outlook.table, outlook.situation.link
    missing = sum(float(table.ends[one.chunk, 0] - outlook.bytes[one.chunk]) for one in coarsest)
    if not coarsest or missing * SAFETY > link.low_rate * left_s:
        return coarsest + surely
    order: list[Fetch] = []
    others = deque(coarsest)
    link_s, decoder_s = 0.0, 0.0
    fed = 0
    for fetch in surely[:_FED]:
        own_s = (table.ends[fetch.chunk, fetch.levels - 1] - outlook.bytes[fetch.chunk]) / link.rate
        if own_s > table.decode_s[fetch.chunk, fetch.levels - 1]:
            break
        while others and decoder_s > link_s + 2 * own_s:
            other = others.popleft()
            order.append(other)
            link_s += (table.ends[other.chunk, 0] - outlook.bytes[other.chunk]) / link.rate
        order.append(fetch)
        fed += 1
        link_s += own_s
        decoder_s = max(decoder_s, link_s) + table.decode_s[fetch.chunk, fetch.levels - 1]
    listed = {one.chunk for one in order}
    return order + [one for one in others if one.chunk not in listed] + surely[fed:]


def _until_ready_s(outlook: Outlook, targets: Ints, to_load: list[Fetch]) -> float:
    """How long the decoder will have nothing that is as good as expected, loading in this order."""
    missing = 0.0
    for fetch in to_load:
        end = outlook.table.ends[fetch.chunk, fetch.levels - 1]
        missing += max(0.0, end - outlook.bytes[fetch.chunk])
        if fetch.levels >= targets[fetch.chunk]:
            break
    return missing / outlook.situation.link.rate


def _surely(outlook: Outlook, sure: Ints, base: Ints, first: int) -> list[Fetch]:
    """Chunk by chunk; those that need least first, so that the decoder soon has work."""
    table = outlook.table
    chunks = np.flatnonzero((sure > base) & (sure > outlook.arrived))
    chunks = chunks[chunks >= first]
    missing = table.ends[chunks, sure[chunks] - 1] - outlook.bytes[chunks]
    return [table.fetches[c][sure[c] - 1] for c in chunks[missing.argsort(kind="stable")].tolist()]


def _further(outlook: Outlook, sure: Ints, steps: Steps, count: int) -> list[Fetch]:
    fetches = outlook.table.fetches
    known = np.maximum(outlook.arrived, sure)
    absent = steps.levels[:count] > known[steps.chunks[:count]]
    chunks, levels = steps.chunks[:count][absent], steps.levels[:count][absent]
    return [
        fetches[chunk][level - 1]
        for chunk, level in zip(chunks.tolist(), levels.tolist(), strict=True)
    ]
