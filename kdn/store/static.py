"""What `kdn export` wrote, read from any web server that serves ranges: nginx, or a CDN.

Chunks are found through their index (`static_index.py`) and read by ranges, as many at a time as a
reader asks for, over connections that are kept (`static_ranges.py`). Nothing can be written.

What is read carries no checksum of its own: readers verify it, as a bitstream and a profile let
them. What a web server has of a chunk has one etag for ever: it is part of the file's name.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from kdn.errors import FormatError, ReadOnlyError
from kdn.protocol.limits import MAX_PROFILE_BYTES
from kdn.store.base import Entry, Span, Stats, Store, clip
from kdn.store.node_client import HttpLimits
from kdn.store.static_client import StaticClient
from kdn.store.static_index import Index
from kdn.store.static_layout import (
    KEY_BYTES,
    LIST_FILE,
    MAX_LIST_BYTES,
    parse_list,
    profile_path,
)
from kdn.store.streaming import Ask, Collected, Receiver


class _ExportStore(Store):
    """Closing it closes its client, for all who share that."""

    read_only = True

    def __init__(self, client: StaticClient) -> None:
        self._client = client
        self._counts = Stats()

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        raise self._refusal()

    async def delete(self, key: bytes) -> bool:
        raise self._refusal()

    async def stats(self) -> Stats:
        """Counters of this client."""
        return replace(self._counts)

    async def close(self) -> None:
        await self._client.close()

    def _refusal(self) -> ReadOnlyError:
        return read_only_error(self._client.url)

    def _count(self, span: Span | None) -> Span | None:
        self._counts.hits += span is not None
        self._counts.misses += span is None
        return span


class StaticStore(_ExportStore):
    """The chunks of an export."""

    def __init__(self, client: StaticClient) -> None:
        super().__init__(client)
        self._index = Index(client)

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        [entry] = await self.lookup([key])
        if entry is None or etag not in (None, entry.etag):
            return self._count(None)
        begin, stop = clip(start, end, entry.size_bytes)
        got = Collected(1)
        if begin < stop:
            await self.read_into([Ask(key, begin, stop, entry.etag)], got)
        [data] = got.found
        whole = len(data) == stop - begin
        return self._count(Span(replace(entry, head=b""), begin, data) if whole else None)

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        """Of the keys of one prompt, in order. A head ends where the stream's header does, also
        where more was asked for."""
        try:
            _, found = await asyncio.gather(self._client.check(), self._index.look_up(keys))
        except FormatError:
            self._counts.corruptions += 1
            return [None] * len(keys)
        heads = {key: replace(one, head=one.head[:head_bytes]) for key, one in found.items()}
        return [heads.get(key) for key in keys]

    async def read_into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        if all(ask.start < ask.end for ask in asks):
            await self._client.read_chunks(asks, receiver)
        else:
            await super().read_into(asks, receiver)  # no range of a file is empty

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        found = await self._client.get(LIST_FILE, MAX_LIST_BYTES)
        for entry in parse_list(found.body) if found is not None else ():
            if entry.key.startswith(prefix):
                yield entry


class StaticProfiles(_ExportStore):
    """The profiles of an export: their digests are their keys, and their etags."""

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        [entry] = await self.lookup([key])
        if entry is None or etag not in (None, key):
            return self._count(None)
        begin, stop = clip(start, end, entry.size_bytes)
        data = b""
        if begin < stop:
            found = await self._client.get(profile_path(key), MAX_PROFILE_BYTES)
            data = b"" if found is None else found.body[begin:stop]
        return self._count(Span(entry, begin, data) if len(data) == stop - begin else None)

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        """Without heads."""
        await self._client.check()
        return [await self._entry(key) for key in keys]

    async def _entry(self, key: bytes) -> Entry | None:
        size = await self._client.size(profile_path(key)) if len(key) == KEY_BYTES else None
        return None if size is None or not 0 <= size <= MAX_PROFILE_BYTES else Entry(key, key, size)

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        """None: manifests name those that are there."""
        nothing: Sequence[Entry] = ()
        for entry in nothing:
            yield entry


def read_only_error(url: str) -> ReadOnlyError:
    return ReadOnlyError(f"{url} is an export, and read-only: `kdn export` changes it")


def open_static_store(
    url: str, *, limits: HttpLimits | None = None, tls: ssl.SSLContext | None = None
) -> StaticStore:
    return StaticStore(StaticClient(url, limits=limits, tls=tls))
