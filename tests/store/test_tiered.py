"""Tiers: what is found where, and what moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kdn.errors import ChecksumError
from kdn.store.base import Hints, Store
from kdn.store.disk import open_disk
from kdn.store.evict import open_policy
from tests.store.contract import StoreContract, closing, content, etag_of, listed, put, read
from tests.store.tiers import Flaky, holds, memory, run, settle, stack


class TestThrough(StoreContract):
    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        store = stack(memory(capacity_bytes // 4), memory(capacity_bytes))
        async with closing(store):
            yield store


class TestOverDisk(StoreContract):
    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        disk = await open_disk(self.folder, capacity_bytes, open_policy("lru"))
        store = stack(memory(capacity_bytes // 4), disk, deadline_s=30.0)
        async with closing(store):
            yield store


def test_reads_promote_the_whole_object_to_all_tiers_above() -> None:
    async def test() -> None:
        top, middle, bottom = memory(), memory(), memory()
        store = stack(top, middle, bottom)
        data, hints = content("a", 5000), Hints(b"parent", 2.5)
        await put(bottom, b"a", data, hints)
        span = await store.get(b"a", 10, 20)
        assert span is not None
        assert (span.start, bytes(span.data)) == (10, data[10:20])
        await settle(lambda: holds(top, b"a"))
        assert await read(top, b"a") == await read(middle, b"a") == data
        [entry] = await top.lookup([b"a"])
        assert entry is not None
        assert (entry.etag, entry.hints) == (etag_of(data), hints)
        assert [tier.hits for tier in store.tiers] == [0, 0, 1]
        await store.get(b"a")
        assert [tier.hits for tier in store.tiers] == [1, 0, 1]

    run(test())


def test_little_is_promoted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of one byte must not bring large objects to memory, each of them whole."""
    monkeypatch.setattr("kdn.store.tiered.MAX_PROMOTING_BYTES", 1000)

    async def test() -> None:
        top, bottom = memory(), memory()
        store = stack(top, bottom)
        for name, size in {"large": 1001, "small": 999}.items():
            await put(bottom, name.encode(), content(name, size))
        assert await store.get(b"large", 0, 1)
        assert await store.get(b"small", 0, 1)
        await settle(lambda: holds(top, b"small"))
        assert not await holds(top, b"large")
        await settle(lambda: asyncio.sleep(0, store._promoting_bytes == 0))

    run(test())


def test_an_etag_may_be_found_below_another_object() -> None:
    async def test() -> None:
        top, bottom = memory(), memory()
        store = stack(top, bottom)
        await put(top, b"a", content("one", 100))
        await put(bottom, b"a", content("two", 100))
        span = await store.get(b"a", etag=etag_of(content("two", 100)))
        assert span is not None
        assert bytes(span.data) == content("two", 100)
        await asyncio.sleep(0.01)
        assert await read(store, b"a") == content("one", 100)

    run(test())


def test_identical_reads_share_one_flight() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(memory(), bottom)
        await put(bottom.store, b"a", content("a", 100))
        bottom.stalls.clear()
        reads = [asyncio.create_task(store.get(b"a", 0, 50)) for _ in range(10)]
        await asyncio.sleep(0.01)
        reads[0].cancel()  # the one that started it
        bottom.stalls.set()
        spans = await asyncio.gather(*reads[1:])
        assert {bytes(span.data) for span in spans if span} == {content("a", 100)[:50]}
        assert len(spans) == 9
        await settle(lambda: holds(store.tiers[0].store, b"a"))
        assert bottom.calls == ["get", "get"], "one for all readers, one to promote"

    run(test())


def test_lookup_asks_below_only_for_what_is_missing() -> None:
    async def test() -> None:
        top, bottom = Flaky(memory()), Flaky(memory())
        store = stack(top, bottom)
        await put(top.store, b"a", content("a", 10))
        await put(bottom.store, b"b", content("b", 10))
        found = await store.lookup([b"b", b"x", b"a"], head_bytes=4)
        assert [entry and entry.head for entry in found] == [
            content("b", 10)[:4],
            None,
            content("a", 10)[:4],
        ]
        assert [entry and entry.key for entry in await store.lookup([b"a"])] == [b"a"]
        assert bottom.calls == ["lookup"]

    run(test())


def test_lists_the_union_in_order_even_if_a_tier_fails() -> None:
    async def test() -> None:
        top, bottom = memory(), Flaky(memory())
        store = stack(top, bottom)
        for key in (b"a", b"c"):
            await put(top, key, content(key, 10))
        for key in (b"b", b"c", b"d"):
            await put(bottom.store, key, content(key, 10))
        assert await listed(store) == [b"a", b"b", b"c", b"d"]
        bottom.fails = True
        assert await listed(store) == [b"a", b"c"]
        assert store.tiers[1].errors == 1

    run(test())


def test_what_the_caller_got_wrong_is_the_callers_error() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(memory(), bottom)
        with pytest.raises(ChecksumError):
            await store.put(b"a", b"data", etag=b"e", checksum=1)
        assert bottom.calls == []
        assert store.tiers[1].errors == 0

    run(test())


def test_a_key_taken_below_is_not_taken_again_above() -> None:
    async def test() -> None:
        top, bottom = memory(), memory()
        store = stack(top, bottom)
        await put(bottom, b"a", content("first", 100))
        entry = await put(store, b"a", content("second", 100))
        assert entry.etag == etag_of(content("first", 100))
        assert not await holds(top, b"a")

    run(test())


def test_a_put_of_a_taken_key_tells_what_a_reader_finds() -> None:
    """A reader finds what is above first, whatever else a tier below has."""

    async def test() -> None:
        above, below = memory(), memory()
        await put(above, b"a", b"above")
        await put(below, b"a", b"below")
        async with closing(stack(above, below)) as store:
            entry = await put(store, b"a", b"new")
            assert entry.etag == etag_of(b"above")
            assert await store.lookup([b"a"]) == [entry]

    run(test())


def test_a_read_under_way_does_not_bring_a_deleted_object_back() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        top = memory()
        store = stack(top, bottom)
        await put(bottom.store, b"a", content("a", 100))
        bottom.stalls.clear()
        reading = asyncio.create_task(store.get(b"a"))
        await asyncio.sleep(0.01)
        deleting = asyncio.create_task(store.delete(b"a"))
        await asyncio.sleep(0.01)
        bottom.stalls.set()
        await asyncio.gather(reading, deleting)
        await asyncio.sleep(0.01)
        assert await store.get(b"a") is None
        assert not await holds(top, b"a")

    run(test())


def test_a_promotion_under_way_does_not_bring_a_deleted_object_back() -> None:
    async def test() -> None:
        bottom, top = Flaky(memory()), Flaky(memory())
        store = stack(top, bottom)
        await put(bottom.store, b"a", content("a", 100))
        promoting = asyncio.create_task(store.get(b"a"))
        await settle(lambda: asyncio.sleep(0, "get" in bottom.calls))
        top.stalls.clear()  # the promotion now waits to put
        await promoting
        await asyncio.sleep(0.01)
        deleting = asyncio.create_task(store.delete(b"a"))
        await asyncio.sleep(0.01)
        top.stalls.set()
        assert await deleting is True
        assert await listed(store) == []

    run(test())
