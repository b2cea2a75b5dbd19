"""Publishing to a place that is away: chunks wait in memory or in the spool."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kdn.codec.format import Bitstream
from kdn.delivery import publish, sending
from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.parcel import Parcel
from kdn.delivery.publish import Admission, Publisher, Values
from kdn.delivery.spool import Spool
from kdn.errors import NoSpaceError, NotAllowedError, StoreError
from kdn.store.base import Entry, Store
from tests.delivery.publishing import all_accepted, down, publish_all, publishing
from tests.delivery.world import Down, Proxy, World, level_major, make_world, run


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(4)


async def until_published(publisher: Publisher, number: int) -> None:
    async with asyncio.timeout(10.0):
        while publisher.counts.published < number:
            await asyncio.sleep(0.01)


def spool_all(world: World, root: Path) -> None:
    """By a process that is gone then."""

    async def test(publisher: Publisher, store: Store) -> None:
        await all_accepted(publisher, world)

    spool = Spool.open(root)
    counts = publishing(world, down(world), test, spool=spool).counts
    assert (counts.spooled, counts.published, counts.dropped) == (4, 0, 0)
    spool.close()


def test_a_node_that_comes_back_gets_everything(world: World) -> None:
    async def test(publisher: Publisher, store: Down) -> None:
        publish_all(publisher, world)
        assert not await publisher.flush(0.3)
        store.is_down = False
        assert await publisher.flush(10.0)

    publisher = publishing(world, down(world), test)
    assert publisher.counts.published == 4
    assert publisher.counts.dropped == 0


class Full(Proxy):
    """Has no room, for as long as `is_full`."""

    is_full, refusals = True, 0

    async def put_entry(self, *args: Any, **named: Any) -> Entry:
        if self.is_full:
            self.refusals += 1
            raise NoSpaceError("no room now")
        return await super().put_entry(*args, **named)


def test_what_was_spooled_waits_for_a_place_that_is_full(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was accepted: a passing lack of room must not lose it."""
    monkeypatch.setattr(sending, "SPOOL_PAUSE_S", 0.02)
    spool_all(world, tmp_path)

    async def store() -> Store:
        return Full(await world.store([]))

    async def test(publisher: Publisher, place: Full) -> None:
        async with asyncio.timeout(10.0):
            while place.refusals < 8:
                await asyncio.sleep(0.01)
        assert len(spool) == 4
        place.is_full = False
        await until_published(publisher, 4)

    spool = Spool.open(tmp_path)
    counts = publishing(world, store, test, spool=spool).counts
    spool.close()
    assert (counts.published, counts.refused) == (4, 0)


def test_a_spool_carries_chunks_over_a_restart(world: World, tmp_path: Path) -> None:
    spool_all(world, tmp_path)

    async def test(publisher: Publisher, store: Store) -> None:
        said = publisher.publish(world.chunks[0], Values(world.caches[0]))
        assert said is Admission.ALREADY
        await until_published(publisher, 4)
        result = await deliver(world.request(), [store], policy=level_major)
        world.check(result)
        assert result.levels == (world.codec.num_levels,) * 4

    spool = Spool.open(tmp_path)
    publisher = publishing(world, lambda: world.store([]), test, spool=spool)
    spool.close()
    assert publisher.counts.published == 4
    assert not list(tmp_path.iterdir())


def test_what_is_to_be_replaced_is_remembered_over_a_restart(world: World, tmp_path: Path) -> None:
    """The process that found a stream useless is gone when its successor is sent."""
    key, bad = world.chunks[0].key, Bitstream.parse(world.others[0]).stream_id

    async def first() -> None:
        place = Endpoint(Down(await world.store([])))
        place.reject(key, bad, 0.0)
        spool = Spool.open(tmp_path)
        async with Publisher(place, world.codec, spool=spool) as publisher:
            await all_accepted(publisher, world)
        spool.close()

    async def test(publisher: Publisher, store: Store) -> None:
        await until_published(publisher, 3)
        span = await store.get(key)
        assert span is not None
        assert bytes(span.data) == world.streams[0]

    run(first())
    counts = publishing(
        world, lambda: world.store(world.others[:2]), test, spool=Spool.open(tmp_path)
    ).counts
    assert (counts.published, counts.replaced, counts.known) == (3, 1, 1)


def test_the_spool_of_a_process_that_dies_meanwhile_is_taken_over(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "ADOPT_S", 0.02)

    async def test(publisher: Publisher, store: Store) -> None:
        await asyncio.to_thread(spool_all, world, tmp_path)
        await until_published(publisher, 4)

    publishing(world, lambda: world.store([]), test, spool=Spool.open(tmp_path))


def test_what_a_full_spool_does_not_take_waits_in_memory(world: World, tmp_path: Path) -> None:
    async def test(publisher: Publisher, store: Down) -> None:
        publish_all(publisher, world)
        assert not await publisher.flush(0.5)
        assert publisher.counts.spooled == 2
        store.is_down = False
        assert await publisher.flush(10.0)
        await until_published(publisher, 4)

    room = sum(len(stream) for stream in world.streams[:2]) + 300
    spool = Spool.open(tmp_path, max_bytes=room)
    counts = publishing(world, down(world), test, spool=spool).counts
    assert (counts.published, counts.dropped) == (4, 0)


def test_close_says_what_a_full_spool_did_not_take(world: World, tmp_path: Path) -> None:
    async def work() -> None:
        spool = Spool.open(tmp_path, max_bytes=len(world.streams[0]) + 150)
        async with Publisher(Down(await world.store([])), world.codec, spool=spool) as publisher:
            publish_all(publisher, world)
            await publisher.close(deadline_s=0.4)
        counts = publisher.counts
        assert (counts.spooled, counts.dropped) == (1, 3)

    run(work())


def test_close_spools_what_is_not_even_encoded(world: World, tmp_path: Path) -> None:
    """When the place does not answer at all, and the queues are full."""

    class Hangs(Proxy):
        async def put(self, *args: Any, **named: Any) -> Entry:
            return await asyncio.Future()

    async def work() -> None:
        spool = Spool.open(tmp_path)
        async with Publisher(Hangs(await world.store([])), world.codec, spool=spool) as publisher:
            publish_all(publisher, world)
            assert not await publisher.flush(0.1)
            assert publisher.queued_bytes > 0
            await publisher.close(deadline_s=3.0)
        assert (publisher.counts.spooled, publisher.counts.dropped) == (4, 0)

    run(work())
    assert len(list(tmp_path.glob("*/*.chunk"))) == 4


def test_a_fault_leaves_a_spooled_chunk_where_it_is(world: World, tmp_path: Path) -> None:
    """And the others get their turn."""

    class Broken(Proxy):
        is_broken = True

        async def put(self, key: bytes, *args: Any, **named: Any) -> Entry:
            if self.is_broken and key == world.chunks[0].key:
                raise TypeError("a mistake in the store")
            return await super().put(key, *args, **named)

    async def store() -> Store:
        return Broken(await world.store([]))

    async def test(publisher: Publisher, store: Broken) -> None:
        await until_published(publisher, 3)
        assert len(list(tmp_path.glob("*/*.chunk"))) == 1
        store.is_broken = False
        await until_published(publisher, 4)

    spool_all(world, tmp_path)
    assert publishing(world, store, test, spool=Spool.open(tmp_path)).counts.faults >= 1
    assert not list(tmp_path.glob("*/*.chunk"))


def test_a_chunk_that_the_place_does_not_take_lets_the_others_go_first(
    world: World, tmp_path: Path
) -> None:
    class Picky(Proxy):
        async def put(self, key: bytes, *args: Any, **named: Any) -> Entry:
            if key == world.chunks[0].key:
                raise StoreError("not this one")
            return await super().put(key, *args, **named)

    async def store() -> Store:
        return Picky(await world.store([]))

    async def test(publisher: Publisher, store: Picky) -> None:
        await until_published(publisher, 3)

    spool_all(world, tmp_path)
    publishing(world, store, test, spool=Spool.open(tmp_path))
    assert len(list(tmp_path.glob("*/*.chunk"))) == 1


def test_a_place_that_takes_nothing_is_read_from_at_once(world: World, tmp_path: Path) -> None:
    """Nor does a disk that fails slow down reading, or sending what is new."""

    class Unreadable(Spool):
        def first(self) -> Parcel | None:
            raise OSError(5, "Input/output error")

    async def work() -> None:
        place = Endpoint(Down(await world.store([])))
        spool = Unreadable.open(tmp_path)
        async with Publisher(place, world.codec, spool=spool) as publisher:
            await all_accepted(publisher, world)
            assert publisher.counts.failures
            assert place.rest.is_over(0.0)
            place.store.is_down = False  # type: ignore[attr-defined]
            failures = publisher.counts.failures
            async with asyncio.timeout(10.0):
                while publisher.counts.failures < failures + 3:
                    await asyncio.sleep(0.01)
            again = make_world(5)
            publisher.publish(again.chunks[4], Values(again.caches[4]))
            assert await publisher.flush(10.0)
            assert (publisher.counts.published, publisher.counts.spooled) == (1, 4)

    run(work())


class Refusing(Proxy):
    """Says no to everybody, or to those who bring one of these keys."""

    def __init__(self, inner: Store, *keys: bytes) -> None:
        super().__init__(inner)
        self.keys, self.puts = keys, 0

    async def put(self, key: bytes, *args: Any, **named: Any) -> Entry:
        self.puts += 1
        if not self.keys or key in self.keys:
            raise NotAllowedError("401 unauthorized: a valid bearer token is needed")
        return await super().put(key, *args, **named)


def test_what_a_place_refuses_is_neither_tried_again_nor_spooled(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def store() -> Store:
        return Refusing(await world.store([]))

    async def test(publisher: Publisher, store: Refusing) -> None:
        await all_accepted(publisher, world)
        assert store.puts == 4
        keys = [chunk.key for chunk in world.chunks]
        assert await publisher.store_all(keys, 10.0)
        assert set(publisher.refused(keys)) == set(keys)
        assert publisher.refused([b"another"]) == {}
        assert publisher.publish(world.chunks[0], Values(world.caches[0])) is Admission.QUEUED
        assert set(publisher.refused(keys)) == set(keys[1:])

    counts = publishing(world, store, test, spool=Spool.open(tmp_path)).counts
    assert (counts.refused, counts.spooled, counts.failures) == (5, 0, 0)
    said = [record.message for record in caplog.records if "401 unauthorized" in record.message]
    assert len(said) == 3, "the first, the second and the fourth"


def test_what_was_spooled_and_is_refused_is_left_to_others(world: World, tmp_path: Path) -> None:
    async def store() -> Store:
        return Refusing(await world.store([]))

    async def test(publisher: Publisher, store: Refusing) -> None:
        keys = [chunk.key for chunk in world.chunks]
        assert await publisher.store_all(keys, 10.0)
        assert set(publisher.refused(keys)) == set(keys)
        assert store.puts == 3
        other = Spool.open(tmp_path)
        assert len(other) == 4, "the lock is free"
        other.close()
        assert publisher.publish(world.chunks[0], Values(world.caches[0])) is Admission.QUEUED
        assert await publisher.flush(10.0)

    spool_all(world, tmp_path)
    counts = publishing(world, store, test, spool=Spool.open(tmp_path)).counts
    assert (counts.refused, counts.spooled) == (1, 0), "only the new one is given up"
    assert len(list(tmp_path.glob("*/*.chunk"))) == 4


def test_one_spooled_chunk_that_is_refused_does_not_stop_the_others(
    world: World, tmp_path: Path
) -> None:
    async def store() -> Store:
        return Refusing(await world.store([]), world.chunks[0].key)

    async def test(publisher: Publisher, store: Refusing) -> None:
        await until_published(publisher, 3)

    spool_all(world, tmp_path)
    publishing(world, store, test, spool=Spool.open(tmp_path))
    assert len(list(tmp_path.glob("*/*.chunk"))) == 1


@pytest.mark.parametrize("is_full", [True, False])
def test_a_spool_that_takes_nothing_is_left_alone_for_a_while(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_full: bool,
) -> None:
    class Failing(Spool):
        adds, fails = 0, True

        def add(self, parcel: Parcel) -> bool:
            self.adds += 1
            if not self.fails:
                return super().add(parcel)
            if is_full:
                return False
            raise OSError(28, "No space left on device")

    async def test(publisher: Publisher, store: Down) -> None:
        publish_all(publisher, world)
        async with asyncio.timeout(20.0):
            while publisher.counts.failures < 8:
                await asyncio.sleep(0.01)
        assert spool.adds == 1
        publisher._sender.try_spool_again()
        async with asyncio.timeout(20.0):
            while spool.adds < 2:
                await asyncio.sleep(0.01)
        spool.fails = False
        publisher._sender.try_spool_again()
        assert await publisher.flush(20.0)

    spool = Failing.open(tmp_path)
    assert isinstance(spool, Failing)
    assert publishing(world, down(world), test, spool=spool).counts.spooled == 4
    said = [record.message for record in caplog.records]
    assert len(said) == 2, "when it fails, and when it works again"
    assert ("it is full" if is_full else "No space left") in said[0]
    assert "takes chunks again" in said[1]


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
