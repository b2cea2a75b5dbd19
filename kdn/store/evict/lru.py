"""Least recently used. O(1) each."""

from __future__ import annotations

from collections import OrderedDict

from kdn.store.base import Hints
from kdn.store.evict.base import Policy


class LRU(Policy):
    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()  # coldest first; held keys left out
        self._held: set[bytes] = set()

    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        if key not in self._held:
            self._order[key] = None
            self._order.move_to_end(key)

    def touch(self, key: bytes) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)
        self._held.discard(key)

    def victim(self) -> bytes | None:
        return next(iter(self._order), None)

    def hold(self, key: bytes) -> None:
        if key in self._order:
            del self._order[key]
            self._held.add(key)

    def release(self, key: bytes) -> None:
        if key in self._held:
            self._held.remove(key)
            self._order[key] = None

    def demote(self, key: bytes) -> None:
        if key in self._order:
            self._order.move_to_end(key, last=False)
