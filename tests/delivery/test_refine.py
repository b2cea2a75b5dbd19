"""Levels that arrive after the deadline: written when told, whole chunks, nobody else's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest
import torch

from kdn.delivery.client import deliver
from kdn.delivery.flight import Limits
from tests.delivery.world import Flaky, World, cache_of, level_major, make_world, run

QUICK = Limits(hedge_s=0.05, silence_s=0.2)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(6, last_tokens=48)


def complete(world: World) -> tuple[int, ...]:
    return (world.codec.num_levels,) * len(world.chunks)


def test_refinement_changes_the_cache_only_when_told(world: World) -> None:
    async def test() -> None:
        store = Flaky(await world.store(), Random(1), cut=0.02)
        request = world.request(enough_kld=world.expected_kld[0], deadline_s=5.0)
        result = await deliver(request, [store], policy=level_major, limits=QUICK, rng=Random(1))
        assert result.levels == (1,) * 6
        before = cache_of(result).keys.clone()
        async with result.refine() as better:
            while not better.is_complete:
                assert await better.wait(5.0)
                assert torch.equal(cache_of(result).keys, before)
                levels = better.levels
                improved = await better.apply()
                for number in improved:
                    assert better.levels[number] > levels[number]
                world.check(replace(result, levels=better.levels))
                before = cache_of(result).keys.clone()
            assert better.levels == complete(world)
            assert better.ready == ()
        assert len(asyncio.all_tasks()) == 1

    run(test())


def test_refinement_leaves_alone_what_is_not_its_own(world: World) -> None:
    async def test() -> None:
        store = await world.store(world.streams[:3])
        request = world.request(enough_kld=world.expected_kld[0], deadline_s=5.0)
        result = await deliver(request, [store], policy=level_major)
        assert result.recompute == (3, 4, 5)
        cache_of(result).keys[:, 768:] = 7.0
        async with result.refine() as better:
            assert await better.wait(5.0)
            while not better.is_complete:
                await better.apply(limit_s=1.0)
                await better.wait(0.1)
        assert better.levels == complete(world)[:3]
        assert bool((cache_of(result).keys[:, 768:] == 7.0).all())

    run(test())


def test_leaving_a_refinement_early_leaves_nothing_behind(world: World) -> None:
    async def test() -> None:
        store = Flaky(await world.store(), Random(1), rate=300_000)
        request = world.request(enough_kld=world.expected_kld[0], deadline_s=5.0)
        result = await deliver(request, [store], policy=level_major)
        async with result.refine() as better:
            await better.wait(5.0)
        assert store.open_requests == 0
        assert len(asyncio.all_tasks()) == 1
        assert not better.is_complete or better.levels == complete(world)

    run(test())


class Late:
    """A machine that finds no time for the last chunk, as long as it has other things to do."""

    is_busy = True

    def decode_s(self, num_tokens: int, levels: int) -> float:
        return 100.0 if num_tokens == 48 and self.is_busy else 0.2

    def prefill_s(self, start: int, end: int) -> float:
        return 1.0


def test_what_arrived_and_was_not_decoded_is_the_models(world: World) -> None:
    """It was there at the deadline, but the model has read it meanwhile."""
    speeds = Late()

    async def test() -> None:
        store = await world.store()
        request = world.request(enough_kld=world.expected_kld[0], deadline_s=2.0, speeds=speeds)
        result = await deliver(request, [store], policy=level_major)
        assert result.levels == (1, 1, 1, 1, 1, 0)
        cache_of(result).keys[:, 1280:] = 7.0
        speeds.is_busy = False
        async with result.refine() as better:
            while not better.is_complete:
                await better.wait(5.0)
                await better.apply()
            for step in range(60):  # with just enough time, what is empty would come first
                await better.apply(0.5 * 0.9**step)
        assert better.levels[:5] == complete(world)[:5]
        assert bool((cache_of(result).keys[:, 1280:] == 7.0).all())

    run(test())
