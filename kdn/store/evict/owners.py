"""Fair shares of a store between owners: who must give something up, then what.

Each owner's objects are ranked by a policy of their own, so hints only order an owner's objects
among themselves. Of all owners, the one that holds the most bytes for its weight gives next. So an
owner below its share (its weight's part of all that is held) never loses anything to others, and
whatever some leave unused, others may use.

What an owner holds (by names) is safe within its share only: beyond it, when the owner's turn
has come and nothing else of it may go, what is held goes, too. It is still held: an object that
comes back is kept again as far as there is room. An owner who is alone has all for its share.

The capacity is not known here: shares are of the bytes held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from kdn.store.base import Hints
from kdn.store.evict.base import Policy

STRANGERS_WEIGHT = 1e-6
"""Of an owner without a weight: nobody can ask for its objects any more, so they go first."""


@dataclass(frozen=True)
class Owners:
    """Whose an object is, told from its key, and what part of a store each owner may fill."""

    of: Callable[[bytes], bytes]
    weights: Mapping[bytes, float]


@dataclass
class _Part:
    """One owner's objects."""

    policy: Policy
    weight: float
    sizes: dict[bytes, int] = field(default_factory=dict)
    size_bytes: int = 0
    level: float = 0.0  # bytes for each unit of weight

    def grow(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.level = self.size_bytes / self.weight


_LEVEL = attrgetter("level")


class PerOwner(Policy):
    def __init__(self, make: Callable[[], Policy], owners: Owners) -> None:
        self._make = make
        self.may_cut = make().may_cut
        self._owners = owners
        self._parts: dict[bytes, _Part] = {}

    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        owner = self._owners.of(key)
        part = self._parts.get(owner)
        if part is None:
            weight = self._owners.weights.get(owner, STRANGERS_WEIGHT)
            part = self._parts[owner] = _Part(self._make(), weight)
        if key not in part.sizes:
            part.sizes[key] = size_bytes
            part.grow(size_bytes)
        part.policy.add(key, size_bytes, hints)

    def touch(self, key: bytes, start: int = 0, end: int | None = None) -> None:
        if part := self._part(key):
            part.policy.touch(key, start, end)

    def remove(self, key: bytes) -> None:
        if part := self._part(key):
            part.grow(-part.sizes.pop(key, 0))
            part.policy.remove(key)

    def victim(self, held: bool = False) -> bytes | None:
        parts = self._parts.values()
        most = max(parts, key=_LEVEL, default=None)
        if most is None:
            return None
        named = most.policy.victim(held)
        if named is None and most.level > self._fair_level():
            named = most.policy.victim(held=True)
        if named is not None:
            return named
        # Nobody is beyond their share, and what the first one has is held.
        return next(filter(None, (part.policy.victim(held) for part in parts)), None)

    def kept_bytes(self, key: bytes) -> int:
        part = self._part(key)
        return part.policy.kept_bytes(key) if part else 0

    def cut(self, key: bytes, size_bytes: int, kept_bytes: int) -> None:
        part = self._part(key)
        if part and key in part.sizes:
            part.grow(size_bytes - part.sizes[key])
            part.sizes[key] = size_bytes
            part.policy.cut(key, size_bytes, kept_bytes)

    def _fair_level(self) -> float:
        """Where all who have something would be if they had their share."""
        parts = [part for part in self._parts.values() if part.sizes]
        return sum(part.size_bytes for part in parts) / (sum(part.weight for part in parts) or 1.0)

    def hold(self, key: bytes) -> None:
        if part := self._part(key):
            part.policy.hold(key)

    def release(self, key: bytes) -> None:
        if part := self._part(key):
            part.policy.release(key)

    def _part(self, key: bytes) -> _Part | None:
        return self._parts.get(self._owners.of(key))
