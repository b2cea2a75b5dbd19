"""What every eviction policy does.

A policy tracks the keys a store holds and names the one to drop next; the store does the dropping.
To put an object: `add` it first, then, while the store is too full, `remove` the `victim`; so a
newcomer's prefix is not dropped to make room for it. The newcomer itself is named only if nothing
else may go: then it cannot be kept, and the store has nothing to write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kdn.store.base import Hints


class Policy(ABC):
    """Not thread-safe. Keys that are not known are ignored by every method but `add`."""

    @abstractmethod
    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None:
        """An object is now here. Adding one that is here already is a `touch`."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """An object was used."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """An object is gone: evicted or deleted."""

    @abstractmethod
    def victim(self, held: bool = False) -> bytes | None:
        """The key that should go next; it stays until `remove`. None if nothing may go. With
        `held`, what is held may go after all else."""

    @abstractmethod
    def hold(self, key: bytes) -> None:
        """Name this key only where it is asked for what is held, until `release`."""

    def is_held(self, key: bytes) -> bool:
        """Whether a name retains it."""
        return False

    @abstractmethod
    def release(self, key: bytes) -> None:
        """A held key is ordinary again, as if just used."""
