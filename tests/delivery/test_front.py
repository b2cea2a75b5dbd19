"""The model at work beside a delivery."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch

from kdn.cache.tensors import KVCache
from kdn.delivery.plan import Fetch, Plan, Situation
from kdn.delivery.planner import default
from kdn.store.base import Entry, Store
from tests.delivery.checked import deliver_from
from tests.delivery.deliveries import Steady
from tests.delivery.world import Flaky, Proxy, World, level_major, make_world


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(6, last_tokens=48)


def joined(caches: Sequence[KVCache]) -> KVCache:
    keys, values = (
        torch.cat([getattr(one, name) for one in caches], 1) for name in ("keys", "values")
    )
    return KVCache(keys, values, caches[0].start)


def test_the_model_reads_from_the_front_while_the_rest_loads(world: World) -> None:
    computed: list[int] = []

    async def compute(first: int, end: int) -> KVCache:
        await asyncio.sleep(0.02)
        computed.extend(range(first, end))
        return joined(world.caches[first:end])

    def policy(situation: Situation) -> Plan:
        plan = level_major(situation)
        fetches = tuple(fetch for fetch in plan.fetches if fetch.chunk >= 2)
        return replace(plan, fetches=fetches, recompute=2)

    async def places() -> list[Store]:
        return [await world.store()]

    result = deliver_from(world, places, compute=compute, policy=policy)
    assert computed == [0, 1]
    assert result.computed == (True, True, False, False, False, False)
    assert result.levels == (0, 0) + (world.codec.num_levels,) * 4


def test_over_a_dead_link_the_model_reads_everything(world: World) -> None:
    """Never slower than recomputing: here 6 chunks of 0.05 s, where the deadline is far away."""

    async def compute(first: int, end: int) -> KVCache:
        await asyncio.sleep(0.05 * sum(one.num_tokens for one in world.chunks[first:end]) / 256)
        return joined(world.caches[first:end])

    async def places() -> list[Store]:
        return [Flaky(await world.store(), Random(1), stall=1.0, stall_s=30.0)]

    result = deliver_from(
        world, places, compute=compute, policy=default, enough_kld=0.01,
        speeds=Steady(tokens_per_s=256 / 0.05, level_s=1e-3), deadline_s=20.0,
    )  # fmt: skip
    assert result.computed == (True,) * 6
    assert result.done_s < 10.0


class Mute(Proxy):
    """Does not answer lookups before long."""

    wait_s = 30.0

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        await asyncio.sleep(self.wait_s)
        return await super().lookup(keys, head_bytes=head_bytes)


@pytest.mark.parametrize(("wait_s", "chunk_s"), [(60.0, 0.05), (0.2, 3.0)])
def test_a_model_does_not_wait_for_a_lookup(world: World, wait_s: float, chunk_s: float) -> None:
    """It reads everything; a lookup that is late, but not too late, ends that."""
    stopped: list[int] = []

    async def compute(first: int, end: int) -> KVCache:
        try:
            num_tokens = sum(one.num_tokens for one in world.chunks[first:end])
            await asyncio.sleep(chunk_s * num_tokens / 256)
        except asyncio.CancelledError:
            stopped.append(end)
            raise
        return joined(world.caches[first:end])

    async def places() -> list[Store]:
        mute = Mute(await world.store())
        mute.wait_s = wait_s
        return [mute]

    result = deliver_from(
        world, places, compute=compute, policy=default, enough_kld=0.01,
        speeds=Steady(tokens_per_s=256 / chunk_s, level_s=1e-3), deadline_s=15.0,
    )  # fmt: skip
    if wait_s > 1:
        assert result.computed == (True,) * 6
        assert result.known == 0
        assert not result.recompute
    else:
        assert result.computed == (False,) * 6
        assert min(result.levels) >= 2
        assert stopped == [6]
    assert result.done_s < 8.0


def test_a_model_that_is_not_done_is_cancelled(world: World) -> None:
    state: list[str] = []

    async def compute(first: int, end: int) -> KVCache:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            state.append("cancelled")
            raise
        raise AssertionError

    def policy(situation: Situation) -> Plan:
        return Plan((Fetch(5, 1),), 5, 0.0, 0.0)

    async def places() -> list[Store]:
        return [await world.store()]

    result = deliver_from(world, places, compute=compute, policy=policy, deadline_s=0.3)
    assert state == ["cancelled"]
    assert result.recompute == (0, 1, 2, 3, 4)
