"""What came to this host's memory and to the place where chunks are published, and what went from
this host: for whoever tells routers.

It is noted by the threads that do it, and taken by an engine between two steps. Nobody waits: of
too many changes the oldest are forgotten, and a router that missed one finds a chunk later, or in
vain.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from typing import NamedTuple

MAX_CHANGES = 1 << 14


class Medium(Enum):
    """Where a chunk is, by the word that vLLM's routers have for it."""

    HOST = "CPU"
    """The shared memory of this host."""
    PLACE = "STORAGE"
    """A node, or whatever else chunks are published to and found at."""


class Change(NamedTuple):
    key: bytes
    """The key of the chunk that came or went."""
    medium: Medium
    is_there: bool
    """True: the chunk is there from now on. False: it is gone."""


class Changes:
    """Noted from any thread, in order."""

    def __init__(self, limit: int = MAX_CHANGES) -> None:
        self._changes: deque[Change] = deque(maxlen=limit)
        self._lock = threading.Lock()  # guards _changes

    def note(self, key: bytes, medium: Medium, is_there: bool) -> None:
        with self._lock:
            self._changes.append(Change(key, medium, is_there))

    def note_file(self, name: str, is_there: bool) -> None:
        """A file of the host's memory, whose name begins with a chunk's key in hex."""
        try:
            key = bytes.fromhex(name.partition(".")[0])
        except ValueError:
            return
        if key:
            self.note(key, Medium.HOST, is_there)

    def note_published(self, key: bytes) -> None:
        """The place has accepted it, or had it before."""
        self.note(key, Medium.PLACE, True)

    def take(self) -> tuple[Change, ...]:
        """All since the last time, the oldest first."""
        if not self._changes:
            return ()
        with self._lock:
            taken = tuple(self._changes)
            self._changes.clear()
        return taken
