"""How much there is: counted by reading through all keys, now and then, and carried on in between.

Redis counts its keys, but not those of one prefix, nor their bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kdn.errors import FormatError, StoreError
from kdn.store.redis_address import Address
from kdn.store.redis_reading import LookupJob
from kdn.store.redis_record import Keys
from kdn.store.redis_shards import Shards
from kdn.store.redis_wire import Job

SCANNED = 1000
"""Keys that a server looks at for one answer; others wait meanwhile."""
MAX_NAMES = 1 << 24
LEAST_S = 1.0
SHARE = 100
"""Counting takes at most this part of the time: one in a hundred."""
MAX_INFO_BYTES = 1 << 20


@dataclass
class Holding:
    objects: int = 0
    size_bytes: int = 0
    capacity_bytes: int = 0
    """0: without bound."""
    evictions: int = 0


async def names_at(shards: Shards, master: Address, pattern: bytes) -> AsyncGenerator[list[bytes]]:
    """Of all keys there that match. What is there all the time comes at least once."""
    cursor, total = b"0", 0
    while True:
        job = Job(b"", [(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCANNED)])
        await shards.run_at(master, job)
        match job.replies[0]:
            case [bytes(cursor), [*found]]:
                names = [name for name in found if isinstance(name, bytes)]
            case _:
                raise StoreError(f"{master}: expected keys, found {str(job.replies[0])[:80]}")
        total += len(names)
        if total > MAX_NAMES:
            raise StoreError(f"{master}: expected at most {MAX_NAMES} keys")
        yield names
        if cursor == b"0":
            return


class Census:
    def __init__(self, shards: Shards, keys: Keys) -> None:
        self._shards, self._keys = shards, keys
        self._held = Holding()
        self._next_s = 0.0
        self._counting = asyncio.Lock()
        self._evicted: dict[Address, int] = {}  # keys, when a server was first asked

    def added(self, size_bytes: int) -> None:
        self._held.objects += 1
        self._held.size_bytes += size_bytes

    def removed(self, size_bytes: int) -> None:
        self._held.objects = max(0, self._held.objects - 1)
        self._held.size_bytes = max(0, self._held.size_bytes - size_bytes)

    async def held(self) -> Holding:
        async with self._counting:
            masters = await self._shards.masters()
            if time.monotonic() >= self._next_s:
                await self._count(masters)
            self._held.capacity_bytes = self._held.evictions = 0
            for master in masters:
                await self._ask(master)
            return self._held

    async def _count(self, masters: list[Address]) -> None:
        began_s = time.monotonic()
        sizes: dict[bytes, int] = {}
        for master in masters:
            async for names in names_at(self._shards, master, self._keys.pattern(b"")):
                sizes.update(await self._sizes(names))
        self._held = Holding(len(sizes), sum(sizes.values()))
        took_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + max(LEAST_S, SHARE * took_s)

    async def _sizes(self, names: list[bytes]) -> dict[bytes, int]:
        """Of those that are objects, by key."""
        jobs = []
        for name in names:
            try:
                jobs.append(LookupJob(self._keys, self._keys.parse(name)))
            except FormatError:
                continue
        await self._shards.run(jobs)
        records = [job.found.record for job in jobs]
        return {one.entry.key: one.entry.size_bytes for one in records if one is not None}

    async def _ask(self, master: Address) -> None:
        job = Job(b"", [(b"INFO", b"memory"), (b"INFO", b"stats")], max_string_bytes=MAX_INFO_BYTES)
        await self._shards.run_at(master, job)
        told = b"\r\n".join(reply for reply in job.replies if isinstance(reply, bytes))
        evicted = _number(told, b"evicted_keys")
        self._held.capacity_bytes += _number(told, b"maxmemory")
        self._held.evictions += max(0, evicted - self._evicted.setdefault(master, evicted))


def _number(told: bytes, name: bytes) -> int:
    for line in told.split(b"\r\n"):
        found, _, value = line.partition(b":")
        if found == name and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
