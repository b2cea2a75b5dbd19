"""Objects in a bucket of S3, Google Cloud Storage, Azure, or what speaks their protocols.

One object a key (`object_layout.py`). The first writer wins because puts are conditional, and what
is replaced is named by its version. Requests and their differences between servers are
`object_bucket.py`; reading is `object_reads.py`.

Nothing lists a bucket but `list`. So `stats` counts what this process put and deleted: how much a
bucket holds its owner's console knows better.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from weakref import WeakValueDictionary

from kdn.credentials import Credentials
from kdn.errors import LimitError, StoreError
from kdn.store.base import Entry, Span, Stats, Store, check_put, is_taken
from kdn.store.disk_format import decode_header, encode_header
from kdn.store.object_bucket import Abilities, Bucket, Version
from kdn.store.object_heads import TRIES, Heads, There
from kdn.store.object_layout import MAX_OBJECT_BYTES, before, folder_of, key_of, path_of
from kdn.store.object_location import open_client, parse_location
from kdn.store.object_reads import Reads, at_once
from kdn.store.streaming import Ask, Piece, Receiver

LOOK_S = 0.02
"""Before a put that somebody came in between looks again."""
LISTED_AT_ONCE = 64

KNOWN_ABILITIES = {
    "file": Abilities(create=True, update=False),
    "gs": Abilities(create=True, update=True),
    "az": Abilities(create=True, update=True),
}
"""Of those that are one server; of what speaks S3 each is asked."""


def open_object_store(url: str, credentials: Credentials | None = None) -> ObjectStore:
    """By URL (`object_location.py`)."""
    location = parse_location(url)
    client = open_client(location, credentials.tls_ca if credentials else None)
    bucket = Bucket(client, location.name, abilities=KNOWN_ABILITIES.get(location.kind))
    return ObjectStore(bucket, is_sorted=location.kind != "file")


class ObjectStore(Store):
    def __init__(self, bucket: Bucket, *, is_sorted: bool = True) -> None:
        """`is_sorted`: it lists in order of paths, as clouds do."""
        self.bucket = bucket
        self._is_sorted = is_sorted
        self._heads = Heads(bucket)
        self._reads = Reads(bucket, self._heads)
        self._counts = Stats()
        # One put of a key at a time: where the server takes no conditions, that is all there is.
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    # writing

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        check_put(entry, data, checksum)
        if len(data) > MAX_OBJECT_BYTES:
            raise LimitError(f"expected at most {MAX_OBJECT_BYTES} bytes, found {len(data)}")
        async with self._turns.setdefault(entry.key, asyncio.Lock()):
            return await self._put(entry, data, replacing)

    async def _put(self, entry: Entry, data: bytes, replacing: bytes | None) -> Entry:
        # Nothing is cut here, and readers of older versions know no cuts.
        entry = replace(entry, hints=replace(entry.hints, cuts=()))
        key, header = entry.key, encode_header(entry, data)
        can = await self.bucket.abilities()
        looks_first = replacing is not None or not can.create
        for attempt in range(TRIES):
            old = await self._heads.find(key) if looks_first or attempt else None
            if old is not None and old.entry and is_taken(old.entry, replacing):
                return old.entry
            version = await self._put_over(old, entry, header + data, can)
            if version is not None:
                self._count_put(entry, len(header), old)
                self._heads.replaced(key, version, decode_header(header))
                return replace(entry, head=b"")
            if attempt:
                await asyncio.sleep(LOOK_S)
        raise StoreError(f"{self.bucket.name}: {key.hex()} changes faster than it can be put")

    async def _put_over(
        self, old: There | None, entry: Entry, laid_out: bytes, can: Abilities
    ) -> Version | None:
        """None if somebody came in between. Where conditions are ignored, a second look tells."""
        over = old.version if old else None
        version = await self.bucket.put(path_of(entry.key), laid_out, over=over)
        if version is None or (can.create and version.is_known):
            return version
        there = await self._heads.find(entry.key)
        is_ours = there is not None and there.entry and there.entry.etag == entry.etag
        return there.version if there is not None and is_ours else None

    def _count_put(self, entry: Entry, header_bytes: int, old: There | None) -> None:
        self._counts.puts += 1
        self._counts.objects += old is None
        self._counts.size_bytes += header_bytes + entry.size_bytes
        if old is not None and old.header is not None:
            self._counts.size_bytes -= old.header.file_bytes

    async def delete(self, key: bytes) -> bool:
        there = await self._heads.find(key)
        if there is None:
            return False
        await self.bucket.delete(path_of(key))
        self._heads.deleted(key)
        if there.header is None:
            return False  # damaged: nobody could read it
        self._counts.objects = max(0, self._counts.objects - 1)
        self._counts.size_bytes = max(0, self._counts.size_bytes - there.header.file_bytes)
        return True

    # reading

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        assert start >= 0, f"ranges count from the beginning, found {start}"
        span = await self._reads.verified(key, start, end, etag)
        self._counts.hits += span is not None
        self._counts.misses += span is None
        return span

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        """One request a key, all at once."""
        each = list(dict.fromkeys(keys))
        found = await at_once(self._look_up(key, head_bytes) for key in each)
        entries = dict(zip(each, found, strict=True))
        return [entries[key] for key in keys]

    async def _look_up(self, key: bytes, head_bytes: int) -> Entry | None:
        there = await self._heads.find(key, head_bytes)
        if there is None or there.entry is None:
            return None
        return replace(there.entry, head=bytes(there.head[:head_bytes]))

    async def read_spans(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece]:
        async for piece in self._reads.in_order(asks):
            yield piece

    async def read_into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        await self._reads.into(asks, receiver)

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        """Slow and dear: a request for every thousand objects, and one for each of them."""
        waiting: list[bytes] = []
        async with aclosing(self._keys(prefix)) as keys:
            async for key in keys:
                waiting.append(key)
                if len(waiting) < LISTED_AT_ONCE:
                    continue
                for entry in await self.lookup(waiting):
                    if entry is not None:
                        yield entry
                waiting.clear()
        for entry in await self.lookup(waiting):
            if entry is not None:
                yield entry

    async def _keys(self, prefix: bytes) -> AsyncGenerator[bytes]:
        """In order."""
        unsorted: list[bytes] = []
        async with aclosing(self.bucket.list(folder_of(prefix), before(prefix))) as pages:
            async for page in pages:
                keys = [key for key in map(key_of, page) if key is not None]
                mine = [key for key in keys if key.startswith(prefix)]
                if not self._is_sorted:
                    unsorted += mine
                    continue
                for key in mine:
                    yield key
                if keys and keys[-1] > prefix and not keys[-1].startswith(prefix):
                    return
        for key in sorted(unsorted):
            yield key

    def begins_at(self, key: bytes) -> int:
        """Where in its object the bytes of a key begin that was just looked up or put."""
        there = self._heads.recall(key)
        if there is None or there.header is None:
            raise StoreError(f"{self.bucket.name}: {key.hex()} was not looked up")
        return there.header.header_bytes

    async def stats(self) -> Stats:
        """Objects and bytes that this process put there, less those that it deleted."""
        costs, corruptions = self.bucket.costs.copy(), self._heads.corruptions
        return replace(self._counts, corruptions=corruptions, costs=costs)

    async def close(self) -> None:
        await self.bucket.close()
