"""Publishing: once, verified, bounded, and through a node's absence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kdn.cache.keys import Chunk, seal_key
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream, Section, write
from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.publish import Answer, Publisher
from kdn.delivery.spool import Spool
from kdn.errors import NoSpaceError
from kdn.store.base import Entry, Store
from tests.delivery.world import Down, Proxy, World, level_major, make_world, put_stream, run


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(4)


def publish_all(publisher: Publisher, world: World, prefix_exact: bool = True) -> list[Answer]:
    return [
        publisher.publish(chunk, cache, prefix_exact=prefix_exact, saved_s=0.5)
        for chunk, cache in zip(world.chunks, world.caches, strict=True)
    ]


def publishing(
    world: World,
    store: Callable[[], Awaitable[Store]],
    test: Callable[[Publisher, Any], Awaitable[None]],
    **options: Any,
) -> Publisher:
    async def work() -> Publisher:
        opened = await store()
        async with Publisher(opened, world.codec, rng=Random(1), **options) as publisher:
            await test(publisher, opened)
        assert len(asyncio.all_tasks()) == 1
        return publisher

    return run(work())


def test_what_is_published_is_delivered(world: World) -> None:
    async def test(publisher: Publisher, store: Store) -> None:
        assert publish_all(publisher, world) == [Answer.QUEUED] * 4
        assert await publisher.flush(10.0)
        entries = await store.lookup([chunk.key for chunk in world.chunks])
        assert [entry and entry.hints.parent for entry in entries] == [
            None,
            *(chunk.key for chunk in world.chunks[:-1]),
        ]
        assert all(entry and entry.hints.saved_s == 0.5 for entry in entries)
        result = await deliver(world.request(), [store], policy=level_major)
        world.check(result)
        assert result.exact_chunks == 4

    publisher = publishing(world, lambda: world.store([]), test)
    assert publisher.counts.published == 4
    assert publisher.counts.failures == 0


def test_no_generation_loss(world: World) -> None:
    async def test(publisher: Publisher, store: Store) -> None:
        assert publish_all(publisher, world, prefix_exact=False) == [Answer.LOSSY] * 4
        assert await publisher.flush(1.0)
        assert await store.lookup([world.chunks[0].key]) == [None]

    publishing(world, lambda: world.store([]), test)


def test_known_chunks_are_not_encoded_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    encode = world.codec.encode

    def counting(chunk: Chunk, cache: KVCache) -> bytes:
        encoded.append(chunk.start)
        return encode(chunk, cache)

    monkeypatch.setattr(world.codec, "encode", counting)

    async def test(publisher: Publisher, store: Store) -> None:
        assert publish_all(publisher, world) == [Answer.QUEUED] * 4
        assert publish_all(publisher, world) == [Answer.ALREADY] * 4
        assert await publisher.flush(10.0)
        publish_all(publisher, world)
        assert await publisher.flush(10.0)

    publisher = publishing(world, lambda: world.store(world.streams[:2]), test)
    assert encoded == [512, 768]
    assert (publisher.counts.known, publisher.counts.published) == (6, 2)


def test_the_copy_is_the_publishers_own(world: World) -> None:
    async def test(publisher: Publisher, store: Store) -> None:
        cache = world.caches[0]
        mine = KVCache(cache.keys.clone(), cache.values.clone(), cache.start)
        publisher.publish(world.chunks[0], mine, prefix_exact=True)
        mine.keys.zero_()
        assert await publisher.flush(10.0)
        span = await store.get(world.chunks[0].key)
        assert span is not None
        assert bytes(span.data) == world.streams[0]

    publishing(world, lambda: world.store([]), test)


def test_the_queue_is_bounded(world: World) -> None:
    async def test(publisher: Publisher, store: Store) -> None:
        answers = publish_all(publisher, world)
        assert answers == [Answer.QUEUED, Answer.QUEUED, Answer.FULL, Answer.FULL]
        assert await publisher.flush(10.0)
        assert publisher.publish(world.chunks[2], world.caches[2], prefix_exact=True) is (
            Answer.QUEUED
        )

    publishing(world, lambda: world.store([]), test, max_queue_bytes=2 * world.caches[0].size_bytes)


def test_another_publisher_was_first(world: World) -> None:
    """Between the lookup and the put."""

    class Raced(Proxy):
        async def put(self, key: bytes, *args: Any, **named: Any) -> Entry:
            await put_stream(self.inner, world.others[0])
            return await super().put(key, *args, **named)

    async def store() -> Store:
        return Raced(await world.store([]))

    async def test(publisher: Publisher, store: Store) -> None:
        publisher.publish(world.chunks[0], world.caches[0], prefix_exact=True)
        assert await publisher.flush(10.0)
        [entry] = await store.lookup([world.chunks[0].key])
        assert entry is not None
        assert entry.etag == Bitstream.parse(world.others[0]).stream_id

    publisher = publishing(world, store, test)
    assert (publisher.counts.known, publisher.counts.published) == (1, 0)


def test_an_acknowledged_chunk_that_is_not_there_is_put_again(world: World) -> None:
    class Forgetful(Proxy):
        puts = 0

        async def put(self, key: bytes, data: bytes, **named: Any) -> Entry:
            self.puts += 1
            entry = await super().put(key, data, **named)
            if self.puts == 1:
                await self.inner.delete(key)
            return entry

    async def store() -> Store:
        return Forgetful(await world.store([]))

    async def test(publisher: Publisher, store: Forgetful) -> None:
        publisher.publish(world.chunks[0], world.caches[0], prefix_exact=True)
        assert await publisher.flush(10.0)
        assert store.puts == 2

    publisher = publishing(world, store, test)
    assert (publisher.counts.published, publisher.counts.failures) == (1, 1)


def test_a_node_that_comes_back_gets_everything(world: World) -> None:
    async def store() -> Store:
        return Down(await world.store([]))

    async def test(publisher: Publisher, store: Down) -> None:
        publish_all(publisher, world)
        assert not await publisher.flush(0.3)
        store.is_down = False
        assert await publisher.flush(10.0)

    publisher = publishing(world, store, test)
    assert publisher.counts.published == 4
    assert publisher.counts.dropped == 0


def test_a_spool_carries_chunks_over_a_restart(world: World, tmp_path: Path) -> None:
    async def down() -> Store:
        return Down(await world.store([]))

    async def first(publisher: Publisher, store: Store) -> None:
        publish_all(publisher, world)
        assert await publisher.flush(10.0), "spooled is safe"

    publisher = publishing(world, down, first, spool=Spool(tmp_path))
    assert (publisher.counts.spooled, publisher.counts.published) == (4, 0)

    async def second(publisher: Publisher, store: Store) -> None:
        assert publisher.publish(world.chunks[0], world.caches[0], prefix_exact=True) is (
            Answer.ALREADY
        )
        for _ in range(500):
            if publisher.counts.published == 4:
                break
            await asyncio.sleep(0.01)
        result = await deliver(world.request(), [store], policy=level_major)
        world.check(result)
        assert result.exact_chunks == 4

    publisher = publishing(world, lambda: world.store([]), second, spool=Spool(tmp_path))
    assert publisher.counts.published == 4
    assert not list(tmp_path.iterdir())


def test_a_full_spool_drops_and_counts(world: World, tmp_path: Path) -> None:
    async def down() -> Store:
        return Down(await world.store([]))

    async def test(publisher: Publisher, store: Store) -> None:
        publish_all(publisher, world)
        assert await publisher.flush(10.0)

    spool = Spool(tmp_path, max_bytes=len(world.streams[0]) + len(world.streams[1]) + 300)
    publisher = publishing(world, down, test, spool=spool)
    assert publisher.counts.spooled + publisher.counts.dropped == 4
    assert publisher.counts.dropped >= 1


def test_refusals_are_final(world: World) -> None:
    class Full(Proxy):
        async def put(self, *args: Any, **named: Any) -> Entry:
            raise NoSpaceError("no quota")

    async def store() -> Store:
        return Full(await world.store([]))

    async def test(publisher: Publisher, store: Store) -> None:
        publish_all(publisher, world)
        assert await publisher.flush(10.0)

    assert publishing(world, store, test).counts.refused == 4


def test_what_cannot_be_encoded_is_refused(world: World) -> None:
    async def test(publisher: Publisher, store: Store) -> None:
        cache = world.caches[0]
        keys = torch.full_like(cache.keys, float("nan"))
        bad = KVCache(keys, cache.values, cache.start)
        publisher.publish(world.chunks[0], bad, prefix_exact=True)
        assert await publisher.flush(10.0)

    assert publishing(world, lambda: world.store([]), test).counts.refused == 1


def test_a_fault_while_encoding_costs_one_chunk(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = world.codec.encode

    def broken(chunk: Chunk, cache: KVCache) -> bytes:
        if chunk is world.chunks[0]:
            raise RuntimeError("a mistake in the codec")
        return b"no stream at all" if chunk is world.chunks[1] else encode(chunk, cache)

    monkeypatch.setattr(world.codec, "encode", broken)

    async def test(publisher: Publisher, store: Store) -> None:
        publish_all(publisher, world)
        assert await publisher.flush(10.0)
        assert publisher.queued_bytes == 0
        found = await store.lookup([chunk.key for chunk in world.chunks])
        assert [entry is not None for entry in found] == [False, False, True, True]
        assert publisher.publish(world.chunks[0], world.caches[0], prefix_exact=True) is (
            Answer.QUEUED
        )

    counts = publishing(world, lambda: world.store([]), test).counts
    assert (counts.published, counts.faults, counts.refused) == (2, 3, 3)
    assert 'raise RuntimeError("a mistake in the codec")' in caplog.text


def test_a_fault_while_sending_costs_one_chunk(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Proxy):
        async def put(self, key: bytes, *args: Any, **named: Any) -> Entry:
            if key == world.chunks[0].key:
                raise TypeError("a mistake in the store")
            return await super().put(key, *args, **named)

        async def lookup(self, keys: Any, **named: Any) -> Any:
            if keys == [world.chunks[1].key]:
                raise AttributeError("and another one")
            return await super().lookup(keys, **named)

    async def store() -> Store:
        return Broken(await world.store([]))

    async def test(publisher: Publisher, store: Broken) -> None:
        publish_all(publisher, world)
        assert await publisher.flush(10.0)

    counts = publishing(world, store, test).counts
    assert (counts.published, counts.faults, counts.refused) == (2, 2, 2)
    assert "a mistake in the store" in caplog.text
    assert "and another one" in caplog.text


def test_a_fault_leaves_a_spooled_chunk_where_it_is(world: World, tmp_path: Path) -> None:
    """And the others get their turn."""

    class Broken(Proxy):
        is_broken = True

        async def put(self, key: bytes, *args: Any, **named: Any) -> Entry:
            if self.is_broken and key == world.chunks[0].key:
                raise TypeError("a mistake in the store")
            return await super().put(key, *args, **named)

    async def down() -> Store:
        return Down(await world.store([]))

    async def first(publisher: Publisher, store: Store) -> None:
        publish_all(publisher, world)
        assert await publisher.flush(10.0)

    async def store() -> Store:
        return Broken(await world.store([]))

    async def until(publisher: Publisher, published: int) -> None:
        async with asyncio.timeout(10.0):
            while publisher.counts.published < published:
                await asyncio.sleep(0.01)

    async def second(publisher: Publisher, store: Broken) -> None:
        await until(publisher, 3)
        assert len(list(tmp_path.iterdir())) == 1
        store.is_broken = False
        await until(publisher, 4)

    publishing(world, down, first, spool=Spool(tmp_path))
    assert publishing(world, store, second, spool=Spool(tmp_path)).counts.faults >= 1
    assert not list(tmp_path.iterdir())


def test_close_has_a_deadline_and_says_what_is_lost(world: World) -> None:
    async def work() -> None:
        publisher = Publisher(Down(await world.store([])), world.codec, rng=Random(1))
        async with publisher:
            publish_all(publisher, world)
            began_s = asyncio.get_running_loop().time()
            await publisher.close(deadline_s=0.3)
            assert asyncio.get_running_loop().time() - began_s < 5.0
        assert publisher.counts.dropped == 4
        assert len(asyncio.all_tasks()) == 1

    before = threading.active_count()
    run(work())
    assert threading.active_count() <= before


async def forged(world: World, number: int, how: str) -> bytes:
    """A stream under a chunk's key that no reader can use."""
    chunk, good = world.chunks[number], Bitstream.parse(world.streams[number])
    if how == "seal":  # the right values, sealed by somebody else
        sections = sections_of(world.streams[number])
        return write(good.info, sections, seal_key(b"somebody else's"))
    sections = [replace(one, data=b"nonsense") for one in sections_of(world.streams[number])]
    return write(good.info, sections, chunk.seal_key)


def sections_of(stream: bytes) -> list[Section]:
    return [
        Section(e.level, e.kind, e.group, stream[e.offset : e.end])
        for e in Bitstream.parse(stream).header.entries
    ]


@pytest.mark.parametrize("how", ["seal", "payload"])
def test_a_stream_nobody_can_use_gives_way_to_a_right_one(world: World, how: str) -> None:
    """It does not block its key: a reader notices it, and what it computes instead replaces it."""

    async def work() -> None:
        store = await world.store()
        key = world.chunks[1].key
        await store.delete(key)
        await put_stream(store, bad := await forged(world, 1, how))
        place = Endpoint(store)
        request = world.request(deadline_s=10.0)
        result = await deliver(request, [place], policy=level_major)
        assert result.levels[0]
        assert not result.levels[1]
        assert place.rejected(key) == Bitstream.parse(bad).stream_id
        async with Publisher(place, world.codec) as publisher:
            assert set(publish_all(publisher, world)) == {Answer.QUEUED}
            assert await publisher.flush(10.0)
            assert (publisher.counts.replaced, publisher.counts.published) == (1, 1)
        assert place.rejected(key) is None
        world.check(again := await deliver(request, [place], policy=level_major))
        assert all(again.levels)

    run(work())


def test_what_others_can_read_is_not_replaced(world: World) -> None:
    """Only the very stream that was rejected gives way."""

    async def work() -> None:
        store = await world.store()
        place = Endpoint(store)
        place.reject(world.chunks[1].key, b"a stream that is gone", 0.0)
        async with Publisher(place, world.codec) as publisher:
            publish_all(publisher, world)
            assert await publisher.flush(10.0)
            assert (publisher.counts.known, publisher.counts.replaced) == (4, 0)

    run(work())


def test_damaged_bytes_under_the_right_etag_are_replaced(world: World) -> None:
    """A store that spoilt a stream, and an encoder that makes the same one again."""

    async def work() -> None:
        store, key = await world.store(), world.chunks[1].key
        good = world.streams[1]
        damaged = good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]
        await store.delete(key)
        await put_stream(store, damaged)
        place = Endpoint(store)
        request = world.request(deadline_s=10.0, enough_kld=0.0)
        result = await deliver(request, [place], policy=level_major)
        assert result.levels[1] < world.codec.num_levels
        assert place.rejected(key) == Bitstream.parse(good).stream_id
        async with Publisher(place, world.codec) as publisher:
            publish_all(publisher, world)
            assert await publisher.flush(10.0)
            assert publisher.counts.replaced == 1
        span = await store.get(key)
        assert span is not None
        assert bytes(span.data) == good

    run(work())
