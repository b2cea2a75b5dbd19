"""S3-FIFO (Yang et al., SOSP'23): three FIFO queues. O(1) amortised.

A newcomer enters the small queue (a tenth of the bytes). What is used again there moves to the main
queue; what is not leaves, and its key is remembered in the ghost queue: if it comes back soon, it
enters the main queue at once. The main queue gives each used object another round per use.

The capacity is not known here: shares are of the bytes held.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kdn.store.base import Hints
from kdn.store.evict.base import Policy

SMALL_SHARE = 0.1
MAX_USES = 3
MOVE_AT_USES = 2


@dataclass(slots=True)
class _Object:
    size_bytes: int
    uses: int = 0


class _Queue(OrderedDict[bytes, _Object]):
    """Oldest first; knows its bytes."""

    size_bytes = 0

    def push(self, key: bytes, item: _Object) -> None:
        self[key] = item
        self.size_bytes += item.size_bytes

    def take(self, key: bytes) -> _Object | None:
        item = self.pop(key, None)
        if item:
            self.size_bytes -= item.size_bytes
        return item


class S3Fifo(Policy):
    def __init__(self) -> None:
        self._small, self._main = _Queue(), _Queue()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()  # at most as many as are here
        self._held: dict[bytes, _Object] = {}
        self._named: bytes | None = None  # the last victim: only what was evicted becomes a ghost

    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        if any(key in place for place in (self._small, self._main, self._held)):
            self.touch(key)
        elif key in self._ghost:
            del self._ghost[key]
            self._main.push(key, _Object(size_bytes))
        else:
            self._small.push(key, _Object(size_bytes))

    def touch(self, key: bytes, start: int = 0, end: int | None = None) -> None:
        item = self._small.get(key) or self._main.get(key)
        if item:
            item.uses = min(item.uses + 1, MAX_USES)

    def remove(self, key: bytes) -> None:
        evicted_newcomer = key == self._named and key in self._small
        self._take(key)
        self._held.pop(key, None)
        if evicted_newcomer:
            self._ghost[key] = None
        while len(self._ghost) > len(self._small) + len(self._main):
            self._ghost.popitem(last=False)
        self._named = None

    def victim(self, held: bool = False) -> bytes | None:
        self._named = (
            self._small_victim()
            or self._main_victim()
            or next(iter(self._small), None)
            or (next(iter(self._held), None) if held else None)
        )
        return self._named

    def _small_victim(self) -> bytes | None:
        """The oldest unused of the small queue while it is beyond its share; the used move on."""
        total_bytes = self._small.size_bytes + self._main.size_bytes
        while self._small and self._small.size_bytes > SMALL_SHARE * total_bytes:
            key, item = next(iter(self._small.items()))
            if len(self._small) == 1 and self._main:
                return None  # the newcomer
            if item.uses < MOVE_AT_USES:
                return key
            self._small.take(key)
            item.uses = 0
            self._main.push(key, item)
        return None

    def _main_victim(self) -> bytes | None:
        """The oldest unused of the main queue; the used go round again. Ends: uses only fall."""
        while self._main:
            key, item = next(iter(self._main.items()))
            if not item.uses:
                return key
            item.uses -= 1
            self._main.move_to_end(key)
        return None

    def hold(self, key: bytes) -> None:
        item = self._take(key)
        if item:
            self._held[key] = item

    def release(self, key: bytes) -> None:
        item = self._held.pop(key, None)
        if item:
            self._main.push(key, item)

    def _take(self, key: bytes) -> _Object | None:
        return self._small.take(key) or self._main.take(key)
