"""Writing objects to Redis: who is first, what gives way, and when a write is acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kdn.errors import NoSpaceError, StoreError
from kdn.store.base import Entry, is_taken
from kdn.store.redis_acknowledging import Acknowledgements
from kdn.store.redis_address import RedisOptions
from kdn.store.redis_pool import refusal
from kdn.store.redis_reading import Found, LengthJob, LookupJob, found_in, range_of
from kdn.store.redis_record import (
    MAX_OBJECT_BYTES,
    PART_BYTES,
    RECORD_BYTES,
    Keys,
    Record,
    new_record,
    pack_record,
)
from kdn.store.redis_shards import Shards
from kdn.store.redis_wire import Command, ErrorReply, Job

ATTEMPTS = 16
"""At a key that others change all the time."""
UNPUBLISHED_MS = 3_600_000
"""Parts of an object whose writer died before it published them end by themselves."""
DROP = b"""
if redis.call('TYPE', KEYS[1]).ok == 'string'
    and redis.call('GETRANGE', KEYS[1], 0, ARGV[2] - 1) ~= ARGV[1] then return 0 end
return redis.call('UNLINK', KEYS[1])
"""
"""Remove what somebody saw, unless it is another by now."""


@dataclass(frozen=True)
class Put:
    record: Record
    """Of what is there now."""
    is_new: bool
    dropped: list[Record]
    """What gave way."""


class Publisher:
    def __init__(self, shards: Shards, keys: Keys, options: RedisOptions) -> None:
        self._shards, self._keys = shards, keys
        self._acknowledgements = Acknowledgements(shards, options)
        self._ttl_ms = 0 if options.ttl_s is None else int(options.ttl_s * 1000)

    async def put(self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None) -> Put:
        """As a store does. Bytes of an object that is taken travel for nothing, so those who put
        long ones look first."""
        if len(data) > MAX_OBJECT_BYTES:
            raise NoSpaceError(f"{len(data)} bytes are more than {MAX_OBJECT_BYTES}")
        record = new_record(entry, checksum)
        dropped: list[Record] = []
        if replacing is not None or record.num_parts > 1:
            there = (await self._find(entry.key)).record
            if there is not None and not is_taken(there.entry, replacing):
                if await self.drop(there):
                    dropped.append(there)
            elif there is not None:
                await self._keep_parts(there)
                await self._acknowledgements.confirm(self._keys.of(entry.key), pack_record(there))
                return Put(there, False, dropped)
        await self._put_parts(record, data)
        kept = await self._publish(record, data)
        is_new = kept.nonce == record.nonce
        if not is_new:
            await self._forget_parts(record)
        return Put(kept, is_new, dropped)

    async def delete(self, key: bytes) -> Record | None:
        """What was there, if it was an object; whatever it was, it is gone."""
        name, gone = self._keys.of(key), None
        for _ in range(ATTEMPTS):
            found = await self._find(key)
            if found.seen is None:
                if gone is not None:
                    await self._acknowledgements.confirm(name, None)
                return gone
            gone = found.record or gone
            await self._drop(name, found.seen)
            if found.record is not None:
                await self._forget_parts(found.record)
        raise StoreError(f"{self._shards.address}: {key.hex()} comes back as often as it goes")

    async def drop(self, record: Record) -> bool:
        """Whether this very object was there."""
        dropped = await self._drop(self._keys.of(record.entry.key), pack_record(record))
        if dropped:
            await self._forget_parts(record)
        return dropped

    async def whole(self, records: Sequence[Record]) -> list[Record]:
        """Those of them that have all their parts. Only long ones have to be asked about."""
        jobs = [
            LengthJob(self._keys.of_part(record, part), record, part)
            for record in records
            for part in range(1, record.num_parts)
        ]
        await self._shards.run(jobs)
        torn = {job.record.nonce for job in jobs if job.is_miss}
        return [record for record in records if record.nonce not in torn]

    # its steps

    async def _find(self, key: bytes) -> Found:
        job = LookupJob(self._keys, key)
        job.writes = True  # of a key's master: this is the beginning of a change
        await self._shards.run([job])
        return await self._checked(job.found)

    async def _checked(self, found: Found) -> Found:
        """Without the record of an object that has lost a part."""
        if found.record is None or await self.whole([found.record]):
            return found
        return Found(seen=found.seen)

    async def _publish(self, record: Record, data: bytes) -> Record:
        """The record of whoever is first."""
        key, acknowledgements = record.entry.key, self._acknowledgements
        name, told = self._keys.of(key), pack_record(record)
        value = told + memoryview(data)[:PART_BYTES]
        for _ in range(ATTEMPTS):
            set_it: Command = (b"SET", name, value, b"NX", *self._expiry(self._ttl_ms))
            job = acknowledgements.write(
                name, [set_it, range_of(name, 0, RECORD_BYTES), (b"STRLEN", name)]
            )
            await self._shards.run([job])
            stored, first, size_bytes, *acknowledged = job.replies
            if isinstance(stored, ErrorReply):
                raise self._refused(stored)
            if stored is not None:
                await self._keep_parts(record)
                wrote = record.num_parts == 1
                if not acknowledgements.is_enough(name, acknowledged, wrote=wrote):
                    await acknowledgements.confirm(name, told)
                return record
            found = await self._checked(found_in(key, first, size_bytes))
            if found.record is not None:
                await self._keep_parts(found.record)
                if not acknowledgements.is_enough(name, acknowledged, wrote=False):
                    await acknowledgements.confirm(name, found.seen)
                return found.record
            if found.seen is not None:
                await self._drop(name, found.seen)
        raise StoreError(f"{self._shards.address}: {key.hex()} is changed all the time")

    def _refused(self, reply: ErrorReply) -> StoreError:
        if reply.code == "OOM":
            return NoSpaceError(f"{self._shards.address}: {reply.text[:200]}")
        return refusal(self._shards.address, reply)

    @staticmethod
    def _expiry(ms: int) -> Command:
        return (b"PX", ms) if ms else ()

    async def _put_parts(self, record: Record, data: bytes) -> None:
        """One at a time: each is long. Nobody finds them before the record is there."""
        end_ms = UNPUBLISHED_MS + self._ttl_ms
        for part in range(1, record.num_parts):
            name = self._keys.of_part(record, part)
            start = part * PART_BYTES
            value = memoryview(data)[start : start + PART_BYTES]
            job = Job(name, [(b"SET", name, value, *self._expiry(end_ms))], writes=True)
            await self._shards.run([job])
            if isinstance(job.replies[0], ErrorReply):
                raise self._refused(job.replies[0])

    async def _keep_parts(self, record: Record) -> None:
        """Whoever acknowledges an object sees to it: its writer may have died before it did."""
        if record.num_parts == 1:
            return
        if not self._ttl_ms:
            jobs = self._for_parts(record, b"PERSIST")
            await self._shards.run(jobs)
            for job in jobs:
                if isinstance(job.replies[0], ErrorReply):
                    raise self._refused(job.replies[0])
        if not await self.whole([record]):
            raise NoSpaceError(f"{self._shards.address}: a part was evicted while it was written")

    async def _forget_parts(self, record: Record) -> None:
        """As far as possible: nobody finds them without their record."""
        with suppress(StoreError):
            await self._shards.run(self._for_parts(record, b"UNLINK"))

    def _for_parts(self, record: Record, command: bytes) -> list[Job]:
        names = [self._keys.of_part(record, part) for part in range(1, record.num_parts)]
        return [Job(name, [(command, name)], writes=True) for name in names]

    async def _drop(self, name: bytes, seen: bytes) -> bool:
        job = Job(name, [(b"EVAL", DROP, 1, name, seen, RECORD_BYTES)], writes=True)
        await self._shards.run([job])
        if isinstance(job.replies[0], ErrorReply):
            raise refusal(self._shards.address, job.replies[0])
        return job.replies[0] == 1
