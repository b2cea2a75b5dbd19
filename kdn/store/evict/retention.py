"""What may not go: retention by name, over any policy.

A name retains a set of keys until it is given another set or none. It may name keys that are not
here yet. A key is held as long as any name retains it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kdn.store.base import Hints
from kdn.store.evict.base import Policy


class Retention(Policy):
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.may_cut = policy.may_cut
        self._holds: Counter[bytes] = Counter()  # names per key, here or not
        self._names: dict[bytes, frozenset[bytes]] = {}

    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        self._policy.add(key, size_bytes, hints)
        if key in self._holds:
            self._policy.hold(key)

    def touch(self, key: bytes, start: int = 0, end: int | None = None) -> None:
        self._policy.touch(key, start, end)

    def remove(self, key: bytes) -> None:
        self._policy.remove(key)

    def victim(self, held: bool = False) -> bytes | None:
        return self._policy.victim(held)

    def kept_bytes(self, key: bytes) -> int:
        return self._policy.kept_bytes(key)

    def cut(self, key: bytes, size_bytes: int, kept_bytes: int) -> None:
        self._policy.cut(key, size_bytes, kept_bytes)

    def hold(self, key: bytes) -> None:
        """One more reason to keep a key, here or not."""
        self._holds[key] += 1
        if self._holds[key] == 1:
            self._policy.hold(key)

    def is_held(self, key: bytes) -> bool:
        return key in self._holds

    def release(self, key: bytes) -> None:
        if not self._holds[key]:
            return
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
            self._policy.release(key)

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
