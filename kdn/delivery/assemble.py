"""The bytes of one stream as they arrive, in any order, verified level by level.

An assembly belongs to one stream id for ever: bytes of another stream need another assembly. Bytes
that are there are never written again, so a decoder may read them in its own thread while others
arrive. A level is verified once, when all of it is here, against the digest in the sealed header.
If it does not verify, all that was not verified is forgotten and missing again.
"""

from __future__ import annotations

import asyncio

import numpy as np

from kdn.codec.format import Bitstream, Buffer
from kdn.codec.header import Header
from kdn.errors import ChecksumError, LimitError
from kdn.protocol.limits import MAX_CHUNK_BYTES

IN_LOOP_BYTES = 32 << 10
"""A level up to this size is verified (in 30 us) faster than another thread would begin with it."""

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
        if header.stream_bytes > MAX_CHUNK_BYTES:
            raise LimitError(
                f"expected at most {MAX_CHUNK_BYTES} bytes of stream, found {header.stream_bytes}"
            )
        self.header = header
        self.level_ends = header.level_ends
        self.levels = 0
        """How many of the first levels are here and verified."""
        self.damages = 0
        """Levels that arrived and did not verify."""
        # Not a bytearray: pages that are never written to take no memory.
        self._bytes = np.empty(header.stream_bytes, dtype=np.uint8).data
        self._have = Intervals()
        self._checking = False
        self.add(0, head)

    @property
    def stream_id(self) -> bytes:
        return self.header.stream_id

    @property
    def head(self) -> bytes:
        """Its header, as it came."""
        return bytes(self._bytes[: self.header.size_bytes])

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
        return new_bytes

    def stream(self, levels: int) -> Bitstream:
        """The first `levels` levels, to be decoded."""
        assert 1 <= levels <= self.levels
        data = self._bytes[: self.level_ends[levels - 1]]
        return Bitstream.of(self.header, data, verified=range(levels))

    def verified(self) -> memoryview:
        """Header and verified levels, as they came; they do not change any more."""
        end = self.level_ends[self.levels - 1] if self.levels else self.header.size_bytes
        return self._bytes[:end].toreadonly()

    # verifying

    @property
    def is_ripe(self) -> bool:
        """Whether all of the next level is here and nobody verifies it yet."""
        if self._checking or self.levels == len(self.level_ends):
            return False
        return self.arrived_bytes >= self.level_ends[self.levels]

    async def verify(self) -> None:
        """Verify the levels that are wholly here, large ones in a thread."""
        while self.is_ripe:
            level = self.levels
            self._checking = True
            try:
                small = len(self._level(level)) <= IN_LOOP_BYTES
                intact = (
                    self._is_intact(level)
                    if small
                    else await asyncio.to_thread(self._is_intact, level)
                )
            finally:
                self._checking = False
            self._settle(level, intact)

    def _is_intact(self, level: int) -> bool:
        try:
            self.header.check_level(level, self._level(level))
        except ChecksumError:
            return False
        return True

    def _level(self, level: int) -> memoryview:
        return self._bytes[self.header.level_start(level) : self.level_ends[level]]

    def _settle(self, level: int, intact: bool) -> None:
        if intact:
            self.levels = level + 1
        else:
            self.damages += 1
            # And all behind it: nobody knows whether those who brought this brought that.
            self._have.remove(self.header.level_start(level), len(self._bytes))
