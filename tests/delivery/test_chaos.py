"""Deliveries over real sockets while everything breaks.

Each ends in time with a right cache or a clean "recompute", and leaves nothing behind. For more of
them, with longer stalls: KDN_CHAOS_DELIVERIES=500 KDN_CHAOS_STALL_S=3 KDN_CHAOS_AT_ONCE=8.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from kdn.delivery.assemble import Assembly
from kdn.delivery.client import deliver
from kdn.delivery.flight import Limits
from kdn.delivery.planner import default
from kdn.delivery.request import Result
from kdn.store.base import Store
from kdn.store.http import HttpStore
from kdn.store.node_client import HttpLimits, NodeClient
from tests.delivery.chaos import FragileNode, Gateway, make_trouble
from tests.delivery.world import World, level_major, make_world, run

DELIVERIES = int(os.environ.get("KDN_CHAOS_DELIVERIES", "40"))
STALL_S = float(os.environ.get("KDN_CHAOS_STALL_S", "0.4"))
AT_ONCE = int(os.environ.get("KDN_CHAOS_AT_ONCE", "4"))
LATE_S = 4.0
"""What a busy machine may add to a deadline (a few tenths are usual): hangs are looked for."""


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(8)


def open_sockets() -> int:
    folder = Path("/proc/self/fd")
    found = 0
    for link in folder.iterdir() if folder.exists() else ():
        try:
            found += os.readlink(link).startswith("socket:")
        except OSError:
            continue
    return found


def connect(url: str) -> Store:
    limits = HttpLimits(connections=8, connect_s=0.5, silence_s=5.0)
    return HttpStore(NodeClient(url, limits=limits), collection="chunks")


async def one_delivery(world: World, gateways: list[Gateway], rng: Random) -> tuple[Result, float]:
    """The result, and by how much it was late."""
    stores = [connect(one.url) for one in rng.sample(gateways, rng.choice((1, 2)))]
    request = world.request(
        deadline_s=rng.choice((0.2, 0.6, 1.2, 1.0 + STALL_S)),
        enough_kld=rng.choice((0.0, world.expected_kld[1])),
    )
    limits = Limits(hedge_s=0.1, silence_s=rng.choice((0.3, 1.0)))
    policy = rng.choice((level_major, default))
    began_s = time.monotonic()
    result = await deliver(request, stores, policy=policy, limits=limits, rng=rng)
    late_s = time.monotonic() - began_s - request.deadline_s
    for store in stores:
        await store.close()
    world.check(result)
    return result, late_s


async def all_deliveries(world: World, folder: Path, seen: Counter[str]) -> list[float]:
    rng, lates = Random(7), []
    node = FragileNode(folder)
    gateways = [Gateway(node, rng, STALL_S, seen) for _ in range(2)]
    await node.start()
    for stream in world.streams:
        await node.put(stream)
    for gateway in gateways:
        await gateway.open()
    trouble = asyncio.create_task(make_trouble(node, gateways, world, rng, seen))
    gate = asyncio.Semaphore(AT_ONCE)

    async def bounded(seed: int) -> None:
        async with gate:
            result, late_s = await one_delivery(world, gateways, Random(seed))
            lates.append(late_s)
            seen["chunks"] += sum(map(bool, result.levels))
            seen["complete"] += not result.recompute
            seen["failures"] += result.failures
            seen["chunks left to the model"] += len(result.recompute)

    try:
        await asyncio.gather(*(bounded(seed) for seed in range(DELIVERIES)))
        assert not trouble.done()
    finally:
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
        for gateway in gateways:
            await gateway.close()
        await node.close()
    await asyncio.sleep(0.1)  # closed sockets leave the loop in its next rounds
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return lates


def num_threads() -> int:
    """Besides those that verify for all deliveries of a process, and stay."""
    return sum(not one.name.startswith("kdn-verify") for one in threading.enumerate())


@pytest.mark.alone
def test_deliveries_through_chaos_are_right_and_in_time(world: World, tmp_path: Path) -> None:
    threads, sockets = num_threads(), open_sockets()
    seen: Counter[str] = Counter()
    limit_s = 60.0 + DELIVERIES * (1.5 + STALL_S) / AT_ONCE
    lates = run(all_deliveries(world, tmp_path, seen), limit_s)
    assert len(lates) == DELIVERIES
    assert max(lates) < LATE_S
    assert num_threads() <= threads
    assert open_sockets() <= sockets
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Assembly]
    for what in ("cut", "stall", "flip", "kill", "republish", "restart"):
        assert seen[what], f"no {what} happened: nothing was tested"
    every = DELIVERIES * len(world.chunks)
    assert seen["chunks"] >= every / 4, "a delivery that gives up at once is no delivery"
