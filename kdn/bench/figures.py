"""The figures that follow from a benchmark's rows: the headline, and rivals at equal quality.

A codec's levels are points (ratio, divergence); between neighbouring levels both are interpolated
on log scale, beyond the coarsest nothing is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

KLD_LIMIT = 0.01
RECALL_LIMIT = 0.05
_FLOOR = 1e-12  # the logarithm of an exact codec's divergence


@dataclass(frozen=True)
class CodecRow:
    """One level of one codec on one text, over all its contexts: bytes are the mean per context,
    times the median."""

    codec: str
    level: int
    text: str
    bytes: float
    bits_per_value: float
    ratio: float
    kld: float
    kld_p99: float
    recall_kld: float
    top1: float
    ppl: float
    encode_s: float
    decode_s: float
    prefill_s: float


@dataclass(frozen=True)
class Comparison:
    """How many times smaller `codec` level `level` is than a rival at a continuation and recall
    divergence no greater than its own; None where the rival is never that good. `at_coarsest`: the
    rival has no coarser level, so its bytes are an upper bound."""

    text: str
    level: int
    rival: str
    factor: float | None
    at_coarsest: bool


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
    rows: Sequence[CodecRow], kld: float = KLD_LIMIT, recall_kld: float = RECALL_LIMIT
) -> float:
    """The largest ratio of one codec's levels within both limits, each interpolated apart."""
    return min(
        ratio_at([(row.ratio, row.kld) for row in rows], kld),
        ratio_at([(row.ratio, row.recall_kld) for row in rows], recall_kld),
    )


def by_codec(rows: Sequence[CodecRow]) -> dict[str, dict[str, list[CodecRow]]]:
    """Rows as {codec: {text: rows}}, in their order."""
    groups: dict[str, dict[str, list[CodecRow]]] = {}
    for row in rows:
        groups.setdefault(row.codec, {}).setdefault(row.text, []).append(row)
    return groups


def ratio_at_quality(rows: Sequence[CodecRow]) -> dict[str, dict[str, float]]:
    return {
        codec: {text: ratio_within(group) for text, group in texts.items()}
        for codec, texts in by_codec(rows).items()
    }


def compare(rows: Sequence[CodecRow], codec: str = "klt") -> list[Comparison]:
    """Each level of `codec` against every rival, on each text."""
    groups = by_codec(rows)
    return [
        _compare_level(row, rival, texts[text])
        for text, own in groups.get(codec, {}).items()
        for row in own
        for rival, texts in groups.items()
        if rival != codec and text in texts
    ]


def _compare_level(row: CodecRow, rival: str, rows: Sequence[CodecRow]) -> Comparison:
    ratio = ratio_within(rows, row.kld, row.recall_kld)
    coarsest = max(other.ratio for other in rows)
    factor = row.ratio / ratio if ratio else None
    return Comparison(row.text, row.level, rival, factor, ratio == coarsest)
