"""Stacks of stores in tests, some of which fail or stall when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from kdn.errors import StoreError
from kdn.store.base import Entry, Span, Stats, Store
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from kdn.store.tiered import Tier, TieredStore

LIMIT_S = 20.0


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test

    asyncio.run(bounded())


def memory(capacity_bytes: int = 1 << 20) -> MemoryStore:
    return MemoryStore(capacity_bytes, open_policy("lru"))


class Flaky(Store):
    """A store in front of another that can fail, stall or be watched."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fails = False
        self.stalls = asyncio.Event()
        self.stalls.set()
        self.calls: list[str] = []
        self.closed = False

    async def _pass(self, name: str) -> None:
        self.calls.append(name)
        await self.stalls.wait()
        if self.fails:
            raise StoreError("gone")

    async def put_entry(self, *args: Any, **named: Any) -> Entry:
        await self._pass("put")
        return await self.store.put_entry(*args, **named)

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        await self._pass("get")
        return await self.store.get(key, start, end, etag=etag)

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        await self._pass("lookup")
        return await self.store.lookup(keys, head_bytes=head_bytes)

    async def delete(self, key: bytes) -> bool:
        await self._pass("delete")
        return await self.store.delete(key)

    async def list(self, prefix: bytes = b"") -> AsyncIterator[Entry]:
        await self._pass("list")
        async for entry in self.store.list(prefix):
            yield entry

    async def stats(self) -> Stats:
        await self._pass("stats")
        return await self.store.stats()

    async def close(self) -> None:
        self.closed = True


def stack(*stores: Store, deadline_s: float = 5.0, **options: Any) -> TieredStore:
    tiers = [Tier(f"tier {level}", store, deadline_s) for level, store in enumerate(stores)]
    return TieredStore(tiers, **options)


async def settle(true: Callable[[], Awaitable[bool]]) -> None:
    """Until what goes on in the background has come so far; the test's limit ends it."""
    while not await true():
        await asyncio.sleep(0.001)


async def holds(store: Store, key: bytes) -> bool:
    return (await store.lookup([key])) != [None]
