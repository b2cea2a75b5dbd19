"""What the report of seams expects, beside what was then measured on questions they never saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdn.bench.blend.rows import BlendRow
from kdn.blend.seams import Seams
from kdn.engines.uncertainty import Interval

FIGURES = ("kld_first", "kld")


def as_json(seams: Seams) -> dict[str, Any]:
    """Their report by share: both divergences, and the interval of each."""
    return {
        "expected": {f"{share:g}": list(klds) for share, klds in seams.expected.items()},
        "intervals": {f"{share:g}": list(both) for share, both in seams.intervals.items()},
    }


def is_promised(method: str) -> bool:
    """Whether a report says what it leaves."""
    return method in ("seams", "seams+question")


def rows_of(rows: Sequence[BlendRow], seams: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each set, codec, share and figure. `seams`: by set, `as_json` of its seams. `off` is
    the part of the measured figure by which the expected one exceeds it."""
    for row in rows:
        share, report = f"{row.share:g}", seams.get(row.data, {})
        klds = report.get("expected", {}).get(share)
        if klds is None or not is_promised(row.method):
            continue
        intervals: Sequence[Interval | None] = report["intervals"].get(share, (None, None))
        for figure, expected, interval in zip(FIGURES, klds, intervals, strict=True):
            measured = getattr(row, figure)
            yield {
                "data": row.data,
                "codec": row.codec,
                "share": row.share,
                "figure": figure,
                "expected": expected,
                "interval": interval,
                "measured": measured,
                "measured_interval": getattr(row, f"{figure}_interval"),
                "off": expected / measured - 1 if measured else None,
                "items": row.items,
            }
