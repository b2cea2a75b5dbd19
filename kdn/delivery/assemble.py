"""The bytes of one stream as they arrive, in any order, verified section by section.

An assembly belongs to one stream id for ever: bytes of another stream need another assembly. Bytes
that are there are never written again, so a decoder may read them in its own thread while others
arrive. A section that does not verify is forgotten and missing again.
"""

from __future__ import annotations

import numpy as np

from kdn.codec.format import Bitstream, Buffer
from kdn.codec.header import Header, section_checksum
from kdn.errors import LimitError

MAX_STREAM_BYTES = 256 << 20
"""What a delivery is willing to hold of one chunk."""

Interval = tuple[int, int]


class Intervals:
    """A set of bytes as sorted, disjoint, half-open intervals. There are few at any time."""

    def __init__(self) -> None:
        self._parts: list[Interval] = []

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        merged, rest = (start, end), []
        for part in self._parts:
            if part[1] < merged[0] or part[0] > merged[1]:
                rest.append(part)
            else:
                merged = (min(part[0], merged[0]), max(part[1], merged[1]))
        self._parts = sorted([*rest, merged])

    def remove(self, start: int, end: int) -> None:
        self._parts = [
            part for own in self._parts for part in _outside(own, start, end) if part[0] < part[1]
        ]

    def missing(self, start: int, end: int) -> list[Interval]:
        """The parts of [start, end) that are not in the set."""
        gaps = [(start, end)] if start < end else []
        for lo, hi in self._parts:
            gaps = [part for gap in gaps for part in _outside(gap, lo, hi) if part[0] < part[1]]
        return gaps


def _outside(interval: Interval, start: int, end: int) -> tuple[Interval, Interval]:
    lo, hi = interval
    return (lo, min(hi, start)), (max(lo, end), hi)


class Assembly:
    def __init__(self, header: Header, head: Buffer) -> None:
        """`head` are the stream's first bytes: at least its header, which `header` is."""
        if header.stream_bytes > MAX_STREAM_BYTES:
            raise LimitError(
                f"expected at most {MAX_STREAM_BYTES} bytes of stream, found {header.stream_bytes}"
            )
        self.header = header
        self.level_ends = tuple(map(header.level_end, range(header.info.num_levels)))
        self.levels = 0
        """How many of the first levels are here and verified."""
        self.damages = 0
        """Sections that arrived and did not verify."""
        # Not a bytearray: pages that are never written to take no memory.
        self._bytes = np.empty(header.stream_bytes, dtype=np.uint8).data
        self._have = Intervals()
        self._verified = 0  # sections, from the first on
        self.add(0, head)

    @property
    def stream_id(self) -> bytes:
        return self.header.stream_id

    @property
    def arrived_bytes(self) -> int:
        """From the first byte on, without a gap."""
        gaps = self._have.missing(0, len(self._bytes))
        return gaps[0][0] if gaps else len(self._bytes)

    def missing(self, end: int) -> list[Interval]:
        """What is still to be fetched of the first `end` bytes."""
        return self._have.missing(0, end)

    def add(self, start: int, data: Buffer) -> int:
        """Take what is new of these bytes; how many that was."""
        view, new_bytes = memoryview(data), 0
        for lo, hi in self._have.missing(start, min(start + len(view), len(self._bytes))):
            self._bytes[lo:hi] = view[lo - start : hi - start]
            self._have.add(lo, hi)
            new_bytes += hi - lo
        if new_bytes:
            self._verify()
        return new_bytes

    def stream(self, levels: int) -> Bitstream:
        """The first `levels` levels, to be decoded."""
        assert 1 <= levels <= self.levels
        return Bitstream.parse(self._bytes[: self.level_ends[levels - 1]])

    def _verify(self) -> None:
        entries, arrived = self.header.entries, self.arrived_bytes
        while self._verified < len(entries) and entries[self._verified].end <= arrived:
            entry = entries[self._verified]
            data = self._bytes[entry.offset : entry.end]
            if section_checksum(self.stream_id, self._verified, data) != entry.checksum:
                self.damages += 1
                self._have.remove(entry.offset, entry.end)
                break
            self._verified += 1
        end = entries[self._verified - 1].end if self._verified else self.header.size_bytes
        self.levels = sum(level_end <= end and self._verified > 0 for level_end in self.level_ends)
