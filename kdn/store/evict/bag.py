"""A set from which random members can be drawn. O(1) each."""

from __future__ import annotations

import random
from collections.abc import Collection


class Bag:
    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._places: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def add(self, key: bytes) -> None:
        if key not in self._places:
            self._places[key] = len(self._keys)
            self._keys.append(key)

    def discard(self, key: bytes) -> None:
        place = self._places.pop(key, None)
        if place is None:
            return
        last = self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._places[last] = place

    def sample(self, count: int, rng: random.Random) -> Collection[bytes]:
        """About `count` distinct members; all if there are no more."""
        size = len(self._keys)
        if size <= count:
            return self._keys
        return {self._keys[int(rng.random() * size)] for _ in range(count)}
