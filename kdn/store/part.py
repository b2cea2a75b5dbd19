"""The objects of another store whose keys begin alike, under the rest of their keys."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from kdn.store.base import Entry, Span, Stats, Store
from kdn.store.streaming import Ask, Piece, Receiver
from kdn.store.tally import Usage


class PartStore(Store):
    """Closing it closes nothing: the whole has an owner. So have its counters."""

    def __init__(self, whole: Store, prefix: bytes) -> None:
        self._whole = whole
        self._prefix = prefix

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        hints = entry.hints
        if hints.parent is not None:
            hints = replace(hints, parent=self._prefix + hints.parent)
        outer = replace(entry, key=self._prefix + entry.key, hints=hints)
        return self._inner(await self._whole.put_entry(outer, data, checksum, replacing))

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        span = await self._whole.get(self._prefix + key, start, end, etag=etag)
        return None if span is None else replace(span, entry=self._inner(span.entry))

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        whole_keys = [self._prefix + key for key in keys]
        found = await self._whole.lookup(whole_keys, head_bytes=head_bytes)
        return [None if entry is None else self._inner(entry) for entry in found]

    async def read_spans(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece]:
        async with aclosing(self._whole.read_spans(self._outer(asks))) as pieces:
            async for piece in pieces:
                yield piece

    async def read_into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        await self._whole.read_into(self._outer(asks), receiver)

    def _outer(self, asks: Sequence[Ask]) -> list[Ask]:
        return [ask._replace(key=self._prefix + ask.key) for ask in asks]

    async def delete(self, key: bytes) -> bool:
        return await self._whole.delete(self._prefix + key)

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        async for entry in self._whole.list(self._prefix + prefix):
            yield self._inner(entry)

    def usage(self, prefix: bytes) -> Usage:
        return self._whole.usage(self._prefix + prefix)

    async def stats(self) -> Stats:
        return await self._whole.stats()

    async def close(self) -> None:
        """Nothing is its own."""

    def _inner(self, entry: Entry) -> Entry:
        """With keys as those who use this part know them."""
        hints, size = entry.hints, len(self._prefix)
        if hints.parent is not None:
            hints = replace(hints, parent=hints.parent[size:])
        return replace(entry, key=entry.key[size:], hints=hints)
