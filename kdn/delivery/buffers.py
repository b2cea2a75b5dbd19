"""Memory for the bytes of streams, used again and again.

The kernel needs several times as long to provide new pages as to fill them from a socket. So what
one delivery is done with, the next one receives into. A buffer comes back by itself when nobody has
a view of it any more, whoever that was and in whatever thread; so nobody reads what a later
delivery writes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import NamedTuple

import numpy as np

MAX_KEPT_BYTES = 256 << 20
STEPS = 8
"""Sizes per octave: a buffer serves streams of about the same size."""


class _Memory(NamedTuple):
    pages: mmap
    written: list[int]  # one number: so many bytes, from the first on, since it was new


class Buffer:
    """`view` is its memory, which may hold anything. Pages that are never written to take none."""

    def __init__(self, memory: _Memory, num_bytes: int) -> None:
        self._written = memory.written
        # Every view is one of this array, and keeps it: when it goes, so have they.
        self._array = np.frombuffer(memory.pages, np.uint8, num_bytes)
        self.view = self._array.data

    def wrote(self, end: int) -> None:
        """Something was written to the bytes before `end`."""
        self._written[0] = max(self._written[0], end)


class Lent(NamedTuple):
    """The same, in memory that is somebody else's."""

    view: memoryview

    def wrote(self, end: int) -> None:
        pass


class Buffers:
    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        """`max_kept_bytes`: of buffers that nobody uses, what was written to."""
        self._max_kept_bytes = max_kept_bytes
        self.kept_bytes = 0
        self._kept: deque[_Memory] = deque()  # the oldest first
        self._lock = threading.Lock()  # guards both

    def take(self, num_bytes: int) -> Buffer:
        size = _size_of(num_bytes)
        with self._lock:
            memory = next((one for one in reversed(self._kept) if len(one.pages) == size), None)
            if memory is not None:
                self._kept.remove(memory)
                self.kept_bytes -= memory.written[0]
        if memory is None:
            memory = _Memory(mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS), [0])
        buffer = Buffer(memory, num_bytes)
        weakref.finalize(buffer._array, self._give_back, memory).atexit = False
        return buffer

    def unlock(self) -> None:
        """In a forked child: another thread of its parent may have held the lock."""
        self._lock = threading.Lock()

    def _give_back(self, memory: _Memory) -> None:
        """Called wherever the last view goes, even within `take`: it must not wait."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._kept.append(memory)
            self.kept_bytes += memory.written[0]
            while self.kept_bytes > self._max_kept_bytes:
                self.kept_bytes -= self._kept.popleft().written[0]
        finally:
            self._lock.release()


def _size_of(num_bytes: int) -> int:
    """The next of the sizes that buffers have."""
    step = max(4096, (1 << num_bytes.bit_length()) // (2 * STEPS))
    return max(1, -(-num_bytes // step)) * step


SHARED = Buffers()
"""The buffers that all deliveries of this process share."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SHARED.unlock)
