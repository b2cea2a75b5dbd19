"""What every eviction policy does.

A policy tracks the keys a store holds and names the one to drop next; the store does the dropping.
To put an object: `add` it first, then, while the store is too full, `remove` the `victim`; so a
newcomer's prefix is not dropped to make room for it. The newcomer itself is named only if nothing
else may go: then it cannot be kept, and the store has nothing to write.

A policy may want a victim cut instead of dropped (`Hints.cuts`). It says how many bytes to keep of
it (`kept_bytes`), and the store tells it what it did: `cut` or, if that failed, `remove`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kdn.store.base import Hints


class Policy(ABC):
    """Not thread-safe. Keys that are not known are ignored by every method but `add`."""

    may_cut = False
    """Whether it ever asks for a cut: then stores remember where objects may be cut."""

    @abstractmethod
    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        """An object is now here. Adding one that is here already is a `touch`."""

    @abstractmethod
    def touch(self, key: bytes, start: int = 0, end: int | None = None) -> None:
        """An object was used: its bytes [start, end), if an end is told."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """An object is gone: evicted or deleted."""

    @abstractmethod
    def victim(self, held: bool = False) -> bytes | None:
        """The key that should go next; it stays until `remove`. None if nothing may go. With
        `held`, what is held may go after all else."""

    def kept_bytes(self, key: bytes) -> int:
        """Of the victim just named: how many of its first bytes stay; 0: it goes."""
        return 0

    def cut(self, key: bytes, size_bytes: int, kept_bytes: int) -> None:
        """Only the first `kept_bytes` of an object are here now; it takes `size_bytes`."""
        return

    @abstractmethod
    def hold(self, key: bytes) -> None:
        """Name this key only where it is asked for what is held, until `release`."""

    def is_held(self, key: bytes) -> bool:
        """Whether a name retains it."""
        return False

    @abstractmethod
    def release(self, key: bytes) -> None:
        """A held key is ordinary again, as if just used."""
