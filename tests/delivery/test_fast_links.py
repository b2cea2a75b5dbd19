"""Deliveries over links so fast that every plan, thread and batch counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.header import Header
from kdn.delivery import client
from kdn.delivery.client import deliver
from kdn.delivery.estimate import Estimator, Gauge
from kdn.delivery.flight import Limits
from kdn.delivery.plan import Link, Plan, Situation
from kdn.delivery.planner import default
from kdn.delivery.request import Request, Result
from kdn.delivery.sink import Arrival
from kdn.errors import KdnError
from kdn.store.base import Store
from kdn.store.streaming import Ask, Piece
from tests.delivery.world import Proxy, World, make_world, run

pytestmark = pytest.mark.alone

FAST = Link(rate=1e9, low_rate=1e9, latency_s=0.001)


class Batches:
    """A sink that likes many chunks at a time, decodes none, and notes how many it gets."""

    batch_chunks = 16

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        self.sizes.append(len(batch))
        return [None] * len(batch)

    def write(self, chunk: Chunk, values: KVCache) -> None:
        raise AssertionError("nothing is computed here")


class SideBySide(Batches):
    """The same, two at a time: none ends before there is another beside it, or no more to come."""

    batches_at_once = 2

    def __init__(self, num_chunks: int) -> None:
        super().__init__()
        self.most = 0
        self._left, self._inside = num_chunks, 0
        self._changed = threading.Condition()  # guards the three

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        with self._changed:  # let go of while it waits
            self._inside += 1
            self._left -= len(batch)
            self.most = max(self.most, self._inside)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most == 2 or not self._left, 5.0)
            self._inside -= 1
            return super().decode(batch)


class Trickle(Proxy):
    """Chunk after chunk, one every `every_s`; `most_bytes` of each, and then nothing any more."""

    def __init__(self, inner: Store, every_s: float, most_bytes: int = 1 << 30) -> None:
        super().__init__(inner)
        self.every_s, self.most_bytes = every_s, most_bytes

    async def read_spans(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece, None]:
        for number, ask in enumerate(asks):
            await asyncio.sleep(self.every_s)
            end = min(ask.end, self.most_bytes)
            span = await self.inner.get(ask.key, ask.start, end, etag=ask.etag)
            assert span is not None
            yield Piece(number, ask.start, span.data)
        if self.most_bytes < asks[-1].end:
            await asyncio.sleep(60)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(12)


def delivered(world: World, every_s: float, most_bytes: int = 1 << 30, **options: Any) -> Result:
    request = Request(
        world.chunks, world.codec, world.expected_kld, options.pop("sink", None) or Batches(),
        options.pop("deadline_s", 10.0), enough_kld=world.expected_kld[-1],
    )  # fmt: skip
    policy = options.pop("policy", default)

    async def work() -> Result:
        store = Trickle(await world.store(), every_s, most_bytes)
        gauge = Gauge(None, can_compute=False)
        for _ in range(3):
            gauge.decoded(256, world.codec.num_levels, 0.0001)  # as a GPU
        return await deliver(
            request, [store], estimator=Estimator(FAST), gauge=gauge, policy=policy, **options
        )

    return run(work())


def test_nothing_is_planned_anew_while_all_goes_well(world: World) -> None:
    plans = 0

    def counted(situation: Situation) -> Plan:
        nonlocal plans
        plans += 1
        return default(situation)

    result = delivered(world, 0.004, policy=counted)
    assert result.levels == world.all_levels
    assert plans <= 4  # 12 chunks in 50 ms


def batches(result: Result) -> list[int]:
    assert isinstance(result.sink, Batches)
    assert sum(result.sink.sizes) == len(result.levels)
    return result.sink.sizes


def test_a_few_chunks_wait_for_others_that_are_about_to_come(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "GATHER_S", 0.2)  # also where a busy machine is slow to send
    sizes = batches(delivered(world, 0.003))
    assert len(sizes) <= 7, f"one by one: {sizes}"


def test_a_chunk_that_others_do_not_follow_is_decoded(world: World) -> None:
    assert max(batches(delivered(world, 0.05))) <= 2


def test_a_level_does_not_wait_for_others_that_do_not_come(world: World) -> None:
    """They were expected within milliseconds, and the link went silent: at the deadline there is
    what came."""
    ends = [Header.parse(stream).level_ends for stream in world.streams]
    most_bytes = max(end[0] for end in ends) + 1
    assert most_bytes < min(end[1] for end in ends)
    patient = Limits(silence_s=30.0)  # nobody asks again before the deadline
    result = delivered(world, 0.0, most_bytes, deadline_s=1.5, limits=patient)
    assert result.levels == (1,) * len(world.chunks)


def test_a_sink_that_takes_two_batches_at_once_gets_two_and_each_chunk_once(world: World) -> None:
    sink = SideBySide(len(world.chunks))
    sink.batch_chunks = len(world.chunks) // 2
    result = delivered(world, 0.0, sink=sink)
    assert result.levels == world.all_levels
    assert batches(result)
    assert sink.most == 2
