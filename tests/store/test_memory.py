"""The memory store: the contract, and its exact arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kdn.errors import NoSpaceError
from kdn.store.base import Entry, Store
from kdn.store.evict import open_policy
from kdn.store.memory import OVERHEAD_BYTES, MemoryStore, footprint_bytes
from tests.store.contract import StoreContract, closing, content, listed, put


class TestMemoryStore(StoreContract):
    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        async with closing(MemoryStore(capacity_bytes, open_policy("lru"))) as store:
            yield store


FOOTPRINT = footprint_bytes(Entry(b"a", bytes(16), 1000))


def test_every_byte_is_counted() -> None:
    assert FOOTPRINT == 1000 + 1 + 16 + OVERHEAD_BYTES


def test_evicts_the_least_recently_used_and_no_more_than_needed() -> None:
    async def test() -> None:
        store = MemoryStore(3 * FOOTPRINT, open_policy("lru"))
        for key in (b"a", b"b", b"c"):
            await put(store, key, content(key, 1000))
        assert (await store.stats()).size_bytes == 3 * FOOTPRINT
        await store.get(b"a")
        await put(store, b"d", content("d", 1000))
        assert await listed(store) == [b"a", b"c", b"d"]
        stats = await store.stats()
        assert (stats.size_bytes, stats.evictions) == (3 * FOOTPRINT, 1)

    asyncio.run(test())


def test_refuses_a_newcomer_where_all_else_is_held() -> None:
    async def test() -> None:
        policy = open_policy("lru")
        store = MemoryStore(2 * FOOTPRINT, policy)
        policy.retain(b"name", [b"a", b"b"])
        for key in (b"a", b"b"):
            await put(store, key, content(key, 1000))
        with pytest.raises(NoSpaceError):
            await put(store, b"c", content("c", 1000))
        assert await listed(store) == [b"a", b"b"]
        assert (await store.stats()).size_bytes == 2 * FOOTPRINT
        policy.retain(b"name", [b"a"])
        await put(store, b"c", content("c", 1000))
        assert await listed(store) == [b"a", b"c"]

    asyncio.run(test())
