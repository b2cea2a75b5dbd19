"""Reports of seams held against measurements of the very same questions.

Seams that were fitted on one half of a set are measured on the other, and the other way round. So
each question stands once in a report, kept out of fitting there, and once among what was measured.
How questions differ counts on both sides alike: what is left is how far reports are off by
themselves, and the chance of the orders in which a question was asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kdn.bench.blend.expected import FIGURES, is_promised
from kdn.bench.blend.fitting import Answers
from kdn.bench.blend.rows import Outcome, by_question
from kdn.engines.uncertainty import COVERED, LEAST_NUMBERS, RESAMPLES, Interval

REPORT = "report"
"""In place of a codec: what a report says is of none."""

Entry = dict[str, Any]
"""Of a question with a share recomputed: `data` (the half), `codec`, `share`, `question`, and both
divergences, means over the orders."""


def reported(data: str, answers: Answers) -> Iterator[Entry]:
    for question, by_share in answers.items():
        for share, klds in by_share.items():
            yield _entry(data, REPORT, share, question, klds)


def measured(data: str, outcomes: Iterable[Outcome]) -> Iterator[Entry]:
    groups: dict[tuple[str, float], list[Outcome]] = {}
    for one in outcomes:
        if is_promised(one.method.name):
            groups.setdefault((one.codec, one.method.share), []).append(one)
    for (codec, share), group in groups.items():
        both = [by_question(group, figure) for figure in FIGURES]
        for question in both[0]:
            yield _entry(data, codec, share, question, [one[question] for one in both])


def _entry(data: str, codec: str, share: float, question: str, klds: Sequence[float]) -> Entry:
    figures = dict(zip(FIGURES, klds, strict=True))
    return {"data": data, "codec": codec, "share": share, "question": question, **figures}


def pooled(entries: Iterable[Entry], sets: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Over all questions that stand on both sides: a row for each set, codec, share and figure.
    `sets`: by half, the set it is of. `off` is the part of what was measured by which reports
    exceed it; `interval` is where that lies in about COVERED of all cases, for other questions."""
    sides: dict[tuple[str, str, float], dict[tuple[str, str], Entry]] = {}
    for one in entries:
        if one["data"] in sets:
            side = sides.setdefault((sets[one["data"]], one["codec"], one["share"]), {})
            side[one["data"], one["question"]] = one
    for (data, codec, share), found in sides.items():
        report = sides.get((data, REPORT, share), {})
        both = [key for key in found if key in report]
        if codec == REPORT or not both:
            continue
        for figure in FIGURES:
            expected, actual = (
                np.array([side[key][figure] for key in both]) for side in (report, found)
            )
            yield {
                "data": data,
                "codec": codec,
                "share": share,
                "figure": figure,
                "expected": float(expected.mean()),
                "measured": float(actual.mean()),
                "off": float(expected.sum() / actual.sum() - 1) if actual.sum() else None,
                "interval": _interval(expected, actual),
                "items": len(both),
            }


def _interval(
    expected: npt.NDArray[np.float64], actual: npt.NDArray[np.float64]
) -> Interval | None:
    """Of `off`, for these fits: questions are drawn anew, each with both of its numbers."""
    count = len(expected)
    if count < LEAST_NUMBERS:
        return None
    drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    sums = actual[drawn].sum(1)
    if not sums.all():
        return None
    off = expected[drawn].sum(1) / sums - 1
    low, high = np.quantile(off, ((1 - COVERED) / 2, (1 + COVERED) / 2))
    return float(low), float(high)
