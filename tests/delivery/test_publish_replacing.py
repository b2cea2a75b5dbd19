"""Streams that nobody can use give way to those that are published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdn.cache.keys import seal_key
from kdn.codec.format import Bitstream, Section, write
from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.publish import Publisher
from tests.delivery.publishing import all_accepted
from tests.delivery.world import World, level_major, make_world, put_stream, run


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(4)


def forged(world: World, number: int, how: str) -> bytes:
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
        await put_stream(store, bad := forged(world, 1, how))
        place = Endpoint(store)
        request = world.request(deadline_s=10.0)
        result = await deliver(request, [place], policy=level_major)
        assert result.levels[0]
        assert not result.levels[1]
        assert place.rejected(key) == Bitstream.parse(bad).stream_id
        async with Publisher(place, world.codec) as publisher:
            await all_accepted(publisher, world)
            assert (publisher.counts.replaced, publisher.counts.published) == (1, 4)
        assert place.rejected(key) is None
        world.check(again := await deliver(request, [place], policy=level_major))
        assert all(again.levels)

    run(work())


def test_what_others_can_read_is_not_replaced(world: World) -> None:
    """Only the very stream that was rejected gives way."""

    async def work() -> None:
        place = Endpoint(await world.store(world.others))
        place.reject(world.chunks[1].key, b"a stream that is gone", 0.0)
        async with Publisher(place, world.codec) as publisher:
            await all_accepted(publisher, world)
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
            await all_accepted(publisher, world)
            assert publisher.counts.replaced == 1
        span = await store.get(key)
        assert span is not None
        assert bytes(span.data) == good

    run(work())
