"""Processes that spool chunks until they are killed, and tell what has become of them.

A message is made of numbers of chunks, one byte each.
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.delivery.parcel import Parcel
from kdn.delivery.publish import Publisher, Values
from kdn.delivery.spool import Spool
from kdn.errors import StoreError
from kdn.store.base import Entry, Hints, Store
from kdn.store.disk import open_disk
from kdn.store.evict import open_policy
from tests.delivery.world import Proxy
from tests.node.harness import chunk_stream

NUM_CHUNKS = 200
CHUNKS = cut(np.arange(NUM_CHUNKS * 256) % 251, Namespace(b"spooler", b""))
NUMBERS = {chunk.key: number for number, chunk in enumerate(CHUNKS)}
SIZE_BYTES = 2000


def stream(number: int) -> bytes:
    return chunk_stream(CHUNKS[number].key, SIZE_BYTES, seed=number)


def values(number: int) -> Values:
    """Of which only the number counts."""
    one = torch.full((1, 256, 1, 1), float(number))
    return Values(KVCache(one, one, CHUNKS[number].start), final=True)


class Numbered(Codec):
    name = "numbered"

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        return stream(int(cache.keys[0, 0, 0, 0]))

    def decode(self, *args: Any, **named: Any) -> KVCache:
        raise NotImplementedError


class Flickering(Proxy):
    """Away with some probability, before a chunk is stored or before that is told."""

    def __init__(self, inner: Store, rng: Random, away: float) -> None:
        super().__init__(inner)
        self.rng, self.away = rng, away

    async def put(self, *args: Any, **named: Any) -> Entry:
        if self.rng.random() < self.away:
            raise StoreError("nobody there")
        entry = await super().put(*args, **named)
        if self.rng.random() < self.away:
            raise StoreError("cut off")
        return entry


async def place(folder: Path) -> Store:
    return await open_disk(folder, 1 << 30, open_policy("lru"))


def publish(
    root: Path, folder: Path, seed: int, away: float, mine: range, told: Connection
) -> None:
    """Publish these chunks a few at a time, and tell when they are accepted."""

    async def work() -> None:
        rng = Random(seed)
        flickering = Flickering(await place(folder), rng, away)
        spool, left = Spool.open(root), list(mine)
        async with Publisher(flickering, Numbered(), spool=spool, rng=rng) as publisher:
            while left:
                some = [left.pop() for _ in range(min(len(left), rng.randint(1, 4)))]
                for number in some:
                    publisher.publish(CHUNKS[number], values(number))
                assert await publisher.flush(60.0)
                assert publisher.counts.refused == publisher.counts.dropped == 0
                told.send_bytes(bytes(some))
            await asyncio.sleep(60.0)  # to be killed

    asyncio.run(work())


def parcel(number: int) -> Parcel:
    return Parcel(CHUNKS[number].key, b"etag", stream(number), Hints())


def hammer(root: Path, seed: int, mine: range, told: Connection, sent: Connection) -> None:
    """Add these chunks, send whatever is there, take over from others, come and go: in any order,
    without end. Told is what was added; sent is what is about to be removed."""
    rng, left, spool = Random(seed), list(mine), Spool.open(root)
    while True:
        deed = rng.randrange(8)
        if deed < 4 and left:
            assert spool.add(parcel(left[-1]))
            told.send_bytes(bytes([left.pop()]))
        elif deed < 6 and (first := spool.first()) is not None:
            assert first == parcel(NUMBERS[first.key])
            sent.send_bytes(bytes([NUMBERS[first.key]]))
            spool.remove(first.key)
        elif deed == 6:
            spool.adopt()
        else:
            spool.close()
            spool = Spool.open(root)
