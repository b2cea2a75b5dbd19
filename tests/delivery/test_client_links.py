"""Deliveries over links that break, stall and sleep: they go on, end in time, and leave nothing."""

from __future__ import annotations

import asyncio
import threading
from random import Random
from typing import Any

import pytest

from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoints
from kdn.delivery.flight import Limits
from kdn.delivery.lookup import HEAD_BYTES
from kdn.delivery.plan import Plan, Situation
from kdn.delivery.planner import default
from kdn.store.base import Entry, Store
from tests.delivery.checked import deliver_from
from tests.delivery.world import (
    Down,
    Flaky,
    Proxy,
    World,
    level_major,
    make_world,
    run,
)

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(6, last_tokens=48)


@pytest.mark.parametrize("seed", range(6))
def test_cuts_resume_at_the_byte(world: World, seed: int) -> None:
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores.append(Flaky(await world.store(), Random(seed), cut=0.05))
        return stores

    result = deliver_from(world, places)
    assert result.levels == world.all_levels
    assert result.failures == stores[0].seen["cut"] > 0
    # Nothing that arrived is asked for again: what was fetched is what there is.
    heads = sum(min(HEAD_BYTES, len(stream)) for stream in world.streams)
    assert result.fetched_bytes == sum(map(len, world.streams)) - heads


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
    assert result.levels == world.all_levels
    assert stores[1].asked


def test_a_late_request_is_hedged(world: World) -> None:
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores[:] = [
            Flaky(await world.store(), Random(1), stall=1.0, stall_s=30.0),
            Flaky(await world.store(), Random(2)),
        ]
        return stores

    patient = Limits(hedge_s=0.02, silence_s=10.0)
    result = deliver_from(world, places, limits=patient, deadline_s=20.0)
    assert result.levels == world.all_levels
    assert result.failures == 0
    assert any("late" in trouble for trouble in result.troubles)
    asked_late, asked = (len(store.asked) for store in stores)
    assert asked_late < asked / 2, "who is late and brings nothing is not asked again and again"
    assert result.done_s < 15.0, "half as long as one request stalls"
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
    assert result.levels == world.all_levels
    assert result.failures


def test_a_place_that_is_back_within_the_deadline_delivers_everything(world: World) -> None:
    async def places() -> list[Store]:
        store = Down(await world.store())

        def wake() -> None:
            store.is_down = False

        asyncio.get_running_loop().call_later(0.5, wake)
        return [store]

    result = deliver_from(world, places)
    assert result.levels == world.all_levels


def test_the_deadline_ends_a_slow_delivery(world: World) -> None:
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores[:] = [Flaky(await world.store(), Random(1), rate=60_000)]
        return stores

    for policy in (level_major, default):
        result = deliver_from(world, places, deadline_s=0.8, policy=policy)
        assert any(result.levels)
        assert result.levels != world.all_levels
        assert stores[0].open_requests == 0


def test_cancellation_closes_everything(world: World) -> None:
    async def test() -> None:
        store = Flaky(await world.store(), Random(1), rate=20_000)
        task = asyncio.create_task(deliver(world.request(), [store], policy=level_major))
        while not store.open_requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.open_requests == 0
        assert len(asyncio.all_tasks()) == 1

    run(test())


def test_mistakes_of_a_store_or_a_policy_raise(world: World) -> None:
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


def test_threads_do_not_pile_up(world: World) -> None:
    async def places() -> list[Store]:
        return [await world.store()]

    deliver_from(world, places)
    before = threading.active_count()
    for _ in range(3):
        deliver_from(world, places, enough_kld=world.expected_kld[0])
    assert threading.active_count() <= before


def test_endpoints_serve_one_delivery_after_another(world: World) -> None:
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
