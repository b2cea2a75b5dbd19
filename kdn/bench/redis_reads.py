"""Reads through kdn beside raw pipelined GETRANGE of the same bytes, with the package `redis`.

Both in one process, in turns; every round's bytes are compared with what was put.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_intdigest

from kdn.bench.servers import ServerError
from kdn.credentials import Credentials
from kdn.store.redis import open_redis_store
from kdn.store.redis_address import parse_redis_url
from kdn.store.redis_connection import open_redis
from kdn.store.redis_record import RECORD_BYTES, Keys
from kdn.store.streaming import Ask

NUM_CHUNKS = 32
CHUNK_BYTES = 1 << 20
ROUNDS = 15


@dataclass
class RedisReads:
    """Seconds of each round, and of the lookups between them."""

    size_bytes: int
    kdn_s: list[float] = field(default_factory=list)
    raw_s: list[float] = field(default_factory=list)
    lookup_s: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        """How many times as fast as raw kdn was, round by round, the slowest first."""
        return sorted(raw / ours for ours, raw in zip(self.kdn_s, self.raw_s, strict=True))


class _Memory:
    """A reader that has memory for all chunks, as deliveries do."""

    def __init__(self, number: int, size_bytes: int) -> None:
        self.chunks = [bytearray(size_bytes) for _ in range(number)]

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        return memoryview(self.chunks[number])[start : start + num_bytes]

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        pass

    def gone(self, number: int) -> None:
        raise ServerError(f"chunk {number} is gone")


async def measure_redis_reads(
    url: str,
    num_chunks: int = NUM_CHUNKS,
    chunk_bytes: int = CHUNK_BYTES,
    rounds: int = ROUNDS,
) -> RedisReads:
    """A first round warms up and is not counted."""
    credentials = Credentials()
    store, client = open_redis_store(url, credentials), open_redis(url, credentials)
    data = [os.urandom(chunk_bytes) for _ in range(num_chunks)]
    keys = [os.urandom(16) for _ in data]
    names = [Keys(parse_redis_url(url, credentials).options.prefix).of(key) for key in keys]
    reads = RedisReads(num_chunks * chunk_bytes)
    try:
        for key, chunk in zip(keys, data, strict=True):
            await store.put(key, chunk, etag=key, checksum=xxh3_64_intdigest(chunk))
        asks = [Ask(key, 0, chunk_bytes, key) for key in keys]
        memory = _Memory(num_chunks, chunk_bytes)
        for _ in range(rounds + 1):
            began_s = time.perf_counter()
            await store.read_into(asks, memory)
            kdn_s = time.perf_counter()
            found = await _raw(client, names, chunk_bytes)
            raw_s = time.perf_counter()
            await store.lookup(keys, head_bytes=4096)
            reads.lookup_s.append(time.perf_counter() - raw_s)
            reads.kdn_s.append(kdn_s - began_s)
            reads.raw_s.append(raw_s - kdn_s)
            if memory.chunks != data or found != data:
                raise ServerError("expected the bytes that were put, found others")
        for times in (reads.kdn_s, reads.raw_s, reads.lookup_s):
            del times[0]
        return reads
    finally:
        for key in keys:
            await store.delete(key)
        await client.aclose()
        await store.close()


async def _raw(client: Any, names: Sequence[bytes], chunk_bytes: int) -> list[bytes]:
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.getrange(name, RECORD_BYTES, RECORD_BYTES + chunk_bytes - 1)
    found: list[bytes] = await pipeline.execute()
    return found
