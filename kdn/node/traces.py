"""How fast a limited link is: constant, or following a recorded trace.

A rate answers one question: when has a frame that begins at `start_s` gone out? Times are seconds
of the caller's clock; a trace begins at the first time it is asked about.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from kdn.errors import FormatError

MAX_SAMPLES = 1_000_000
_HEADER = ["t_s", "mbps"]


class Rate(Protocol):
    def finish_s(self, start_s: float, num_bytes: int) -> float:
        """When bytes that begin to go out at `start_s` have gone out."""


class ConstantRate:
    def __init__(self, bits_per_s: float) -> None:
        if not 0 < bits_per_s < math.inf:
            raise ValueError(f"expected more than 0 bits per second, found {bits_per_s}")
        self.bits_per_s = bits_per_s

    def finish_s(self, start_s: float, num_bytes: int) -> float:
        return start_s + 8 * num_bytes / self.bits_per_s


class TraceRate:
    """`bits_per_s[i]` holds from `times_s[i]` to the next; the last as long as the one before it,
    then all begins anew."""

    def __init__(self, times_s: Sequence[float], bits_per_s: Sequence[float]) -> None:
        last_s = times_s[-1] - times_s[-2] if len(times_s) > 1 else 1.0
        self._starts_s = [time_s - times_s[0] for time_s in times_s]
        self._ends_s = [*self._starts_s[1:], self._starts_s[-1] + last_s]
        self._bits_per_s = list(bits_per_s)
        samples = zip(self._starts_s, self._ends_s, self._bits_per_s, strict=True)
        self._period_s = self._ends_s[-1]
        self._period_bits = sum((end - start) * rate for start, end, rate in samples)
        self._origin_s: float | None = None

    @classmethod
    def read(cls, path: Path) -> TraceRate:
        times_s, mbps = read_trace(path)
        return cls(times_s, [rate * 1e6 for rate in mbps])

    def finish_s(self, start_s: float, num_bytes: int) -> float:
        if self._origin_s is None:
            self._origin_s = start_s
        rounds, offset_s = divmod(start_s - self._origin_s, self._period_s)
        whole_rounds, bits = divmod(8 * num_bytes, self._period_bits)
        begin_s = self._origin_s + (rounds + whole_rounds) * self._period_s
        at = bisect_right(self._starts_s, offset_s) - 1
        while True:
            rate, end_s = self._bits_per_s[at], self._ends_s[at]
            if bits <= rate * (end_s - offset_s):
                return begin_s + offset_s + (bits / rate if bits else 0.0)
            bits -= rate * (end_s - offset_s)
            offset_s, at = end_s, at + 1
            if at == len(self._ends_s):
                begin_s, offset_s, at = begin_s + self._period_s, 0.0, 0


def read_trace(path: Path) -> tuple[Sequence[float], Sequence[float]]:
    """Times in seconds and Mbit/s from each on, of a CSV with the header `t_s,mbps`."""
    try:
        with path.open(newline="") as lines:
            rows = list(csv.reader(lines))
    except (OSError, ValueError, csv.Error) as error:
        raise FormatError(f"{path.name}: expected a trace (t_s,mbps): {error}") from error
    if not rows or rows[0] != _HEADER:
        raise FormatError(f"{path.name}: expected {_HEADER} at the top, found {rows[:1]}")
    samples = [_sample(path.name, row) for row in rows[1:]]
    if not 1 <= len(samples) <= MAX_SAMPLES:
        raise FormatError(f"{path.name}: expected 1 to {MAX_SAMPLES} samples, found {len(samples)}")
    times_s, mbps = zip(*samples, strict=True)
    if any(after <= before for before, after in pairwise(times_s)):
        raise FormatError(f"{path.name}: expected times that rise")
    if min(mbps) < 0 or max(mbps) <= 0:
        raise FormatError(f"{path.name}: expected rates of at least 0, one of them more")
    return times_s, mbps


def _sample(name: str, row: list[str]) -> tuple[float, float]:
    try:
        time_s, mbps = map(float, row)
    except ValueError:
        raise FormatError(f"{name}: expected two numbers in a line, found {row}") from None
    if not math.isfinite(time_s) or not math.isfinite(mbps):
        raise FormatError(f"{name}: expected finite times and rates, found {row}")
    return time_s, mbps
