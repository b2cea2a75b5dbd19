"""A recorded link: so many bytes a second from one time to the next, over and over.

Everything asked of it is a look-up in the running sum of its bytes, so a transfer of any length
costs the same to simulate.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from kdn.delivery.outlook import Floats
from kdn.errors import FormatError
from kdn.node.traces import read_trace


class LinkTrace:
    """`rates[i]` bytes a second from `times_s[i]` to the next time, the last until `end_s`; then
    from the beginning. Time 0 of a transfer is `start_s` of the recording."""

    def __init__(self, times_s: Floats, rates: Floats, end_s: float, start_s: float = 0.0) -> None:
        self.times_s = np.append(times_s, end_s).astype(np.float64)
        self.rates = np.asarray(rates, np.float64)
        spans = np.diff(self.times_s)
        if not len(spans) or self.times_s[0] != 0 or not (spans > 0).all():
            raise FormatError("expected times that begin at 0 and grow")
        if not np.isfinite(self.rates).all() or (self.rates < 0).any() or not self.rates.any():
            raise FormatError("expected rates of at least 0, not all of them 0")
        self._sums = np.append(0.0, np.cumsum(spans * self.rates))
        self.period_s = float(self.times_s[-1])
        self._period_bytes = float(self._sums[-1])
        self.start_s = start_s
        self._before = 0.0
        self._before = self.bytes_by(0.0)

    @property
    def mean_rate(self) -> float:
        return self._period_bytes / self.period_s

    @property
    def variation(self) -> float:
        """The standard deviation of its samples over its mean."""
        return float(self.rates.std()) / self.mean_rate

    def scaled(self, rate: float, second_s: float, start_s: float = 0.0) -> LinkTrace:
        """With this mean rate, each second lasting `second_s`, and begun at `start_s` of it."""
        factor = rate / self.mean_rate
        times_s = self.times_s * second_s
        return LinkTrace(times_s[:-1], self.rates * factor, float(times_s[-1]), start_s)

    def bytes_by(self, t_s: float) -> float:
        """Bytes that a link always in use has brought by then."""
        rounds, rest_s = divmod(t_s + self.start_s, self.period_s)
        i = min(int(self.times_s.searchsorted(rest_s, "right")) - 1, len(self.rates) - 1)
        inside = self._sums[i] + (rest_s - self.times_s[i]) * self.rates[i]
        return float(rounds * self._period_bytes + inside) - self._before

    def time_of(self, num_bytes: float) -> float:
        """The first time by which so many bytes are there: the inverse of `bytes_by`."""
        rounds, rest = divmod(num_bytes + self._before, self._period_bytes)
        if rest <= 0 and rounds > 0:  # at the very end of a round, not after a silent beginning
            rounds, rest = rounds - 1, self._period_bytes
        i = max(0, int(self._sums.searchsorted(rest, "left")) - 1)
        rate = self.rates[i]
        inside_s = self.times_s[i] + ((rest - self._sums[i]) / rate if rate > 0 else 0.0)
        return max(0.0, float(rounds * self.period_s + inside_s) - self.start_s)

    def corners(self, end_s: float) -> tuple[Floats, Floats]:
        """Times from 0 to `end_s` between which the rate is constant, and the bytes by then."""
        rounds = np.arange(int((self.start_s + end_s) // self.period_s) + 1)
        times_s = (rounds[:, None] * self.period_s + self.times_s[:-1]).ravel() - self.start_s
        sums = (rounds[:, None] * self._period_bytes + self._sums[:-1]).ravel() - self._before
        inside = (times_s > 0) & (times_s < end_s)
        ends = [self.bytes_by(0.0), self.bytes_by(end_s)]
        return (
            np.concatenate(([0.0], times_s[inside], [end_s])),
            np.concatenate((ends[:1], sums[inside], ends[1:])),
        )

    def rate_at(self, t_s: float) -> float:
        rest_s = math.fmod(t_s + self.start_s, self.period_s)
        i = min(int(self.times_s.searchsorted(rest_s, "right")) - 1, len(self.rates) - 1)
        return float(self.rates[i])

    @classmethod
    def steady(cls, rate: float) -> LinkTrace:
        return cls(np.zeros(1), np.full(1, rate), 1.0)


def load_trace(path: Path) -> LinkTrace:
    """A file of `t_s,mbps` lines; a value holds from its time to the next."""
    times_s, mbps = map(np.array, read_trace(path))
    if len(times_s) < 2:
        raise FormatError(f"{path.name}: expected at least 2 samples, found {len(times_s)}")
    times_s -= times_s[0]
    end_s = float(times_s[-1] + np.median(np.diff(times_s)))
    return LinkTrace(times_s, mbps * 1e6 / 8, end_s)
