"""Which levels of objects readers want, learnt from the bytes that they read.

Levels are counted from the finest: level 0 is the last of an object, level 1 the one before. A
reader of all bytes of a level counts as one reader of it, in however many pieces it reads, and one
who reads a part as a part of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

MAX_LEVELS = 32
PRIOR_READERS = 64.0
PRIOR_WANTS_ALL = 1 / 16
"""Part of the readers who want the finest level, as long as nothing is known: few do, as it is for
going on exactly. All are taken to want the others."""
MEMORY = 1024.0
"""Readers after whom older ones count half."""


class Demand:
    def __init__(self) -> None:
        self._readers = [PRIOR_READERS] * MAX_LEVELS
        self._readers[0] *= PRIOR_WANTS_ALL

    def note(self, cuts: Sequence[int], start: int, end: int) -> None:
        """Bytes [start, end) of a whole object were read. Where only a part of an object is left,
        what its readers ask for says nothing of what they want."""
        first = 0
        for number, last in enumerate(cuts):
            both = min(end, last) - max(start, first)
            if both > 0:
                self._readers[len(cuts) - 1 - number] += both / (last - first)
            first = last
        if max(self._readers) > MEMORY:
            self._readers = [count / 2 for count in self._readers]

    def content(self) -> tuple[float, ...]:
        """By the number of finest levels that are absent: part of the readers who want none of
        them. It never grows."""
        most = max(self._readers)
        wanted = accumulate(self._readers, max, initial=0.0)
        return tuple(max(0.0, 1 - count / most) for count in wanted)
