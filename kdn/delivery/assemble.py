"""The bytes of one stream as they arrive, in any order, verified level by level.

An assembly belongs to one stream id for ever: bytes of another stream need another assembly. Bytes
that are there are never written again, so a decoder may read them in its own thread while others
arrive. A level is verified once, when all of it is here, against the digest in the sealed header.
If it does not verify, all that was not verified is forgotten and missing again.

A place may have only the first levels of a stream: then an assembly knows of no others.

Of a stream in two parts an assembly may be `without_windowed`: of each level it wants the first
part alone, and what lies between is never missing.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property

from kdn.codec.format import Bitstream
from kdn.codec.format import Buffer as Bytes
from kdn.codec.header import Header
from kdn.codec.threads import num_cores
from kdn.delivery.buffers import SHARED, Buffer, Lent
from kdn.errors import ChecksumError, LimitError
from kdn.protocol.limits import MAX_CHUNK_BYTES

IN_LOOP_BYTES = 32 << 10
"""Levels up to this size are verified (in 30 us) faster than another thread would begin with it."""
MAX_THREADS = 8

Interval = tuple[int, int]


class Intervals:
    """A set of bytes as sorted, disjoint, half-open intervals. There are few at any time."""

    def __init__(self) -> None:
        self._parts: list[Interval] = []

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        if len(self._parts) == 1 and self._parts[0][1] == start:  # the next bytes, as they arrive
            self._parts[0] = (self._parts[0][0], end)
            return
        merged, rest = (start, end), []
        for part in self._parts:
            if part[1] < merged[0] or part[0] > merged[1]:
                rest.append(part)
            else:
                merged = (min(part[0], merged[0]), max(part[1], merged[1]))
        self._parts = sorted([*rest, merged])

    def remove(self, start: int, end: int) -> None:
        if start >= end:
            return
        self._parts = [
            part for own in self._parts for part in _outside(own, start, end) if part[0] < part[1]
        ]

    @property
    def first_gap(self) -> int:
        """The least number that is not in the set."""
        return self._parts[0][1] if self._parts and self._parts[0][0] == 0 else 0

    def missing(self, start: int, end: int) -> list[Interval]:
        """The parts of [start, end) that are not in the set."""
        if len(self._parts) == 1 and self._parts[0][0] <= start:  # nothing but a beginning
            start = max(start, self._parts[0][1])
            return [(start, end)] if start < end else []
        gaps = [(start, end)] if start < end else []
        for lo, hi in self._parts:
            gaps = [part for gap in gaps for part in _outside(gap, lo, hi) if part[0] < part[1]]
        return gaps


def _outside(interval: Interval, start: int, end: int) -> tuple[Interval, Interval]:
    lo, hi = interval
    return (lo, min(hi, start)), (max(lo, end), hi)


class Assembly:
    def __init__(
        self, header: Header, head: Bytes, *, stored: int | None = None, windowed: bool = True
    ) -> None:
        """`head` are the stream's first bytes: at least its header, which `header` is. `stored`:
        how many levels there are to be had, if not all."""
        if header.stream_bytes > MAX_CHUNK_BYTES:
            raise LimitError(
                f"expected at most {MAX_CHUNK_BYTES} bytes of stream, found {header.stream_bytes}"
            )
        self.header = header
        self.is_whole = windowed or header.info.windowed_from is None
        """Whether it wants all of the stream's bytes."""
        self.stored = header.info.num_levels if stored is None else stored
        """How many levels there are to be had."""
        every = header.level_ends if self.is_whole else header.part_ends
        self.level_ends = every[: self.stored]
        """Byte offsets up to which there is something to fetch for each level."""
        self._stored_bytes = header.level_ends[self.stored - 1]
        self.levels = 0
        """How many of the first levels are here and verified."""
        self.damages = 0
        """Levels that arrived and did not verify."""
        self._first = memoryview(head)[: self._stored_bytes]
        self._buffer: Buffer | Lent | None = None  # of the whole stream, when more than that comes
        self._have = Intervals()
        self._have.add(0, len(self._first))
        self._skip(0)
        self._checking = False

    def without_windowed(self) -> Assembly:
        """A new one of the same stream that does not want its layers with a window."""
        return Assembly(self.header, self._first, stored=self.stored, windowed=False)

    def _skip(self, first: int) -> None:
        """What is not wanted of levels from `first` on is not missing."""
        for skipped in self._skipped()[first:]:
            self._have.add(*skipped)

    def _skipped(self) -> list[Interval]:
        """Of each level the bytes that are not wanted."""
        if self.is_whole:
            return []
        return list(zip(self.header.part_ends, self.header.level_ends, strict=True))

    @property
    def stream_id(self) -> bytes:
        return self.header.stream_id

    @property
    def head(self) -> bytes:
        """Its header, as it came."""
        return bytes(self._first[: self.header.size_bytes])

    @property
    def arrived_bytes(self) -> int:
        """From the first byte on, without a gap; what is not wanted counts as being here."""
        return self._have.first_gap

    @cached_property
    def wanted_ends(self) -> tuple[int, ...]:
        """How many bytes the first levels take, without those that are not wanted."""
        return tuple(self._wanted_before(end) for end in self.level_ends)

    @property
    def wanted_arrived(self) -> int:
        """How many of these are here, without a gap."""
        return self._wanted_before(self.arrived_bytes)

    def _wanted_before(self, end: int) -> int:
        if self.is_whole:
            return end
        return end - sum(max(0, min(hi, end) - lo) for lo, hi in self._skipped())

    def missing(self, end: int) -> list[Interval]:
        """What is still to be fetched of the first `end` bytes."""
        return self._have.missing(0, end)

    def add(self, start: int, data: Bytes) -> int:
        """Take what is new of these bytes; how many that was."""
        view, new_bytes = memoryview(data), 0
        for lo, hi in self._have.missing(start, min(start + len(view), self.level_ends[-1])):
            self._memory()[lo:hi] = view[lo - start : hi - start]
            self.arrived(lo, hi - lo)
            new_bytes += hi - lo
        return new_bytes

    def room(self, start: int, num_bytes: int) -> tuple[int, memoryview]:
        """How many of these bytes are here already, from the first on, and memory for those after
        them that are not: to be filled at once, and told with `arrived`."""
        gaps = self._have.missing(start, min(start + num_bytes, self.level_ends[-1]))
        if not gaps:
            return num_bytes, memoryview(b"")
        lo, hi = gaps[0]
        return lo - start, self._memory()[lo:hi]

    def arrived(self, start: int, num_bytes: int) -> None:
        """So many bytes are in the memory that `room` gave."""
        assert self._buffer is not None
        self._buffer.wrote(start + num_bytes)
        self._have.add(start, start + num_bytes)

    @property
    def is_untouched(self) -> bool:
        """Nothing has come of it since it was looked up."""
        return self._buffer is None and not self._checking and not self.damages

    @property
    def first(self) -> memoryview:
        """The bytes that came with the lookup."""
        return self._first

    def adopt(self, memory: memoryview, levels: int) -> None:
        """Go on in memory for the whole stream, in which somebody else received and verified the
        first `levels` levels, and to which nobody else writes any more. If bytes have come here in
        the meantime, nothing changes."""
        assert len(memory) == self.header.stream_bytes
        if self.is_untouched and self.is_whole:
            self._buffer = Lent(memory)
            self._have.add(0, self.level_ends[levels - 1])
            self.levels = levels

    def stream(self, levels: int) -> Bitstream:
        """The first `levels` levels, to be decoded."""
        assert 1 <= levels <= self.levels
        data = self._memory()[: self.level_ends[levels - 1]]
        if not self.is_whole:
            return Bitstream.without_windowed(self.header, data, levels, verified=range(levels))
        return Bitstream.of(self.header, data, verified=range(levels))

    def verified(self) -> memoryview:
        """Header and verified levels, as they came; they do not change any more."""
        assert self.is_whole, "of a stream without a part of its levels nothing is kept"
        end = self.level_ends[self.levels - 1] if self.levels else self.header.size_bytes
        return self._memory()[:end].toreadonly()

    def _memory(self) -> memoryview:
        """Most streams that are looked up are not read on: so it is there when it is needed."""
        if self._buffer is None:
            self._buffer = SHARED.take(self._stored_bytes)
            self._buffer.view[: len(self._first)] = self._first
            self._buffer.wrote(len(self._first))
        return self._buffer.view

    # verifying

    @property
    def is_ripe(self) -> bool:
        """Whether all of the next level is here and nobody verifies it yet."""
        if self._checking or self.levels == len(self.level_ends):
            return False
        return self.arrived_bytes >= self.level_ends[self.levels]

    async def verify(self) -> None:
        """Verify the levels that are wholly here, in a thread unless they are small."""
        while self.is_ripe:
            self._memory()  # made here, not in two threads
            first, end = self.levels, bisect_right(self.level_ends, self.arrived_bytes)
            size = self.level_ends[end - 1] - self.header.level_start(first)
            self._checking = True
            try:
                intact = (
                    self._num_intact(first, end)
                    if size <= IN_LOOP_BYTES
                    else await asyncio.get_running_loop().run_in_executor(
                        _threads(), self._num_intact, first, end
                    )
                )
            finally:
                self._checking = False
            self.levels = first + intact
            if self.levels < end:
                self._forget(self.levels)

    def _num_intact(self, first: int, end: int) -> int:
        """How many of these levels are, up to the first that is not."""
        for level in range(first, end):
            try:
                self.header.check_level(level, self._level(level), windowed=self.is_whole)
            except ChecksumError:
                return level - first
        return end - first

    def _level(self, level: int) -> memoryview:
        return self._memory()[self.header.level_start(level) : self.level_ends[level]]

    def _forget(self, level: int) -> None:
        """And all behind it: nobody knows whether those who brought this brought that."""
        self.damages += 1
        self._have.remove(self.header.level_start(level), self.header.stream_bytes)
        self._skip(level)


@cache
def _threads() -> ThreadPoolExecutor:
    """Digests have threads of their own: whoever else waits for a thread, as decoding does, need
    not wait for all of them."""
    return ThreadPoolExecutor(min(MAX_THREADS, num_cores()), "kdn-verify")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # it has none of these threads
