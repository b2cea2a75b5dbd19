"""Least recently used. O(1) each."""

from __future__ import annotations

from collections import OrderedDict

from kdn.store.base import Hints
from kdn.store.evict.base import Policy


class LRU(Policy):
    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()  # coldest first; held keys left out
        self._held: OrderedDict[bytes, None] = OrderedDict()  # coldest first

    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        if key not in self._held:
            self._order[key] = None
        self.touch(key)

    def touch(self, key: bytes, start: int = 0, end: int | None = None) -> None:
        for keys in (self._order, self._held):
            if key in keys:
                keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)
        self._held.pop(key, None)

    def victim(self, held: bool = False) -> bytes | None:
        named = next(iter(self._order), None)
        return next(iter(self._held), None) if named is None and held else named

    def hold(self, key: bytes) -> None:
        if key in self._order:
            del self._order[key]
            self._held[key] = None

    def release(self, key: bytes) -> None:
        if key in self._held:
            del self._held[key]
            self._order[key] = None
