"""How much a store holds of each owner, owners being told apart by how their keys begin.

The first question counts everything once; from then on the counts follow what comes and goes, so
that whoever asks often, or holds much, costs others no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

OWNER_BYTES = 8
"""The beginning of a key that tells whose object it is, where a store has several owners."""


@dataclass
class Usage:
    """Objects, and their bytes as their owners know them: without what a store adds."""

    objects: int = 0
    size_bytes: int = 0


class Watcher(Protocol):
    """Somebody who is told of every object that comes and goes, at once. It must not fail."""

    def came(self, key: bytes, size_bytes: int) -> None: ...

    def went(self, key: bytes, size_bytes: int) -> None: ...


class Tally:
    """All questions are about prefixes of one or two lengths: each length is counted in full."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[bytes, Usage]] = {}  # by length, then by prefix
        self.watcher: Watcher | None = None

    def of(self, prefix: bytes, held: Iterable[tuple[bytes, int]]) -> Usage:
        """`held`: key and size of every object here."""
        counts = self._counts.get(len(prefix))
        if counts is None:
            counts = self._counts[len(prefix)] = {}
            for key, size_bytes in held:
                _count(counts, key[: len(prefix)], 1, size_bytes)
        found = counts.get(prefix, Usage())
        return Usage(found.objects, found.size_bytes)

    def add(self, key: bytes, size_bytes: int) -> None:
        for length, counts in self._counts.items():
            _count(counts, key[:length], 1, size_bytes)
        if self.watcher is not None:
            self.watcher.came(key, size_bytes)

    def remove(self, key: bytes, size_bytes: int) -> None:
        for length, counts in self._counts.items():
            _count(counts, key[:length], -1, -size_bytes)
        if self.watcher is not None:
            self.watcher.went(key, size_bytes)


def _count(counts: dict[bytes, Usage], prefix: bytes, objects: int, size_bytes: int) -> None:
    usage = counts.setdefault(prefix, Usage())
    usage.objects += objects
    usage.size_bytes += size_bytes
    if not usage.objects:
        del counts[prefix]
