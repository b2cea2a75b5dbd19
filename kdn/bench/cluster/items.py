"""What is stored: chunks of random bytes, each known by what it must read as."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from kdn.bench.node_servers import make_chunk
from kdn.codec.header import Header
from kdn.store.base import Store

KIB = 1024
SMALL_BYTES, LARGE_BYTES = 60 * KIB, 1200 * KIB
"""Chunks of 256 tokens as `klt` codes them: of SmolLM2, and of a model of 8 billion weights."""
AT_ONCE = 16


@dataclass(frozen=True)
class Item:
    key: bytes
    etag: bytes
    data: bytes
    checksum: int

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def is_whole(self, data: bytes | bytearray | memoryview) -> bool:
        return len(data) == len(self.data) and xxh3_64_intdigest(data) == self.checksum


def make_items(size_bytes: int, seed: int | Sequence[int]) -> Iterator[Item]:
    """Without end, each another."""
    rng = np.random.default_rng(seed)
    while True:
        key = rng.bytes(16)
        data = make_chunk(key, rng.bytes(size_bytes))
        yield Item(key, Header.parse(data).stream_id, data, xxh3_64_intdigest(data))


async def put_item(store: Store, item: Item) -> bool:
    """Whether the store has these very bytes now."""
    found = await store.put(item.key, item.data, etag=item.etag, checksum=item.checksum)
    return found.etag == item.etag


async def put_all(store: Store, items: Sequence[Item]) -> None:
    """A few at a time; each must be accepted."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def put(item: Item) -> None:
        async with turns:
            assert await put_item(store, item), f"{item.key.hex()}: another object is there"

    await asyncio.gather(*map(put, items))
