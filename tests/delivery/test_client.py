"""Deliveries over stores that work: everything arrives, or as much as was asked for."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from kdn.bench.delivery.policies import mpc
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.flight import Limits
from kdn.delivery.planner import default
from kdn.delivery.request import Snapshot
from kdn.errors import MismatchError
from kdn.store.base import Store
from tests.delivery.checked import deliver_from
from tests.delivery.world import (
    Down,
    Flaky,
    World,
    cache_of,
    level_major,
    make_world,
    run,
)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(6, last_tokens=48)


def pairs(world: World) -> list[tuple[Chunk, bytes]]:
    return list(zip(world.chunks, world.streams, strict=True))


@pytest.mark.parametrize("policy", [level_major, default, mpc])
def test_everything_arrives(world: World, policy: Any) -> None:
    async def places() -> list[Store]:
        return [await world.store()]

    result = deliver_from(world, places, policy=policy)
    assert result.levels == world.all_levels
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
    assert result.levels != world.all_levels
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


def test_only_the_longest_known_beginning_is_loaded(world: World) -> None:
    async def places() -> list[Store]:
        return [await world.store([*world.streams[:2], *world.streams[3:]])]

    result = deliver_from(world, places)
    assert (result.known, result.recompute) == (2, (2, 3, 4, 5))
    assert result.levels == (world.codec.num_levels,) * 2 + (0,) * 4


def test_where_nothing_is_known_or_nobody_there_all_is_left_to_the_model(world: World) -> None:
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
    assert result.levels == world.all_levels


def test_what_local_endpoints_hold_is_not_asked_of_others(world: World) -> None:
    remote: list[Flaky] = []

    async def places() -> list[Store | Endpoint]:
        remote.append(Flaky(await world.store(), Random(1)))
        return [*remote, Endpoint(await world.store(world.streams[:4]), local=True)]

    result = deliver_from(world, places)
    assert result.levels == world.all_levels
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


def test_progress_is_reported(world: World) -> None:
    seen: list[Snapshot] = []

    async def places() -> list[Store]:
        return [Flaky(await world.store(), Random(1), rate=1e6)]

    result = deliver_from(world, places, on_progress=seen.append)
    assert len(seen) > 2
    assert seen[-1].levels == result.levels
    assert seen[-1].fetched_bytes == result.fetched_bytes
    assert [one.elapsed_s for one in seen] == sorted(one.elapsed_s for one in seen)


def test_what_arrived_can_be_kept(world: World) -> None:
    """As it was stored, verified, and safe from whoever holds it."""

    async def places() -> list[Store]:
        return [await world.store()]

    result = deliver_from(world, places, policy=level_major)
    for one, chunk, stream in zip(result.arrived, world.chunks, world.streams, strict=True):
        assert (one.chunk, one.data) == (chunk, stream)
        assert one.levels == world.codec.num_levels
        assert one.data.readonly
