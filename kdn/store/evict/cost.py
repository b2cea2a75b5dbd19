"""Cost-aware: keep what saves the most seconds of prefill per byte and time, and contexts from
their root.

An object's worth is how soon a use of it is to be expected (`reuse`) times the square root of the
seconds it saves per byte. The root, because the first factor is a rough estimate and errs most for
those that would gain most: in trials on recorded requests it mostly saved more seconds. Worth
falls when uses fail to come, so what was once precious leaves.

A chunk is worthless without its prefix. So an object goes only after all its children that are
here (contexts shrink from their tail); a child's use is one of its ancestors; what is left without
its parent goes first; and the newest object goes last, whatever it is worth, for a store should not
refuse what someone puts.

Worth changes with time, so there is no order to keep. As Redis does, `victim` looks at SAMPLE
random candidates and keeps the worst for the next calls; with fewer candidates it looks at all.
Candidates are leaves. O(1) amortised, but for an object that comes after its children: its
ancestors are walked to see that hints make no ring.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass

from kdn.store.base import Hints
from kdn.store.evict.bag import Bag
from kdn.store.evict.base import Policy
from kdn.store.evict.reuse import Reuse

SAMPLE = 64
POOL = 16
GHOSTS = 8
"""Evicted objects remembered per object that is here: about 200 bytes each."""
MIN_LEARN_EVERY = 1024
MAX_UNLEARNED = 1 << 15
"""Uses that may wait to be learned from where nothing has to go: each takes 100 bytes."""
MAX_SAVED_S_PER_BYTE = 1e-3
"""Believed at most: hints come from outside. The largest models read about a token a second on the
slowest machines that run them, and a token of the smallest takes some kilobytes."""


@dataclass(slots=True)
class Item:
    """What is known of one object."""

    parent: bytes | None
    weight: float
    uses: int = 0
    last_use: int = 0
    fresh: int = 0  # last use of it or of a child that has left since
    held: bool = False


def weight_of(size_bytes: int, saved_s: float) -> float:
    """Root of the seconds saved per byte, as far as they are plausible."""
    return math.sqrt(min(max(saved_s, 0.0) / max(size_bytes, 1), MAX_SAVED_S_PER_BYTE))


class CostAware(Policy):
    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random(0)
        self._objects: dict[bytes, Item] = {}
        self._ghosts: OrderedDict[bytes, Item] = OrderedDict()  # evicted, oldest first
        self._children: Counter[bytes] = Counter()  # of each key, how many are here
        self._leaves = Bag()  # what may go
        self._last: dict[bytes, None] = {}  # leaves that are held, oldest first
        self._pool: list[tuple[int, bytes]] = []  # the last sample's worst, the very worst last
        self._newest: bytes | None = None
        self._named: bytes | None = None  # the last victim: only what was evicted becomes a ghost
        self._reuse = Reuse()
        self._now = 0
        self._learn_at = MIN_LEARN_EVERY

    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        if key in self._objects:
            self.touch(key)
            return
        item = self._made(size_bytes, hints)
        if item.parent is not None and self._is_ancestor(key, item.parent):
            item.parent = None
        ghost = self._ghosts.pop(key, None)
        if ghost:
            item.uses, item.last_use = ghost.uses, ghost.last_use
        self._objects[key] = item
        self._newest = key
        self._use(key, item)
        self._place(key)
        if item.parent is not None:
            self._children[item.parent] += 1
            self._place(item.parent)

    def _made(self, size_bytes: int, hints: Hints) -> Item:
        return Item(hints.parent, weight_of(size_bytes, hints.saved_s))

    def _is_ancestor(self, key: bytes, of: bytes) -> bool:
        """Hints come from outside, and a ring of parents would never leave."""
        above: bytes | None = of
        while above != key and above is not None and key in self._children:
            item = self._objects.get(above)
            above = item.parent if item else None
        return above == key

    def touch(self, key: bytes, start: int = 0, end: int | None = None) -> None:
        item = self._objects.get(key)
        if item:
            self._use(key, item)

    def _use(self, key: bytes, item: Item) -> None:
        self._now += 1
        if item.uses:
            self._reuse.ended(item.uses, self._now - item.last_use)
        item.uses += 1
        item.last_use = item.fresh = self._now
        self._reuse.began(key, item.uses, self._now)
        if self._now >= self._learn_at + MAX_UNLEARNED:
            self._learn()

    def remove(self, key: bytes) -> None:
        item = self._objects.pop(key, None)
        if item is None:
            return
        self._place(key)
        if key == self._named:
            self._ghosts[key] = item
        while len(self._ghosts) > GHOSTS * len(self._objects):
            self._ghosts.popitem(last=False)
        self._named = None
        if item.parent is not None:
            self._leave(item.parent, item)

    def _leave(self, parent: bytes, child: Item) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
        item = self._objects.get(parent)
        if item:
            item.fresh = max(item.fresh, child.fresh)
            self._place(parent)

    def victim(self, held: bool = False) -> bytes | None:
        if self._now >= self._learn_at:
            self._learn()
        self._named = self._worst()
        if self._named is None and held:
            self._named = next(iter(self._last), None)
        return self._named

    def _learn(self) -> None:
        self._reuse.learn(self._now, self._last_use)
        self._learn_at = self._now + max(MIN_LEARN_EVERY, len(self._objects) // 2)

    def _worst(self) -> bytes | None:
        while self._pool:
            fresh, key = self._pool[-1]
            if key in self._leaves and key != self._newest and self._objects[key].fresh == fresh:
                return key
            self._pool.pop()
        ranked = sorted(self._rank(key) for key in self._leaves.sample(SAMPLE, self._rng))
        self._pool = [
            (fresh, key) for _, fresh, key in ranked[: max(1, len(ranked) * POOL // SAMPLE)]
        ]
        self._pool.reverse()
        return self._pool[-1][1] if self._pool else None

    def _rank(self, key: bytes) -> tuple[float, int, bytes]:
        """Least goes first."""
        item = self._objects[key]
        if key == self._newest:
            return math.inf, item.fresh, key
        if item.parent in self._ghosts:
            return -1.0, item.fresh, key
        index = self._reuse.index(item.uses, self._now - item.fresh)
        return index * self._weight(key, item), item.fresh, key

    def _weight(self, key: bytes, item: Item) -> float:
        """What a use of the object counts for each byte that is gained without it."""
        return item.weight

    def _last_use(self, key: bytes) -> int | None:
        item = self._objects.get(key) or self._ghosts.get(key)
        return item.last_use if item else None

    def _place(self, key: bytes) -> None:
        """Among those that may go, or not, as things are now."""
        item = self._objects.get(key)
        leaf = item is not None and self._may_give(key, item)
        held = item is not None and item.held
        if leaf and held:
            self._last.setdefault(key)
        else:
            self._last.pop(key, None)
        if leaf and not held:
            self._leaves.add(key)
        else:
            self._leaves.discard(key)

    def _may_give(self, key: bytes, item: Item) -> bool:
        """Whether it may go without leaving others worthless."""
        return key not in self._children

    def hold(self, key: bytes) -> None:
        if key in self._objects:
            self._objects[key].held = True
            self._place(key)

    def release(self, key: bytes) -> None:
        item = self._objects.get(key)
        if item and item.held:
            item.held = False
            item.fresh = self._now
            self._place(key)
