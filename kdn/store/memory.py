"""Objects in this process's memory, bounded in bytes. Nothing survives its end.

No locks: every method runs on one event loop and none gives way in its middle.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from kdn.errors import NoSpaceError
from kdn.store.base import Entry, Span, Stats, Store, check_put, clip, is_taken
from kdn.store.evict import Policy, why_evicted
from kdn.store.tally import Tally, Usage, Watcher

OVERHEAD_BYTES = 1024
"""Counted for every object besides its bytes, key, etag and parent: the Python objects around them
and the policy's own (measured on CPython 3.11: 640 with LRU to 950 with cost policy and shares)."""


@dataclass(frozen=True, slots=True)
class _Held:
    entry: Entry
    data: bytes


def footprint_bytes(entry: Entry) -> int:
    """What an object counts against the capacity."""
    names = len(entry.key) + len(entry.etag) + len(entry.hints.parent or b"")
    return entry.size_bytes + names + OVERHEAD_BYTES


class MemoryStore(Store):
    volatile = True
    kind = "memory"

    def __init__(self, capacity_bytes: int, policy: Policy) -> None:
        self._held: dict[bytes, _Held] = {}
        self._policy = policy
        self._tally = Tally()
        self._counts = Stats(capacity_bytes=capacity_bytes)

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        key = entry.key
        check_put(entry, data, checksum)
        old = self._held.get(key)
        if old is not None:
            if is_taken(old.entry, replacing, entry):
                return old.entry
            self._drop(key)
        try:
            self._make_room(entry)
        except NoSpaceError:
            if old is not None and old.entry.is_beginning_of(entry):  # better than nothing
                self._make_room(old.entry)
                self._hold(old)
            raise
        self._hold(_Held(entry, bytes(data)))
        self._counts.puts += 1
        return entry

    def _hold(self, held: _Held) -> None:
        self._held[held.entry.key] = held
        self._tally.add(held.entry.key, held.entry.size_bytes)

    def _make_room(self, entry: Entry) -> None:
        """Count the newcomer and evict until all fits; refuse it if it is what should go."""
        size_bytes = footprint_bytes(entry)
        if size_bytes > self._counts.capacity_bytes:
            raise NoSpaceError(
                f"{size_bytes} bytes exceed the store's {self._counts.capacity_bytes}"
            )
        self._policy.add(entry.key, size_bytes, entry.hints)
        if entry.is_cut:
            self._policy.cut(entry.key, size_bytes, entry.size_bytes)
        self._counts.size_bytes += size_bytes
        while self._counts.size_bytes > self._counts.capacity_bytes:
            victim = self._policy.victim()
            if victim is None or victim == entry.key:
                self._policy.remove(entry.key)
                self._counts.size_bytes -= size_bytes
                raise NoSpaceError(f"no room for {size_bytes} bytes: all else is to be kept")
            kept_bytes = self._policy.kept_bytes(victim)
            if kept_bytes:
                self._cut(victim, kept_bytes)
                self._counts.cuts += 1
            else:
                self._counts.count_eviction(victim, why_evicted(self._policy, victim))
                self._drop(victim)

    def _cut(self, key: bytes, kept_bytes: int) -> None:
        """Whoever reads it at this moment has the bytes that it had."""
        held = self._held[key]
        entry = replace(held.entry, size_bytes=kept_bytes)
        self._held[key] = _Held(entry, held.data[:kept_bytes])
        self._policy.cut(key, footprint_bytes(entry), kept_bytes)
        self._tally.remove(key, held.entry.size_bytes)
        self._tally.add(key, kept_bytes)
        self._counts.size_bytes -= held.entry.size_bytes - kept_bytes

    def _drop(self, key: bytes) -> None:
        self._policy.remove(key)
        entry = self._held.pop(key).entry
        self._tally.remove(key, entry.size_bytes)
        self._counts.size_bytes -= footprint_bytes(entry)

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        held = self._held.get(key)
        if held is None or etag not in (None, held.entry.etag):
            self._counts.misses += 1
            return None
        self._counts.hits += 1
        begin, stop = clip(start, end, held.entry.size_bytes)
        self._policy.touch(key, begin, None if end is None else stop)
        return Span(held.entry, begin, memoryview(held.data)[begin:stop])

    def peek(self, key: bytes) -> Entry | None:
        held = self._held.get(key)
        return None if held is None else held.entry

    def get_now(self, key: bytes, start: int, end: int, etag: bytes) -> Span | None:
        held = self._held.get(key)
        if held is None or held.entry.etag != etag:
            return None
        self._counts.hits += 1
        self._policy.touch(key, start, end)
        return Span(held.entry, start, memoryview(held.data)[start:end])

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        return [self._look_up(key, head_bytes) for key in keys]

    def _look_up(self, key: bytes, head_bytes: int) -> Entry | None:
        held = self._held.get(key)
        if held is None or not head_bytes:
            return None if held is None else held.entry
        return replace(held.entry, head=held.data[:head_bytes])

    async def delete(self, key: bytes) -> bool:
        if key not in self._held:
            return False
        self._drop(key)
        return True

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        for key in sorted(key for key in self._held if key.startswith(prefix)):
            held = self._held.get(key)
            if held is not None:
                yield held.entry

    def usage(self, prefix: bytes) -> Usage:
        sizes = ((key, held.entry.size_bytes) for key, held in self._held.items())
        return self._tally.of(prefix, sizes)

    @property
    def own(self) -> Store:
        return self

    def watch(self, watcher: Watcher) -> None:
        self._tally.watcher = watcher

    async def stats(self) -> Stats:
        evicted = self._counts.evicted.copy()
        return replace(self._counts, objects=len(self._held), evicted=evicted)

    async def close(self) -> None:
        self._held.clear()
