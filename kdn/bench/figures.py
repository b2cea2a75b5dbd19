"""The figures that follow from a benchmark's rows: the headline, and rivals at equal quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdn.calibrate.ratios import ratio_within


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
