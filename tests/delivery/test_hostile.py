"""Endpoints that tamper and streams that others made: who is blamed, and what it costs."""

from __future__ import annotations

import asyncio
import time
from copy import copy
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kdn.cache.keys import seal_key
from kdn.cache.tensors import KVCache
from kdn.codec.format import Section, write
from kdn.codec.header import Header
from kdn.delivery.assemble import Assembly
from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.estimate import Estimator
from kdn.delivery.flight import Flight, Landing, Part
from kdn.delivery.lookup import Incoming, Question
from kdn.delivery.transfer import Transfer
from kdn.errors import MismatchError
from kdn.store.base import Span
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from kdn.store.streaming import hand_over
from tests.delivery.checked import QUICK
from tests.delivery.world import Proxy, World, level_major, make_world, put_stream, run


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(4)


class Tampering(Proxy):
    """Flips a bit in whatever bytes it sends beyond headers."""

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        span = await self.inner.get(key, start, end, etag=etag)
        if span is None or not span.data:
            return span
        return replace(span, data=bytes([span.data[0] ^ 1]) + bytes(span.data[1:]))


def test_who_tampers_is_blamed_and_nobody_else(world: World) -> None:
    async def test() -> None:
        store = await world.store()
        bad, good = Endpoint(Tampering(store), name="bad"), Endpoint(store, name="good")
        request = world.request(deadline_s=10.0, enough_kld=0.0)
        result = await deliver(request, [bad, good], policy=level_major, limits=QUICK)
        world.check(result)
        assert set(result.levels) == {world.codec.num_levels}
        keys = [chunk.key for chunk in world.chunks]
        assert any(bad.rejected(key) for key in keys)
        assert not any(good.rejected(key) for key in keys)

    run(test())


def test_bytes_of_several_endpoints_are_blamed_on_none_of_them(world: World) -> None:
    """A hostile one that brings the first bytes must not get the honest one rejected."""

    async def test() -> None:
        store = await world.store()
        honest, hostile = Endpoint(store, name="honest"), Endpoint(store, name="hostile")
        question = Question([], world.codec, time.monotonic, Random(1))
        header = Header.parse(world.streams[0])
        assembly = Assembly(header, world.streams[0][: header.size_bytes])
        one = Incoming(0, world.chunks[0], assembly)
        places = Endpoints([hostile, honest])
        transfer = Transfer([one], question, places, Estimator(), QUICK, time.monotonic() + 5)
        start, end = header.level_start(0), header.level_end(0)

        def bring(first: int, data: bytes, endpoint: Endpoint) -> None:
            parts = [Part(one, assembly, start, end)]
            flight = Flight(endpoint, parts, 0.0, 0.0, end - start, 1.0)
            hand_over(Landing(flight, transfer._take, transfer._miss), 0, first, data)

        for _ in range(3):
            bring(start, bytes(4), hostile)
            bring(start + 4, world.streams[0][start + 4 : end], honest)
            while transfer._checks:
                await asyncio.sleep(0.001)
        assert (assembly.levels, assembly.damages, one.alone) == (0, 3, True)
        assert not honest.rejected(one.chunk.key)
        assert transfer._choose(one, set()) is hostile  # alone now: if it tampers again, it shows
        for _ in range(2):
            bring(start, bytes(end - start), hostile)
            while transfer._checks:
                await asyncio.sleep(0.001)
        assert hostile.rejected(one.chunk.key) == header.stream_id
        assert transfer._choose(one, set()) is honest
        await transfer.close()

    run(test())


def test_a_stream_for_other_readers_is_not_to_be_replaced(world: World) -> None:
    """Values of another dtype are right where they came from."""

    class Choosy(type(world.codec)):  # type: ignore[misc]
        def decode(self, *args: Any, **named: Any) -> KVCache:
            raise MismatchError("another dtype")

    async def test() -> None:
        place = Endpoint(await world.store())
        codec = copy(world.codec)
        codec.__class__ = Choosy
        request = replace(world, codec=codec).request(deadline_s=5.0)
        result = await deliver(request, [place], policy=level_major)
        assert not any(result.levels)
        assert not any(place.rejected(chunk.key) for chunk in world.chunks)

    run(test())


def test_large_headers_that_others_wrote_take_no_time(world: World) -> None:
    """They are not even read."""

    async def test() -> None:
        store = MemoryStore(2**28, open_policy("lru"))
        sections = [Section(level, 0, group, b"") for level in range(32) for group in range(250)]
        info = replace(Header.parse(world.streams[0]).info, num_levels=32)
        for chunk in world.chunks:
            stream = write(replace(info, chunk_key=chunk.key), sections, seal_key(b"another's"))
            await put_stream(store, stream)
        began_s = time.process_time()
        result = await deliver(world.request(deadline_s=5.0), [store], policy=level_major)
        assert result.known == 0
        assert time.process_time() - began_s < 1.0

    run(test())
