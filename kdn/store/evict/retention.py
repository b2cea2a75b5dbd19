"""What may not go, and what should have gone: pins, retention by name, TTL, over any policy.

A pin is counted. A name retains a set of keys until it is given another set or none. Both may name
keys that are not here yet. A key that is pinned or retained is held; one whose TTL has passed goes
before all others (unless held), and using it no longer keeps it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush

from kdn.store.base import Hints
from kdn.store.evict.base import Policy


class Retention(Policy):
    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._here: set[bytes] = set()
        self._holds: Counter[bytes] = Counter()  # pins and names per key, here or not
        self._names: dict[bytes, frozenset[bytes]] = {}
        self._ends_s: dict[bytes, float] = {}  # when each key with a TTL expires
        self._ends: list[tuple[float, bytes]] = []  # heap of the same; outdated ones are skipped
        self._expired: set[bytes] = set()

    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        if key in self._here:
            self.touch(key)
            return
        self._here.add(key)
        self._policy.add(key, size_bytes, hints)
        if key in self._holds:
            self._policy.hold(key)

    def touch(self, key: bytes) -> None:
        if key not in self._expired:
            self._policy.touch(key)

    def remove(self, key: bytes) -> None:
        self._here.discard(key)
        self._ends_s.pop(key, None)
        self._expired.discard(key)
        self._policy.remove(key)

    def victim(self, held: bool = False) -> bytes | None:
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            end_s, key = heappop(self._ends)
            if self._ends_s.get(key) == end_s:
                del self._ends_s[key]
                self._expired.add(key)
                self._policy.demote(key)
        return self._policy.victim(held)

    def hold(self, key: bytes) -> None:
        """One more reason to keep a key, here or not: see `pin`."""
        self._holds[key] += 1
        if self._holds[key] == 1:
            self._policy.hold(key)

    def release(self, key: bytes) -> None:
        if not self._holds[key]:
            return
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
            self._policy.release(key)
            if key in self._expired:
                self._policy.demote(key)

    def demote(self, key: bytes) -> None:
        self._policy.demote(key)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Hold each key until it is unpinned as often as it was pinned."""
        for key in keys:
            self.hold(key)

    def unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.release(key)

    def retain(self, name: bytes, keys: Iterable[bytes]) -> None:
        """`name` now keeps exactly these keys; none to forget it."""
        for _ in self.retaining(name, keys):
            pass

    def retaining(self, name: bytes, keys: Iterable[bytes]) -> Iterator[None]:
        """The same a key at a time, for thousands of them: to be gone through to its end."""
        new, old = frozenset(keys), self._names.get(name, frozenset())
        for key in new - old:
            self.hold(key)
            yield
        if new:
            self._names[name] = new
        else:
            self._names.pop(name, None)
        for key in old - new:
            self.release(key)
            yield

    def expire(self, key: bytes, after_s: float) -> None:
        """A key that is here should go first once `after_s` seconds have passed."""
        if key in self._here:
            end_s = self._clock() + after_s
            if key in self._expired:
                self._expired.remove(key)
                self._policy.touch(key)
            self._ends_s[key] = end_s
            heappush(self._ends, (end_s, key))
