"""Deliveries from several nodes that are one endpoint, some of which die or hang meanwhile."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from kdn.codec.header import Header
from kdn.delivery.client import deliver
from kdn.delivery.request import Result
from kdn.store.many_nodes import ManyNodesStore
from tests.delivery.test_chaos import open_sockets
from tests.delivery.world import World, make_world, run
from tests.store.clusters import QUICK, Cluster, cluster

DEADLINE_S = 20.0
PATIENT = replace(QUICK, silence_s=60.0, deadline_s=90.0)
"""Whoever waits for a silent node does not meet the deadline."""


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(8)


def opened(nodes: Cluster) -> AbstractAsyncContextManager[ManyNodesStore]:
    return nodes.store(collection="chunks", limits=PATIENT)


async def publish(world: World, store: ManyNodesStore) -> None:
    for stream in world.streams:
        header = Header.parse(stream)
        await store.put(
            header.info.chunk_key, stream, etag=header.stream_id,
            checksum=xxh3_64_intdigest(stream),
        )  # fmt: skip


async def delivered(world: World, store: ManyNodesStore) -> tuple[Result, float]:
    began_s = time.monotonic()
    result = await deliver(world.request(deadline_s=DEADLINE_S), [store])
    world.check(result)
    return result, time.monotonic() - began_s


def shut_one(nodes: Cluster) -> None:
    nodes.gates[0].shut()


def hang_one(nodes: Cluster) -> None:
    nodes.gates[0].hang()


def cut_all_once(nodes: Cluster) -> None:
    for gate in nodes.gates:
        gate.cut_after_bytes = 9000


def shut_two(nodes: Cluster) -> None:
    nodes.gates[0].shut()
    nodes.gates[1].shut()


@pytest.mark.parametrize("trouble", [shut_one, hang_one, cut_all_once, shut_two])
@pytest.mark.parametrize("before", [True, False])
def test_all_levels_come_although_nodes_fail(
    world: World, tmp_path: Path, trouble: object, before: bool
) -> None:
    """Before the lookup, or while bytes are on their way."""

    async def work() -> None:
        async with cluster(tmp_path, 3) as nodes, opened(nodes) as store:
            await publish(world, store)
            if before:
                trouble(nodes)  # type: ignore[operator]
            else:
                for gate in nodes.gates:
                    gate.delay_s = 0.01
                asyncio.get_running_loop().call_later(0.04, trouble, nodes)
            result, took_s = await delivered(world, store)
            assert result.levels == world.all_levels, result.troubles
            assert took_s < DEADLINE_S

    run(work(), 60.0)


def test_through_chaos_nothing_is_wrong_and_nothing_is_left(world: World, tmp_path: Path) -> None:
    """Nodes are shut, hang and cut connections at random; one is always well."""
    rng = Random(5)

    async def trouble(nodes: Cluster) -> None:
        while True:
            gate = nodes.gates[rng.randrange(2)]
            what = rng.randrange(3)
            if what == 0:
                gate.shut()
                await asyncio.sleep(rng.uniform(0.0, 0.2))
                await gate.open()
            elif what == 1:
                gate.hang()
                await asyncio.sleep(rng.uniform(0.0, 0.6))
                gate.hang(False)
            else:
                gate.cut_after_bytes = rng.randrange(20_000)
            await asyncio.sleep(rng.uniform(0.0, 0.1))

    async def work() -> None:
        async with cluster(tmp_path, 3) as nodes, opened(nodes) as store:
            await publish(world, store)
            making = asyncio.create_task(trouble(nodes))
            for _ in range(4):
                results = await asyncio.gather(*(delivered(world, store) for _ in range(4)))
                assert [one.levels for one, _ in results] == [world.all_levels] * 4
                assert max(took_s for _, took_s in results) < DEADLINE_S
            assert not making.done()
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)

    sockets = open_sockets()
    run(work(), 120.0)
    assert open_sockets() <= sockets
