"""Graded: the finest levels of the least valuable objects go before any object does.

As `cost`, but an object that may be cut (`Hints.cuts`) has two ways to make room: it loses its
finest levels, or it goes. Either costs a part of what its uses save: that of the readers who are
content with it now and would not be with what is left (`demand`). Whichever costs least for each
byte goes next. A cut is made only if what is left is of use to most readers: levels that nobody is
content with would be room lost. So where readers want all levels, this is `cost`.

An object may be cut before its children go: what is left of it still carries them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from kdn.store.base import Hints
from kdn.store.evict.cost import CostAware, Item, weight_of
from kdn.store.evict.demand import Demand

LEAST_SAVED_S = 1e-9
"""Of an object of which nobody said: its levels are weighed against each other all the same."""
USEFUL = 0.5
"""What is left of an object is of use if so many readers are content with it."""


@dataclass(slots=True)
class _Graded(Item):
    saved_s: float = 0.0
    size_bytes: int = 0
    cuts: tuple[int, ...] = ()
    levels: int = 0
    """Those that are here, of the ones that end at `cuts`."""

    @property
    def absent(self) -> int:
        return len(self.cuts) - self.levels


class Graded(CostAware):
    may_cut = True

    def __init__(self, rng: random.Random | None = None) -> None:
        super().__init__(rng)
        self._demand = Demand()
        self._content = self._demand.content()  # as of the last `_learn`
        self._spare = self._useful()  # levels that an object may lack

    def _useful(self) -> int:
        return sum(share >= USEFUL for share in self._content) - 1

    def _made(self, size_bytes: int, hints: Hints) -> Item:
        saved_s, cuts = max(hints.saved_s, LEAST_SAVED_S), hints.cuts
        return _Graded(hints.parent, 0.0, 0, 0, 0, False, saved_s, size_bytes, cuts, len(cuts))

    def touch(self, key: bytes, start: int = 0, end: int | None = None) -> None:
        super().touch(key)
        item = self._objects.get(key)
        if end is not None and isinstance(item, _Graded) and not item.absent:
            self._demand.note(item.cuts, start, end)

    def _learn(self) -> None:
        super()._learn()
        self._content = self._demand.content()
        if self._spare != self._useful():
            self._spare = self._useful()
            for key in self._objects:
                self._place(key)

    def kept_bytes(self, key: bytes) -> int:
        item = self._objects.get(key)
        if not isinstance(item, _Graded):
            return 0
        is_orphan = item.parent in self._ghosts and key not in self._children
        levels = 0 if is_orphan else self._way(key, item)[1]
        return item.cuts[levels - 1] if levels else 0

    def cut(self, key: bytes, size_bytes: int, kept_bytes: int) -> None:
        item = self._objects.get(key)
        if isinstance(item, _Graded):
            item.size_bytes = size_bytes
            item.levels = sum(cut <= kept_bytes for cut in item.cuts)
            self._pool = [one for one in self._pool if one[1] != key]  # it ranks higher now
            self._place(key)

    def _may_give(self, key: bytes, item: Item) -> bool:
        is_leaf = super()._may_give(key, item)
        return is_leaf or (isinstance(item, _Graded) and bool(self._lesser(item)))

    def _weight(self, key: bytes, item: Item) -> float:
        return self._way(key, item)[0] if isinstance(item, _Graded) else item.weight

    def _way(self, key: bytes, item: _Graded) -> tuple[float, int]:
        """How to make room with an object: what that costs for each byte, and the levels left."""
        content, cuts = self._content, item.cuts
        now, best = content[item.absent], (math.inf, 0)
        if key not in self._children:
            best = weight_of(item.size_bytes, item.saved_s * now), 0
        for levels in self._lesser(item):
            gained = cuts[item.levels - 1] - cuts[levels - 1]
            lost = now - content[len(cuts) - levels]
            best = min(best, (weight_of(gained, item.saved_s * lost), levels))
        return best

    def _lesser(self, item: _Graded) -> range:
        """Numbers of levels that it may be cut to."""
        return range(max(1, len(item.cuts) - self._spare), item.levels)
