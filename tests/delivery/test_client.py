"""Deliveries over stores that work, fail, lie and forget: a right cache, or a clean "recompute"."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from kdn.bench.delivery.policies import cachegen, mpc
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.flight import Limits
from kdn.delivery.plan import Plan, Situation
from kdn.delivery.planner import default
from kdn.delivery.request import Snapshot
from kdn.errors import MismatchError
from kdn.store.base import Entry, Store
from tests.delivery.checked import deliver_from
from tests.delivery.world import (
    Down,
    Flaky,
    Proxy,
    World,
    cache_of,
    level_major,
    make_world,
    put_stream,
    run,
)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(6, last_tokens=48)


def pairs(world: World) -> list[tuple[Chunk, bytes]]:
    return list(zip(world.chunks, world.streams, strict=True))


def complete(world: World) -> tuple[int, ...]:
    return (world.codec.num_levels,) * len(world.chunks)


# what works


@pytest.mark.parametrize("policy", [level_major, default, mpc])
def test_everything_arrives(world: World, policy: Any) -> None:
    async def places() -> list[Store]:
        return [await world.store()]

    result = deliver_from(world, places, policy=policy)
    assert result.levels == complete(world)
    assert result.recompute == ()
    assert result.known == len(world.chunks)
    assert result.stream_ids == tuple(Bitstream.parse(s).stream_id for s in world.streams)
    assert result.failures == 0
    assert result.done_s < 2.0, "nothing to wait for"
    assert sum(map(len, world.streams)) >= result.fetched_bytes


@pytest.mark.parametrize("name", ["klt", "cachegen"])
def test_enough_is_enough(name: str) -> None:
    world = make_world(3, name)

    async def places() -> list[Store]:
        return [await world.store()]

    for policy in (level_major, default):
        kld = world.expected_kld[1]
        result = deliver_from(world, places, enough_kld=kld, policy=policy)
        assert result.levels == (2,) * 3
        ends = sum(Bitstream.parse(stream).level_end(1) for stream in world.streams)
        assert result.fetched_bytes <= ends


def test_anchors_of_all_chunks_come_first() -> None:
    """CacheGen's anchors are its level 0; the deadline passes among the deltas."""
    world = make_world(4, "cachegen")
    anchors = sum(Bitstream.parse(stream).level_end(0) for stream in world.streams)
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores.append(Flaky(await world.store(), Random(1), rate=2 * anchors))
        return stores

    result = deliver_from(world, places, deadline_s=1.5, limits=Limits(first_window_bytes=8 << 10))
    assert min(result.levels) >= 1
    assert result.levels != complete(world)
    left = {chunk.key: Bitstream.parse(s).level_end(0) for chunk, s in pairs(world)}
    for ask in stores[0].asked:
        anchors_end = left.get(ask.key, 0)
        assert ask.start < anchors_end or not left, "a delta before all anchors"
        if ask.end >= anchors_end:
            left.pop(ask.key, None)


def test_decodes_into_the_callers_cache(world: World) -> None:
    spec, end = world.codec.spec, world.chunks[-1].end
    mine = KVCache.empty(
        spec.num_layers, end + 100, spec.num_kv_heads, spec.head_dim, dtype=torch.float16
    )

    async def places() -> list[Store]:
        return [await world.store()]

    result = deliver_from(world, places, cache=mine)
    assert cache_of(result).keys.data_ptr() == mine.keys.data_ptr()
    assert cache_of(result).dtype == torch.float16
    assert not mine.keys[:, end:].any()


def test_a_cache_that_is_too_small_is_a_mistake(world: World) -> None:
    small = KVCache.empty(4, 10, 2, 8)

    async def test() -> None:
        with pytest.raises(MismatchError):
            await deliver(world.request(cache=small), [await world.store()])

    run(test())


def test_the_longest_known_prefix(world: World) -> None:
    async def places() -> list[Store]:
        return [await world.store([*world.streams[:2], *world.streams[3:]])]

    result = deliver_from(world, places)
    assert (result.known, result.recompute) == (2, (2, 3, 4, 5))
    assert result.levels == (world.codec.num_levels,) * 2 + (0,) * 4


def test_nothing_known_and_nobody_there(world: World) -> None:
    async def empty() -> list[Store]:
        return [await world.store([])]

    async def down() -> list[Store]:
        return [Down(await world.store())]

    assert deliver_from(world, empty).recompute == tuple(range(6))
    result = deliver_from(world, down, deadline_s=0.4)
    assert result.recompute == tuple(range(6))
    assert result.done_s >= 0.4, "it may come back"


def test_long_headers_are_fetched_whole(world: World) -> None:
    async def places() -> list[Store]:
        return [Flaky(await world.store(), Random(1), piece_bytes=400)]

    result = deliver_from(world, places, head_bytes=40)
    assert result.levels == complete(world)


def test_local_cache_first(world: World) -> None:
    remote: list[Flaky] = []

    async def places() -> list[Store | Endpoint]:
        remote.append(Flaky(await world.store(), Random(1)))
        return [*remote, Endpoint(await world.store(world.streams[:4]), local=True)]

    result = deliver_from(world, places)
    assert result.levels == complete(world)
    asked = {ask.key for ask in remote[0].asked}
    assert asked == {chunk.key for chunk in world.chunks[4:]}
    assert result.fetched_bytes < sum(map(len, world.streams[4:]))


def test_sliding_windows_say_what_is_absent(world: World) -> None:
    """A layer that lacks the first chunk and a part of the second."""
    parts = []
    for cache, absent in zip(world.caches[:3], (256, 40, 0), strict=True):
        valid_from = (cache.start + absent, *cache.valid_from[1:])
        part = KVCache(cache.keys.clone(), cache.values.clone(), cache.start, valid_from)
        part.keys[0, :absent] = 0
        part.values[0, :absent] = 0
        parts.append(part)
    streams = [world.codec.encode(c, p) for c, p in zip(world.chunks[:3], parts, strict=True)]
    windowed = replace(world, chunks=world.chunks[:3], caches=parts, streams=streams, others=[])

    async def places() -> list[Store]:
        return [await windowed.store()]

    result = deliver_from(windowed, places)
    assert cache_of(result).valid_from == (296, 0, 0, 0)


# what goes wrong


@pytest.mark.parametrize("seed", range(6))
def test_cuts_resume_at_the_byte(world: World, seed: int) -> None:
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores.append(Flaky(await world.store(), Random(seed), cut=0.05))
        return stores

    result = deliver_from(world, places)
    assert result.levels == complete(world)
    assert result.failures == stores[0].seen["cut"] > 0
    # Nothing that arrived is asked for again: what was fetched is what there is.
    heads = sum(min(1024, len(stream)) for stream in world.streams)
    assert result.fetched_bytes == sum(map(len, world.streams)) - heads


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_never_decoded(world: World, seed: int) -> None:
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores.append(Flaky(await world.store(), Random(seed), flip=0.02))
        return stores

    deliver_from(world, places)
    assert stores[0].seen["flip"]


def test_a_stream_damaged_in_the_store_is_left_to_the_model(world: World) -> None:
    bad = bytearray(world.streams[2])
    bad[Bitstream.parse(world.streams[2]).level_end(0) + 3] ^= 1

    class Damaged(Proxy):
        async def get(self, key: bytes, *args: Any, **named: Any) -> Any:
            span = await super().get(key, *args, **named)
            if key == world.chunks[2].key and span is not None:
                return replace(span, data=bytes(bad)[span.start : span.start + len(span.data)])
            return span

    async def places() -> list[Store]:
        return [Damaged(await world.store())]

    result = deliver_from(world, places)
    assert result.levels[2] == 1, "what verified may be used"
    assert result.levels[:2] + result.levels[3:] == (world.codec.num_levels,) * 5


def test_republished_bytes_start_again(world: World) -> None:
    """In the middle of the transfer chunk 1 is deleted and published with other bytes."""

    class Swapping(Flaky):
        swapped = False

        async def _read(self, number: int, ask: Any) -> Any:
            if ask.key == world.chunks[1].key and not self.swapped and ask.start > 1500:
                self.swapped = True
                await self.inner.delete(ask.key)
                await put_stream(self.inner, world.others[1])
            async for piece in super()._read(number, ask):
                yield piece

    stores: list[Swapping] = []

    async def places() -> list[Store]:
        stores.append(Swapping(await world.store(), Random(1)))
        return stores

    result = deliver_from(
        world,
        places,
        limits=Limits(first_window_bytes=4 << 10, min_request_bytes=1 << 10, window_s=0.0),
    )
    assert stores[0].swapped
    assert result.levels == complete(world)
    assert result.stream_ids[1] == Bitstream.parse(world.others[1]).stream_id


def test_deleted_chunks_are_left_to_the_model(world: World) -> None:
    class Forgetting(Flaky):
        async def _read(self, number: int, ask: Any) -> Any:
            await self.inner.delete(world.chunks[3].key)
            async for piece in super()._read(number, ask):
                yield piece

    async def places() -> list[Store]:
        return [Forgetting(await world.store(), Random(1))]

    result = deliver_from(world, places)
    assert result.recompute == (3,)


def test_failover_to_an_endpoint_with_the_same_streams(world: World) -> None:
    class Dying(Flaky):
        left = 5

        async def _read(self, number: int, ask: Any) -> Any:
            async for piece in super()._read(number, ask):
                self.left -= 1
                if self.left < 0:
                    self.odds["cut"] = 1.0
                yield piece

    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores[:] = [Dying(await world.store(), Random(1)), Flaky(await world.store(), Random(2))]
        return stores

    result = deliver_from(world, places)
    assert result.levels == complete(world)
    assert stores[1].asked


def test_streams_of_two_publishers_never_meet(world: World) -> None:
    """Two nodes hold different streams under the same keys, and the first dies half-way."""
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores[:] = [
            Flaky(await world.store(), Random(1), cut=0.15),
            Flaky(await world.store(world.others), Random(2)),
        ]
        return stores

    result = deliver_from(world, places, deadline_s=1.5)
    assert result.recompute == ()


def test_a_late_request_is_hedged(world: World) -> None:
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores[:] = [
            Flaky(await world.store(), Random(1), stall=1.0, stall_s=30.0),
            Flaky(await world.store(), Random(2)),
        ]
        return stores

    patient = Limits(hedge_s=0.02, silence_s=10.0)
    result = deliver_from(world, places, limits=patient)
    assert result.levels == complete(world)
    assert result.failures == 0
    assert any("late" in trouble for trouble in result.troubles)
    assert result.done_s < 4.0
    assert [store.open_requests for store in stores] == [0, 0], "nothing is left open"


def test_a_silent_connection_is_given_up(world: World) -> None:
    """One endpoint only; its first requests never answer."""

    class Waking(Flaky):
        requests = 0

        async def read_spans(self, asks: Any) -> Any:
            self.requests += 1
            if self.requests <= 2:
                await asyncio.sleep(30)
            async for piece in super().read_spans(asks):
                yield piece

    async def places() -> list[Store]:
        return [Waking(await world.store(), Random(1))]

    result = deliver_from(world, places)
    assert result.levels == complete(world)
    assert result.failures


def test_a_gap_at_the_beginning(world: World) -> None:
    async def places() -> list[Store]:
        store = Down(await world.store())

        def wake() -> None:
            store.is_down = False

        asyncio.get_running_loop().call_later(0.5, wake)
        return [store]

    result = deliver_from(world, places)
    assert result.levels == complete(world)


def test_the_deadline_ends_a_slow_delivery(world: World) -> None:
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores[:] = [Flaky(await world.store(), Random(1), rate=60_000)]
        return stores

    for policy in (level_major, default):
        result = deliver_from(world, places, deadline_s=0.8, policy=policy)
        assert any(result.levels)
        assert result.levels != complete(world)
        assert stores[0].open_requests == 0


def test_cancellation_closes_everything(world: World) -> None:
    async def test() -> None:
        store = Flaky(await world.store(), Random(1), rate=20_000)
        task = asyncio.create_task(deliver(world.request(), [store], policy=level_major))
        await asyncio.sleep(0.3)
        assert store.open_requests
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.open_requests == 0
        assert len(asyncio.all_tasks()) == 1

    run(test())


def test_mistakes_raise(world: World) -> None:
    class Wrong(Flaky):
        async def _read(self, number: int, ask: Any) -> Any:
            raise ZeroDivisionError
            yield

    def no_plan(situation: Situation) -> Plan:
        raise ZeroDivisionError

    async def test() -> None:
        store = await world.store()
        with pytest.raises(ZeroDivisionError):
            await deliver(world.request(), [Wrong(store, Random(1))], policy=level_major)
        with pytest.raises(ZeroDivisionError):
            await deliver(world.request(), [store], policy=no_plan)
        assert len(asyncio.all_tasks()) == 1

    run(test())


# progress, leaks


def test_progress_is_reported(world: World) -> None:
    seen: list[Snapshot] = []

    async def places() -> list[Store]:
        return [Flaky(await world.store(), Random(1), rate=1e6)]

    result = deliver_from(world, places, on_progress=seen.append)
    assert len(seen) > 2
    assert seen[-1].levels == result.levels
    assert seen[-1].fetched_bytes == result.fetched_bytes
    assert [one.elapsed_s for one in seen] == sorted(one.elapsed_s for one in seen)


@pytest.mark.parametrize("seed", range(12))
def test_everything_at_once(world: World, seed: int) -> None:
    """Two endpoints, one with other bytes for half of the chunks, all kinds of faults."""
    rng = Random(seed)
    odds = {name: rng.choice([0, 0.01, 0.05]) for name in ("cut", "stall", "flip", "vanish")}

    async def places() -> list[Store]:
        mixed = [*world.streams[:3], *world.others[3:]]
        return [
            Flaky(await world.store(), rng, rate=rng.choice([1e5, 1e6, 1e7]), **odds),
            Flaky(await world.store(mixed), rng, rate=rng.choice([1e5, 1e6]), **odds),
        ]

    policy = rng.choice([level_major, default, cachegen])
    deliver_from(world, places, deadline_s=rng.choice([0.1, 0.4, 0.8]), policy=policy, rng=rng)


def test_threads_do_not_pile_up(world: World) -> None:
    async def places() -> list[Store]:
        return [await world.store()]

    deliver_from(world, places)
    before = threading.active_count()
    for _ in range(3):
        deliver_from(world, places, enough_kld=world.expected_kld[0])
    assert threading.active_count() <= before


def test_endpoints_are_reused(world: World) -> None:
    class Counting(Proxy):
        lookups = 0

        async def lookup(self, *args: Any, **named: Any) -> list[Entry | None]:
            self.lookups += 1
            return await super().lookup(*args, **named)

    async def test() -> None:
        store = Counting(await world.store())
        endpoints = Endpoints([store])
        for _ in range(3):
            world.check(await deliver(world.request(), endpoints, policy=level_major))
        assert store.lookups == 3

    run(test())
