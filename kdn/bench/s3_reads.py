"""How fast chunks are read from S3 through kdn, beside raw ranged gets of the same bytes.

Both ask for the same ranges of the same objects, all at once, in turns, so that what else goes on
on the machine meets both. Raw is obstore's `get` with a range, and its body in one piece, in the
same process. kdn's reads are pinned to a version, counted, and land where the reader wants them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from kdn.errors import StoreError
from kdn.store.object import ObjectStore
from kdn.store.object_layout import path_of
from kdn.store.streaming import Ask


@dataclass(frozen=True)
class S3Reads:
    """Seconds of each round; `of_raw` is the median over rounds of raw seconds by kdn's."""

    size_bytes: int
    """Of one round."""
    raw_s: Sequence[float]
    kdn_s: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        return sorted(raw / ours for raw, ours in zip(self.raw_s, self.kdn_s, strict=True))

    @property
    def of_raw(self) -> float:
        return statistics.median(self.ratios)


class _Landing:
    """A receiver with memory for all."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.memory = [bytearray(size) for size in sizes]

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        return memoryview(self.memory[number])[start : start + num_bytes]

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        """Nothing to do: it is where it belongs."""

    def gone(self, number: int) -> None:
        raise StoreError(f"chunk {number} is gone")


async def measure_reads(
    store: ObjectStore, *, chunks: int = 32, chunk_bytes: int = 1 << 20, rounds: int = 15
) -> S3Reads:
    """Puts chunks (random: nothing on the way can compress them), reads and deletes them. Every
    byte of every round is compared."""
    rng = np.random.default_rng(16)
    data = {rng.bytes(41): rng.bytes(chunk_bytes) for _ in range(chunks)}
    try:
        for key, one in data.items():
            await store.put(key, one, etag=key[:16], checksum=xxh3_64_intdigest(one))
        await store.lookup(list(data))
        raw_s, kdn_s = [], []
        for number in range(rounds + 1):
            raw = await _timed(lambda: _read_raw(store, data), list(data.values()))
            ours = await _timed(lambda: _read_through(store, data), list(data.values()))
            if number:  # the first opens connections
                raw_s.append(raw)
                kdn_s.append(ours)
    finally:
        for key in data:
            await store.delete(key)
    return S3Reads(chunks * chunk_bytes, raw_s, kdn_s)


async def _timed(
    read: Callable[[], Awaitable[Sequence[bytes | bytearray | memoryview]]],
    expected: Sequence[bytes],
) -> float:
    began_s = time.perf_counter()
    found = await read()
    seconds = time.perf_counter() - began_s
    if not all(one == right for one, right in zip(found, expected, strict=True)):
        raise StoreError("a byte that was read is not the one that was put")
    return seconds


async def _read_raw(store: ObjectStore, data: dict[bytes, bytes]) -> list[memoryview]:
    async def one(key: bytes, size: int) -> memoryview:
        start = store.begins_at(key)
        options = {"range": (start, start + size)}
        found = await store.bucket.client.get_async(path_of(key), options=options)
        return memoryview(await found.bytes_async())

    return await asyncio.gather(*(one(key, len(value)) for key, value in data.items()))


async def _read_through(store: ObjectStore, data: dict[bytes, bytes]) -> list[bytearray]:
    landing = _Landing([len(value) for value in data.values()])
    asks = [Ask(key, 0, len(value), key[:16]) for key, value in data.items()]
    await store.read_into(asks, landing)
    return landing.memory
