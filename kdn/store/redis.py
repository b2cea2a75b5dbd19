"""Objects in Redis or Valkey: one server, one behind Sentinel, or a Cluster (`redis_record.py` says
how they lie there).

The server evicts as it is told to (`maxmemory-policy`). An object that has lost a part is a miss,
and the next put of its key takes its place.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from xxhash import xxh3_64_intdigest

from kdn.credentials import Credentials
from kdn.errors import FormatError, StoreError
from kdn.store.base import MAX_KEY_BYTES, Entry, Span, Stats, Store, check_put, clip
from kdn.store.redis_address import RedisAddress, parse_redis_url
from kdn.store.redis_census import Census, names_at
from kdn.store.redis_publishing import Publisher
from kdn.store.redis_reading import Gathered, LookupJob, SpanJob
from kdn.store.redis_record import Keys, Record
from kdn.store.redis_shards import Shards
from kdn.store.streaming import Ask, Collected, Piece, Receiver

LISTED = 256
"""Looked up at a time."""
SPANS_BYTES = 32 << 20
"""Read at a time for those who want pieces in order."""


def open_redis_store(url: str, credentials: Credentials) -> RedisStore:
    """Nothing is connected yet."""
    return RedisStore(parse_redis_url(url, credentials))


class RedisStore(Store):
    def __init__(self, address: RedisAddress) -> None:
        self._keys = Keys(address.options.prefix)
        self._shards = Shards(address)
        self._publisher = Publisher(self._shards, self._keys, address.options)
        self._census = Census(self._shards, self._keys)
        self._counts = Stats()

    # writes

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        check_put(entry, data, checksum)
        entry = replace(entry, head=b"")
        put = await self._publisher.put(entry, data, checksum, replacing)
        for gone in put.dropped:
            self._census.removed(gone.entry.size_bytes)
        if put.is_new:
            self._census.added(entry.size_bytes)
            self._counts.puts += 1
        return put.record.entry

    async def delete(self, key: bytes) -> bool:
        if not _askable(key):
            return False
        gone = await self._publisher.delete(key)
        if gone is not None:
            self._census.removed(gone.entry.size_bytes)
        return gone is not None

    # reads

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        assert start >= 0, f"ranges count from the beginning, found {start}"
        span = await self._get(key, start, end, etag) if _askable(key) else None
        self._counts.hits += span is not None
        self._counts.misses += span is None
        return span

    async def _get(
        self, key: bytes, start: int, end: int | None, etag: bytes | None
    ) -> Span | None:
        gathered = Gathered()
        job = SpanJob(self._keys, key, start, end, etag, gathered)
        await self._read([job])
        if job.is_gone or job.record is None:
            return None
        entry, data = job.record.entry, gathered.data()
        begin, stop = clip(start, end, entry.size_bytes)
        if len(data) != stop - begin:
            return None
        if len(data) == entry.size_bytes and xxh3_64_intdigest(data) != job.record.checksum:
            await self._set_aside(job.record)
            return None
        return Span(entry, begin, data)

    async def _set_aside(self, record: Record) -> None:
        """What is damaged is not served again."""
        self._counts.corruptions += 1
        with suppress(StoreError):
            if await self._publisher.drop(record):
                self._census.removed(record.entry.size_bytes)

    async def read_into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        """One exchange with each server that has some of it, straight from the socket."""
        jobs = [
            SpanJob(self._keys, ask.key, ask.start, ask.end, ask.etag, receiver, number)
            for number, ask in enumerate(asks)
            if _askable(ask.key)
        ]
        await self._read(jobs)
        for number, ask in enumerate(asks):
            if not _askable(ask.key):
                receiver.gone(number)
        for job in jobs:
            self._counts.hits += not job.is_gone
            self._counts.misses += job.is_gone
            if job.is_gone:
                receiver.gone(job.number)

    async def _read(self, jobs: Sequence[SpanJob]) -> None:
        left = list(jobs)
        while left:
            await self._shards.run(left)
            left = [job for job in left if not job.is_gone and not job.is_whole]

    async def read_spans(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece]:
        for some in _batches(asks):
            collected = _Pieces(len(some))
            await self.read_into([asks[number] for number in some], collected)
            for at, number in enumerate(some):
                found = None if at in collected.lost else collected.found[at]
                yield Piece(number, asks[number].start, found)

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        jobs = {
            key: LookupJob(self._keys, key, head_bytes)
            for key in dict.fromkeys(keys)
            if _askable(key)
        }
        await self._shards.run(list(jobs.values()))
        records = [job.found.record for job in jobs.values() if job.found.record is not None]
        whole = await self._publisher.whole(records)
        found = {record.entry.key: record.entry for record in whole}
        for key, entry in found.items():
            head = jobs[key].head
            if len(head) < min(head_bytes, entry.size_bytes):  # it goes on in the next part
                span = await self._get(key, 0, head_bytes, entry.etag)
                head = head if span is None else bytes(span.data)
            found[key] = replace(entry, head=head)
        return [found.get(key) for key in keys]

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        """Every server is asked for all its keys before the first entry comes."""
        found: set[bytes] = set()
        for master in await self._shards.masters():
            async for names in names_at(self._shards, master, self._keys.pattern(prefix)):
                found.update(key for name in names if (key := self._key_of(name)) is not None)
        ordered = sorted(found)
        for start in range(0, len(ordered), LISTED):
            for entry in await self.lookup(ordered[start : start + LISTED]):
                if entry is not None:
                    yield entry

    def _key_of(self, name: bytes) -> bytes | None:
        try:
            return self._keys.parse(name)
        except FormatError:
            return None

    async def stats(self) -> Stats:
        """Objects and bytes as last counted, and changed here since; what the servers may hold and
        have evicted since this store was first asked."""
        held = await self._census.held()
        return replace(
            self._counts,
            objects=held.objects,
            size_bytes=held.size_bytes,
            capacity_bytes=held.capacity_bytes,
            evictions=held.evictions,
        )

    async def close(self) -> None:
        await self._shards.close()


class _Pieces(Collected):
    def __init__(self, num_asks: int) -> None:
        super().__init__(num_asks)
        self.lost: set[int] = set()

    def gone(self, number: int) -> None:
        self.lost.add(number)


def _batches(asks: Sequence[Ask]) -> Iterator[list[int]]:
    """Numbers of asks that are read together, in order."""
    some: list[int] = []
    left_bytes = SPANS_BYTES
    for number, ask in enumerate(asks):
        size_bytes = max(0, ask.end - ask.start)
        if some and size_bytes > left_bytes:
            yield some
            some, left_bytes = [], SPANS_BYTES
        some.append(number)
        left_bytes -= size_bytes
    if some:
        yield some


def _askable(key: bytes) -> bool:
    """What cannot be here need not be asked for."""
    return 1 <= len(key) <= MAX_KEY_BYTES
