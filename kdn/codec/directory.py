"""The directory of a stream: which sections there are, in which order, and how long each is.

Readers meet a directory of a hundred lines for every chunk, before anything of it is decoded. So it
is checked as arrays, in one go, and written out line by line only for who asks for lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kdn.errors import FormatError, LimitError

MAX_SECTIONS = 8192
MAX_SECTION_BYTES = 2**30
MAX_STREAM_BYTES = 2**33

LINE = np.dtype([("level", "u1"), ("kind", "u1"), ("group", "<u2"), ("length", "<u4")])
LINE_BYTES = LINE.itemsize
Line = tuple[int, int, int, int]
"""Level, kind, group and length of a section."""


@dataclass(frozen=True)
class SectionEntry:
    """One line of the directory: where a section lies, counted from the stream's first byte."""

    level: int
    kind: int
    group: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Directory:
    """Checked: ordered by (level, group, kind), sections for each level, nothing too long."""

    def __init__(self, lines: npt.NDArray[np.void], first_offset: int, num_levels: int) -> None:
        """The first section begins at `first_offset` of the stream."""
        check_range("sections", len(lines), 1, MAX_SECTIONS)
        self._lines, self._first_offset = lines, first_offset
        levels = lines["level"]
        self.codes = levels.astype(np.int64) << 24 | lines["group"].astype(np.int64) << 8
        """Each section's `section_code`."""
        self.codes |= lines["kind"]
        if not (self.codes[1:] > self.codes[:-1]).all():
            raise FormatError("expected sections strictly increasing by (level, group, kind)")
        lasts = np.append(np.flatnonzero(levels[1:] != levels[:-1]), len(lines) - 1)
        if levels[lasts].tolist() != list(range(num_levels)):
            raise FormatError(f"expected sections for each of the levels 0 to {num_levels - 1}")
        check_range("section length", int(lines["length"].max()), 0, MAX_SECTION_BYTES)
        self._ends = np.cumsum(lines["length"], dtype=np.int64) + first_offset
        check_range("stream bytes", int(self._ends[-1]), 0, MAX_STREAM_BYTES)
        self.level_ends: tuple[int, ...] = tuple(self._ends[lasts].tolist())

    @classmethod
    def parse(cls, data: memoryview, first_offset: int, num_levels: int) -> Directory:
        return cls(np.frombuffer(bytes(data), LINE), first_offset, num_levels)

    @classmethod
    def of(cls, lines: Iterable[Line], first_offset: int, num_levels: int) -> Directory:
        every = list(lines)
        check_range(
            "section length", max((one[3] for one in every), default=0), 0, MAX_SECTION_BYTES
        )
        return cls(np.array(every, LINE), first_offset, num_levels)

    def __len__(self) -> int:
        return len(self._lines)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """In bytes, of each section."""
        return self._lines["length"].astype(np.int64)

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each section begins, counted from the stream's first byte."""
        return self._ends - self.lengths

    @property
    def last_group(self) -> int:
        return int(self._lines["group"].max())

    def part_ends(self, border: int) -> tuple[int, ...]:
        """Where the sections of groups before `border` end in each level: they come first in it."""
        num_levels = len(self.level_ends)
        own = np.where(self._lines["group"] < border, self.lengths, 0)
        firsts = np.searchsorted(self._lines["level"], np.arange(num_levels))
        starts = np.array([self._first_offset, *self.level_ends[:-1]], np.int64)
        return tuple((starts + np.add.reduceat(own, firsts)).tolist())

    def packed(self) -> bytes:
        return self._lines.tobytes()

    @cached_property
    def entries(self) -> tuple[SectionEntry, ...]:
        starts = self.offsets.tolist()
        both = zip(self._lines.tolist(), starts, strict=True)
        return tuple(
            SectionEntry(level, kind, group, start, length)
            for (level, kind, group, length), start in both
        )

    @cached_property
    def spans(self) -> dict[tuple[int, int, int], tuple[int, int]]:
        """(start, end) in the stream of each section, by (level, group, kind)."""
        ends = self._ends.tolist()
        both = zip(self._lines.tolist(), [self._first_offset, *ends], ends, strict=False)
        return {(level, group, kind): (start, end) for (level, kind, group, _), start, end in both}


def section_code(level: int, group: int, kind: int) -> int:
    """A section's name as a number: ordered as sections are."""
    return level << 24 | group << 8 | kind


def check_range(what: str, found: int, low: int, high: int) -> None:
    if not low <= found <= high:
        raise LimitError(f"{what}: expected {low} to {high}, found {found}")
