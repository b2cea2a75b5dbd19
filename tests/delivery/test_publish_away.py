"""Publishing to a place that is away: chunks wait in memory or in the spool."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kdn.delivery.client import deliver
from kdn.delivery.publish import Admission, Publisher, Values
from kdn.delivery.spool import Spool
from kdn.store.base import Entry, Store
from tests.delivery.publishing import all_accepted, down, publish_all, publishing
from tests.delivery.world import Down, Proxy, World, level_major, make_world, run


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(4)


def test_a_node_that_comes_back_gets_everything(world: World) -> None:
    async def test(publisher: Publisher, store: Down) -> None:
        publish_all(publisher, world)
        assert not await publisher.flush(0.3)
        store.is_down = False
        assert await publisher.flush(10.0)

    publisher = publishing(world, down(world), test)
    assert publisher.counts.published == 4
    assert publisher.counts.dropped == 0


def test_a_spool_carries_chunks_over_a_restart(world: World, tmp_path: Path) -> None:
    async def first(publisher: Publisher, store: Store) -> None:
        await all_accepted(publisher, world)

    publisher = publishing(world, down(world), first, spool=Spool(tmp_path))
    assert (publisher.counts.spooled, publisher.counts.published) == (4, 0)

    async def second(publisher: Publisher, store: Store) -> None:
        assert publisher.publish(world.chunks[0], Values(world.caches[0])) is (Admission.ALREADY)
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
    async def test(publisher: Publisher, store: Store) -> None:
        await all_accepted(publisher, world)

    spool = Spool(tmp_path, max_bytes=len(world.streams[0]) + len(world.streams[1]) + 300)
    publisher = publishing(world, down(world), test, spool=spool)
    assert publisher.counts.spooled + publisher.counts.dropped == 4
    assert publisher.counts.dropped >= 1


def test_a_fault_leaves_a_spooled_chunk_where_it_is(world: World, tmp_path: Path) -> None:
    """And the others get their turn."""

    class Broken(Proxy):
        is_broken = True

        async def put(self, key: bytes, *args: Any, **named: Any) -> Entry:
            if self.is_broken and key == world.chunks[0].key:
                raise TypeError("a mistake in the store")
            return await super().put(key, *args, **named)

    async def first(publisher: Publisher, store: Store) -> None:
        await all_accepted(publisher, world)

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

    publishing(world, down(world), first, spool=Spool(tmp_path))
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
