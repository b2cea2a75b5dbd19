"""Many clients that look prompts up and read them, in one process: how fast, and whether right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kdn.bench.cluster.items import Item
from kdn.errors import KdnError
from kdn.store.base import Store
from kdn.store.streaming import Ask

BATCH = 32
"""Chunks of a prompt: 8,192 tokens."""
CLIENT_BYTES = 10 << 20
"""Memory of one client of many: of large chunks it reads fewer at a time."""


class Buffers:
    """A receiver that keeps the bytes of each ask in memory of its own, used again and again."""

    def __init__(self, most: int, size_bytes: int) -> None:
        self._memory = [memoryview(bytearray(size_bytes)) for _ in range(most)]
        self.sizes = [0] * most

    def begin(self) -> None:
        self.sizes = [0] * len(self._memory)

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        return self._memory[number][start : start + num_bytes]

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        self.sizes[number] = start + num_bytes

    def gone(self, number: int) -> None:
        self.sizes[number] = 0

    def got(self, number: int) -> memoryview:
        return self._memory[number][: self.sizes[number]]


@dataclass
class Seen:
    """By all clients."""

    num_bytes: int = 0
    lookup_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    errors: int = 0
    missing: int = 0
    """Objects that are stored, and were not found, or not whole."""
    wrong_bytes: int = 0
    """Objects that came whole, and are not what was stored."""

    def told(self, took_s: float) -> dict[str, Any]:
        return {
            "bytes_per_s": self.num_bytes / took_s,
            "lookup_p50_s": percentile(self.lookup_s, 50),
            "lookup_p99_s": percentile(self.lookup_s, 99),
            "read_p50_s": percentile(self.read_s, 50),
            "read_p99_s": percentile(self.read_s, 99),
            "reads": len(self.read_s), "errors": self.errors, "missing": self.missing,
            "wrong_bytes": self.wrong_bytes,
        }  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else float("nan")


async def crowd(
    store: Store, items: Sequence[Item], clients: int, window_s: float, seed: int = 0
) -> dict[str, Any]:
    """Each reads one prompt after the other, for so long."""
    batch = max(1, min(BATCH, CLIENT_BYTES // max(item.size_bytes for item in items)))
    seen, began_s = Seen(), time.perf_counter()
    until_s = began_s + window_s
    rngs = [Random(f"{seed} {at}") for at in range(clients)]
    await asyncio.gather(*(_client(store, items, batch, until_s, rng, seen) for rng in rngs))
    return {"chunks": batch, **seen.told(time.perf_counter() - began_s)}


async def _client(
    store: Store, items: Sequence[Item], batch: int, until_s: float, rng: Random, seen: Seen
) -> None:
    buffers = Buffers(batch, max(item.size_bytes for item in items))
    while time.perf_counter() < until_s:
        first = rng.randrange(len(items))
        prompt = [items[(first + at) % len(items)] for at in range(batch)]
        try:
            await read_prompt(store, prompt, buffers, seen)
        except (KdnError, OSError):
            seen.errors += 1
        check(prompt, buffers, seen, rng)


async def read_prompt(
    store: Store, prompt: Sequence[Item], buffers: Buffers, seen: Seen | None = None
) -> int:
    """Look up, read; the bytes that came."""
    buffers.begin()
    began_s = time.perf_counter()
    found = await store.lookup([item.key for item in prompt])
    looked_s = time.perf_counter()
    asks = [Ask(one.key, 0, one.size_bytes, one.etag) for one in found if one is not None]
    if len(asks) == len(prompt):
        await store.read_into(asks, buffers)
    num_bytes = sum(buffers.sizes)
    if seen is not None:
        seen.lookup_s.append(looked_s - began_s)
        seen.read_s.append(time.perf_counter() - looked_s)
        seen.num_bytes += num_bytes
    return num_bytes


def check(prompt: Sequence[Item], buffers: Buffers, seen: Seen, rng: Random) -> None:
    """The size of every object, and every byte of one of them."""
    short = sum(size != item.size_bytes for item, size in zip(prompt, buffers.sizes, strict=True))
    seen.missing += short
    at = rng.randrange(len(prompt))
    if buffers.sizes[at] == prompt[at].size_bytes and not prompt[at].is_whole(buffers.got(at)):
        seen.wrong_bytes += 1
