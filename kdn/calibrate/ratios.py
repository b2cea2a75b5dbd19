"""Ratio at quality: how small a codec's caches are while the model's answers stay as they were.

A codec's levels are points (ratio, divergence); between neighbouring levels both are interpolated
on log scale, beyond the coarsest nothing is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

KLD_LIMIT = 0.01
RECALL_LIMIT = 0.05
_FLOOR = 1e-12  # the logarithm of an exact codec's divergence


class LevelPoint(Protocol):
    """One level: how many times smaller than fp16, and what it does to the model."""

    @property
    def ratio(self) -> float: ...
    @property
    def kld(self) -> float: ...
    @property
    def recall_kld(self) -> float: ...


def ratio_at(points: Sequence[tuple[float, float]], limit: float) -> float:
    """The largest ratio at which the divergence of `(ratio, divergence)` points is within the
    limit; 0 if no point is."""
    ordered = sorted(points, reverse=True)
    if ordered and ordered[0][1] <= limit:
        return ordered[0][0]
    for (coarse, above), (fine, below) in pairwise(ordered):
        if below <= limit < above:
            low, high = math.log(max(below, _FLOOR)), math.log(above)
            part = (math.log(max(limit, _FLOOR)) - low) / (high - low)
            return float(fine * (coarse / fine) ** part)
    return 0.0


def ratio_within(
    levels: Sequence[LevelPoint], kld: float = KLD_LIMIT, recall_kld: float = RECALL_LIMIT
) -> float:
    """The largest ratio of one codec's levels within both limits, each interpolated apart."""
    return min(
        ratio_at([(level.ratio, level.kld) for level in levels], kld),
        ratio_at([(level.ratio, level.recall_kld) for level in levels], recall_kld),
    )
