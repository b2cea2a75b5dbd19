"""Publishing: from a source, once, bounded; what goes wrong costs one chunk."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.delivery.client import deliver
from kdn.delivery.publish import Admission, Publisher, Values
from kdn.errors import NoSpaceError
from kdn.store.base import Entry, Store
from kdn.store.http import HttpStore
from tests.delivery.publishing import all_accepted, publish_all, publishing
from tests.delivery.world import Proxy, World, level_major, make_world
from tests.node.harness import Running, settled, with_node


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(4)


def test_what_is_published_is_delivered(world: World) -> None:
    async def test(publisher: Publisher, store: Store) -> None:
        assert publish_all(publisher, world) == [Admission.QUEUED] * 4
        assert await publisher.flush(10.0)
        entries = await store.lookup([chunk.key for chunk in world.chunks])
        assert [entry and entry.hints.parent for entry in entries] == [
            None,
            *(chunk.key for chunk in world.chunks[:-1]),
        ]
        assert all(entry and entry.hints.saved_s == 0.5 for entry in entries)
        result = await deliver(world.request(), [store], policy=level_major)
        world.check(result)
        assert result.levels == (world.codec.num_levels,) * 4

    publisher = publishing(world, lambda: world.store([]), test)
    assert publisher.counts.published == 4
    assert publisher.counts.failures == 0


def test_a_chunk_that_is_on_its_way_is_not_taken_twice(world: World) -> None:
    async def test(publisher: Publisher, store: Store) -> None:
        assert publish_all(publisher, world) == [Admission.QUEUED] * 4
        assert publish_all(publisher, world) == [Admission.ALREADY] * 4
        assert await publisher.flush(10.0)

    assert publishing(world, lambda: world.store([]), test).counts.published == 4


def test_a_published_chunk_is_one_request(world: World, tmp_path: Path) -> None:
    async def test(node: Running) -> dict[tuple[str, str], int]:
        store = HttpStore(node.url, collection="chunks")
        async with Publisher(store, world.codec) as publisher:
            await all_accepted(publisher, world)
        assert publisher.counts.published == 4
        await store.close()
        return await settled(node)

    assert with_node(tmp_path, test) == {("PUT", "/v1/{collection}/{key}"): 4}


def test_final_values_are_not_copied(world: World) -> None:
    chunk, cache = world.chunks[0], world.caches[0]
    assert Values(cache, final=True).read(chunk).keys.data_ptr() == cache.keys.data_ptr()
    assert Values(cache).read(chunk).keys.data_ptr() != cache.keys.data_ptr()


def test_the_copy_is_the_publishers_own(world: World) -> None:
    async def test(publisher: Publisher, store: Store) -> None:
        cache = world.caches[0]
        mine = KVCache(cache.keys.clone(), cache.values.clone(), cache.start)
        publisher.publish(world.chunks[0], Values(mine))
        mine.keys.zero_()
        assert await publisher.flush(10.0)
        span = await store.get(world.chunks[0].key)
        assert span is not None
        assert bytes(span.data) == world.streams[0]

    publishing(world, lambda: world.store([]), test)


@dataclass
class Watched:
    """A source that tells which chunks were read from it."""

    caches: list[KVCache]
    read_from: list[int] = field(default_factory=list)

    def read(self, chunk: Chunk) -> KVCache:
        self.read_from.append(chunk.start)
        return self.caches[chunk.start // 256]


def test_the_queue_is_bounded_and_what_it_refuses_is_not_read(world: World) -> None:
    source = Watched(world.caches)

    async def test(publisher: Publisher, store: Store) -> None:
        said = [publisher.publish(chunk, source) for chunk in world.chunks]
        assert said == [Admission.QUEUED, Admission.QUEUED, Admission.FULL, Admission.FULL]
        assert source.read_from == [0, 256]
        assert await publisher.flush(10.0)
        assert publisher.publish(world.chunks[2], source) is Admission.QUEUED

    publishing(world, lambda: world.store([]), test, max_queue_bytes=2 * world.caches[0].size_bytes)


def test_flush_waits_for_what_was_queued_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, encode = threading.Event(), world.codec.encode

    def stops(chunk: Chunk, cache: KVCache) -> bytes:
        assert chunk is world.chunks[0] or goes_on.wait(20.0)
        return encode(chunk, cache)

    monkeypatch.setattr(world.codec, "encode", stops)

    async def test(publisher: Publisher, store: Store) -> None:
        publisher.publish(world.chunks[0], Values(world.caches[0]))
        flushing = asyncio.create_task(publisher.flush(15.0))
        await asyncio.sleep(0)
        publisher.publish(world.chunks[1], Values(world.caches[1]))
        try:
            assert await flushing
            assert not await publisher.flush(0.0)
        finally:
            goes_on.set()

    publishing(world, lambda: world.store([]), test)


def test_a_stream_that_another_published_first_stays(world: World) -> None:
    """What it stored stays."""

    async def test(publisher: Publisher, store: Store) -> None:
        await all_accepted(publisher, world)
        [entry] = await store.lookup([world.chunks[0].key])
        assert entry is not None
        assert entry.etag == Bitstream.parse(world.others[0]).stream_id

    publisher = publishing(world, lambda: world.store(world.others[:1]), test)
    assert (publisher.counts.known, publisher.counts.published) == (1, 3)


def test_refusals_are_final(world: World) -> None:
    class Full(Proxy):
        async def put(self, *args: Any, **named: Any) -> Entry:
            raise NoSpaceError("no quota")

    async def store() -> Store:
        return Full(await world.store([]))

    async def test(publisher: Publisher, store: Store) -> None:
        await all_accepted(publisher, world)

    assert publishing(world, store, test).counts.refused == 4


def test_what_cannot_be_encoded_is_refused(world: World) -> None:
    async def test(publisher: Publisher, store: Store) -> None:
        cache = world.caches[0]
        keys = torch.full_like(cache.keys, float("nan"))
        bad = KVCache(keys, cache.values, cache.start)
        publisher.publish(world.chunks[0], Values(bad))
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
        await all_accepted(publisher, world)
        assert publisher.queued_bytes == 0
        found = await store.lookup([chunk.key for chunk in world.chunks])
        assert [entry is not None for entry in found] == [False, False, True, True]
        assert publisher.publish(world.chunks[0], Values(world.caches[0])) is Admission.QUEUED

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

    async def store() -> Store:
        return Broken(await world.store([]))

    async def test(publisher: Publisher, store: Broken) -> None:
        await all_accepted(publisher, world)

    counts = publishing(world, store, test).counts
    assert (counts.published, counts.faults, counts.refused) == (3, 1, 1)
    assert "a mistake in the store" in caplog.text
