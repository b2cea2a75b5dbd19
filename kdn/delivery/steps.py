"""Raising chunks level by level: which steps gain most, and how many of them fit.

A step takes one chunk from one level to the next. It costs bytes on the link and time of the
decoder; both work at once, so a set of steps fits if each of the two has time for its part. A chunk
is decoded once however many levels it rises, unless an earlier one is in the cache already: then
the first step costs a whole decoding and the next ones the difference.
"""

from __future__ import annotations

import numpy as np

from kdn.delivery.outlook import Floats, Ints, Outlook

_NOTHING = 1e-12
_MARGIN = 0.08
"""A decoding may take this much longer than measured. Those before the last make up for each other
in later plans; the last one's must fit."""


class Steps:
    """The steps of all chunks from `first` on, above `base` levels, best first."""

    def __init__(self, outlook: Outlook, base: Ints, first: int) -> None:
        table, situation = outlook.table, outlook.situation
        rate = situation.link.rate
        missing = np.maximum(table.ends[first:] - outlook.bytes[first:, None], 0)
        level = np.arange(1, table.ends.shape[1] + 1)
        work_s = np.where(level <= outlook.decoded[first:, None], 0, table.decode_s[first:])
        kld = table.kld[first:]
        gain = -table.weights[first:, None] * np.diff(kld, axis=1)
        more_bytes, more_s = np.diff(missing, axis=1), np.diff(work_s, axis=1)
        merit = gain / (more_bytes / rate + more_s + _NOTHING)
        merit = np.minimum.accumulate(merit, axis=1)  # a level needs those before it
        usable = (level[:-1] >= base[first:, None]) & (level[:-1] < table.levels[first:, None])
        usable &= kld[:, :-1] > situation.enough_kld
        ranks = np.where(usable, -merit, np.inf)[::-1].ravel()  # of equals, the last chunk first
        order = ranks.argsort(kind="stable")[: int(usable.sum())]
        width = len(level) - 1
        self.chunks = first + (len(usable) - 1 - order // width)
        self.levels = order % width + 2
        rows = np.arange(len(base) - first)
        chosen = base[first:] - 1
        self._bytes = _sums(missing[rows, chosen].sum(), more_bytes[::-1].ravel()[order])
        self._work_s = _sums(work_s[rows, chosen].sum(), more_s[::-1].ravel()[order])
        gains = gain[::-1].ravel()[order]
        self._kld = _sums(outlook.kld_with(base, first), -gains)
        self._enough_kld = situation.enough_kld
        last_s = table.decode_s[self.chunks, self.levels - 1]
        least_s = np.where(outlook.decoded[first:] == 0, table.decode_s[first:, 0], 0)
        last_s = np.append(least_s.max(initial=0), last_s)
        self._last_s = np.maximum.accumulate(last_s)
        self._wait_s = outlook.wait_s
        self._base = base

    def __len__(self) -> int:
        return len(self.chunks)

    def fitting(self, left_s: float, rate: float) -> int:
        """How many steps, best first, can be here and decoded in the time left."""
        link_s = self._wait_s + self._bytes / rate + (1 + _MARGIN) * self._last_s
        loaded = int(link_s.searchsorted(left_s, "right"))
        decoded = int((self._work_s + _MARGIN * self._last_s).searchsorted(left_s, "right"))
        return max(0, min(loaded, decoded) - 1)

    def enough(self) -> int:
        """How many steps, best first, make the mean as good as it need be; all if none do."""
        good = self._kld <= self._enough_kld
        return int(good.argmax()) if good.any() else len(self)

    def work_s(self, count: int) -> float:
        """The decoder's time for everything with the first `count` steps."""
        return float(self._work_s[count])

    def end_s(self, count: int, rate: float) -> float:
        """Seconds from now until all is in the cache with the first `count` steps."""
        if self._bytes[count] <= 0:
            return float(self._work_s[count])
        link_s = self._wait_s + self._bytes[count] / rate + self._last_s[count]
        return float(max(link_s, self._work_s[count]))

    def levels_with(self, count: int) -> Ints:
        """Levels of all chunks after the first `count` steps."""
        rises = np.bincount(self.chunks[:count], minlength=len(self._base))
        return self._base + rises


def _sums(start: float, more: Floats) -> Floats:
    return start + np.append(0, np.cumsum(more))
