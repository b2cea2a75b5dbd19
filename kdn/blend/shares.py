"""How much of a join to compute anew: as little as is good enough, by what the seams promise.

A share of 1 stands for reading the text in full. Time counts, too: what a deadline leaves no time
for is not begun.
"""

from __future__ import annotations

from collections.abc import Mapping

Expected = Mapping[float, tuple[float, float]]
"""By share of recomputed tokens: KLD at the first token of an answer, and over 16 tokens."""

UNMEASURED: Expected = {0.0: (0.36, 0.16), 0.15: (0.16, 0.08), 0.3: (0.09, 0.04)}
"""Without seams: the worse of what was measured on two question sets with SmolLM2."""
WHOLE = 1.0
MOST = 0.3
"""Beyond it hardly anything is saved: then all is read."""
COST = 1.25
"""Of recomputing a token among scattered ones, by that of reading one: SmolLM2 on two cores, 614 of
4,096 tokens."""
LEAST_LOADING = 0.3
"""Part of the time that is left for loading."""


def wanted_share(expected: Expected, enough_kld: float) -> float:
    """The least that is good enough, over 16 tokens."""
    enough = (share for share, (_, kld) in sorted(expected.items()) if kld <= enough_kld)
    return next(enough, WHOLE)


def recompute_s(share: float, reading_s: float) -> float:
    """Seconds to recompute a share of what takes so long to read."""
    return reading_s if share >= WHOLE else share * COST * reading_s


def share_in_time(share: float, reading_s: float, left_s: float) -> float:
    """As much of `share` as there is time for."""
    if not reading_s or recompute_s(share, reading_s) <= left_s:
        return share
    return min(share, MOST, max(0.0, left_s) / (COST * reading_s))
