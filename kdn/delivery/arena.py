"""Memory that two processes share: one receives streams into it, the other decodes from there.

It is a file without a name, which only those can open who inherit it, and pages of it exist only
where something was written. Deliveries take regions of it. A region comes back by itself when
nobody has a view of it any more, and the next delivery writes to the same pages: new ones would
cost the kernel several times as long as filling them.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from contextlib import suppress

import numpy as np

ARENA_BYTES = 64 << 30
"""Addresses, not memory."""
KEPT_BYTES = 512 << 20
"""Of memory that nobody uses any more."""


class Region:
    """Some bytes of an arena, from `start` on. They are the holder's as long as there is a view."""

    def __init__(self, pages: mmap.mmap, start: int, num_bytes: int) -> None:
        self.start = start
        # Every view is one of this array, and keeps it: when it goes, so have they.
        self.array = np.frombuffer(pages, np.uint8, num_bytes, start)
        self.view = self.array.data


class Arena:
    """Any thread may take a region, and drop it."""

    def __init__(self, size_bytes: int = ARENA_BYTES, kept_bytes: int = KEPT_BYTES) -> None:
        """OSError where the system has no such memory."""
        self.size_bytes, self._kept_bytes = size_bytes, kept_bytes
        self.file = os.memfd_create("kdn-streams", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.file, size_bytes)
            self._pages = map_arena(self.file, size_bytes)
        except BaseException:
            os.close(self.file)
            raise
        self._taken: dict[int, int] = {}  # start to end
        self._dropped: list[tuple[int, int]] = []
        self._lock = threading.Lock()  # guards both

    def take(self, num_bytes: int) -> Region | None:
        """The first room there is; None if there is none."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.tidy()
        with self._lock:
            start = 0
            for begin, end in sorted(self._taken.items()):
                if begin - start >= size:
                    break
                start = end
            if start + size > self.size_bytes:
                return None
            self._taken[start] = start + size
        region = Region(self._pages, start, num_bytes)
        dropped = self._dropped  # not the arena: it may go before the last view of it
        weakref.finalize(region.array, dropped.append, (start, start + size)).atexit = False
        return region

    def used_bytes(self) -> int:
        """Memory that it takes."""
        return os.fstat(self.file).st_blocks * 512

    def tidy(self) -> None:
        """Take back what was dropped. Not in the moment when it is, which may be any."""
        with self._lock:
            while self._dropped:
                start, end = self._dropped.pop()
                del self._taken[start]
                if self.used_bytes() > self._kept_bytes:
                    with suppress(OSError):  # some sandboxes cannot: the memory is used again
                        self._pages.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Views stay good."""
        os.close(self.file)


def map_arena(file: int, size_bytes: int) -> mmap.mmap:
    return mmap.mmap(file, size_bytes, mmap.MAP_SHARED)
