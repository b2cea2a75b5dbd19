"""A decoder whose sink takes two batches at once: what is begun, and what is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.header import Header
from kdn.delivery.assemble import Assembly
from kdn.delivery.decode import Decoder
from kdn.delivery.estimate import Gauge
from kdn.delivery.lookup import Incoming
from kdn.delivery.plan import Fetch
from kdn.delivery.sink import Arrival
from kdn.errors import KdnError
from tests.delivery.world import World, make_world, run

CHUNK_S, LIMIT_S = 0.1, 10.0


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(8)


class Gate:
    """A sink in which batches stay until they are let out."""

    batch_chunks, batches_at_once = 3, 2

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.left = 0
        self.fails = False
        self._open = threading.Event()

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        self.sizes.append(len(batch))
        if self.fails and batch[0].chunk.start == 0:
            raise RuntimeError("the first")
        assert self._open.wait(LIMIT_S)
        self.left += 1
        return [None] * len(batch)

    def write(self, chunk: Chunk, values: KVCache) -> None:
        raise AssertionError("nothing is computed here")

    def let_out(self) -> None:
        self._open.set()

    async def has(self, batches: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.sizes) < batches:
                await asyncio.sleep(0.001)


class Desk:
    """All chunks are here, and the decoder is told how long one takes."""

    def __init__(self, world: World) -> None:
        self.sink, self.gauge = Gate(), Gauge(None, can_compute=False)
        levels = world.codec.num_levels
        for _ in range(50):
            self.gauge.decoded(256, levels, CHUNK_S)
        self.decoder = Decoder(
            self.sink, self.gauge, asyncio.Event(), asyncio.get_running_loop().time
        )
        self.known = [
            Incoming(number, chunk, _whole(stream))
            for number, (chunk, stream) in enumerate(zip(world.chunks, world.streams, strict=True))
        ]
        self.fetches = [Fetch(number, levels) for number in range(len(self.known))]

    def pick(self, left_s: float) -> list[Fetch]:
        return self.decoder.pick(self.known, self.fetches, left_s, True)

    def start(self, left_s: float = 100.0) -> list[int]:
        picked = self.pick(left_s)
        self.decoder.start(self.known, picked)
        return [one.chunk for one in picked]


def _whole(stream: bytes) -> Assembly:
    header = Header.parse(stream)
    assembly = Assembly(header, stream[: header.size_bytes])
    assembly.adopt(memoryview(bytearray(stream)), header.info.num_levels)
    return assembly


def checked(world: World, test: Callable[[Desk], Awaitable[None]]) -> None:
    async def work() -> None:
        desk = Desk(world)
        try:
            await test(desk)
        finally:
            desk.sink.let_out()
            await desk.decoder.finish()

    run(work())


def test_two_batches_are_begun_of_different_chunks_and_no_third(world: World) -> None:
    async def test(desk: Desk) -> None:
        assert desk.start() == [0, 1, 2]
        assert not desk.decoder.is_full
        assert desk.start() == [3, 4, 5]
        assert desk.decoder.is_full
        await desk.sink.has(2)
        assert [one.number for one in desk.decoder.busy] == [0, 1, 2, 3, 4, 5]
        assert [one.chunk for one in desk.pick(100.0)] == [6, 7]
        desk.sink.let_out()
        await desk.decoder.finish()
        assert not desk.decoder.busy
        levels = world.codec.num_levels
        assert [one.decoded for one in desk.known] == [levels] * 6 + [0] * 2

    checked(world, test)


def test_what_is_begun_leaves_less_time_for_more(world: World) -> None:
    async def test(desk: Desk) -> None:
        left_s = 4.5 * CHUNK_S
        assert desk.start(left_s) == [0, 1, 2]
        assert desk.start(left_s) == [3]  # there is no time for a fifth

    checked(world, test)


def test_cancelled_it_waits_for_both(world: World) -> None:
    async def test(desk: Desk) -> None:
        desk.start()
        desk.start()
        await desk.sink.has(2)
        waiting = asyncio.ensure_future(desk.decoder.finish())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        desk.sink.let_out()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert desk.sink.left == 2

    checked(world, test)


def test_a_crash_is_told_while_the_other_batch_goes_on(world: World) -> None:
    async def test(desk: Desk) -> None:
        desk.sink.fails = True
        desk.start()
        desk.start()
        await desk.sink.has(2)
        async with asyncio.timeout(LIMIT_S):
            while len(desk.decoder.busy) > 3:
                await asyncio.sleep(0.001)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the first"):
                desk.decoder.raise_crash()
        desk.sink.let_out()
        await desk.decoder.finish()
        assert [one.decoded > 0 for one in desk.known] == [False] * 3 + [True] * 3 + [False] * 2

    checked(world, test)
