"""Part b: servers are killed, cut off and moved under load. How long nobody could go on, and what
of the acknowledged writes was lost: nothing should be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kdn.bench.cluster.ledger import Ledger, load, verify
from kdn.bench.cluster.long_link import long_link
from kdn.bench.cluster.rows import Run
from kdn.bench.cluster.speed import opened
from kdn.bench.node_servers import Server, start_kdn
from kdn.bench.s3_servers import rclone_s3
from kdn.bench.servers import FAILOVER_S, MissingError, RedisClusterServers, redis_cluster, until
from kdn.credentials import Credentials
from kdn.store.base import Store
from kdn.store.many_nodes import node_store, open_nodes
from kdn.store.opening import open_remote

HELD_UP_S = 30.0
"""For operations to end that a fault holds up."""

Fault = Callable[[int], Awaitable[dict[str, Any]]]
"""Lets something happen, and returns when it is over, with what is to be told of it."""


async def measure_faults(run: Run) -> None:
    for measure in (kill_masters, reshard, kill_nodes, kill_s3, cut_region):
        try:
            await measure(run)
        except MissingError as error:
            run.rows.skip(measure.__name__.replace("_", " "), error)


async def under_load(
    run: Run,
    what: str,
    store: Store,
    fault: Fault,
    times: int,
    settle: Callable[[], Awaitable[None]] | None = None,
    checked: Store | None = None,
) -> None:
    """A row for each time, and one for all of them. `settle`: when all is well again. `checked`:
    where what was acknowledged must be, if not where it was put."""
    plan, ledger = run.plan, Ledger()
    async with load(store, ledger, plan.writers, plan.readers, [run.seed]):
        for number in range(times):
            await asyncio.sleep(plan.calm_s)
            start_s = time.monotonic()
            told = await fault(number)
            await asyncio.sleep(plan.calm_s)
            await ledger.caught_up(HELD_UP_S)
            run.rows.add("b", what, number=number, **told, **ledger.outage(start_s))
            if settle is not None:
                await settle()
    found = await verify(checked or store, ledger)
    run.rows.add("b", f"{what}, all", times=times, **found, reasons=ledger.reasons())


# Redis


async def kill_masters(run: Run) -> None:
    with redis_cluster(run.folder("masters")) as cluster:
        killed: list[int] = []

        async def kill(number: int) -> dict[str, Any]:
            masters = await asyncio.to_thread(cluster.masters)
            killed.append(masters[number % len(masters)])
            cluster.kill(killed[-1])
            return {"cluster_s": await asyncio.to_thread(_failover_s, cluster)}

        async def settle() -> None:
            await asyncio.to_thread(cluster.restart, killed[-1])
            await asyncio.to_thread(cluster.wait_until_whole, 1)

        async with opened(open_remote(cluster.url, Credentials())) as store:
            await under_load(run, "kill a master", store, kill, run.plan.master_kills, settle)


def _failover_s(cluster: RedisClusterServers) -> float:
    """How long the Cluster itself takes until every slot is served again."""
    began_s = time.monotonic()
    until(lambda: not _is_whole(cluster), FAILOVER_S, lambda: "nobody noticed")
    until(lambda: _is_whole(cluster), FAILOVER_S, lambda: "nobody took over")
    return time.monotonic() - began_s


def _is_whole(cluster: RedisClusterServers) -> bool:
    """As all of the living see it, with masters that live."""
    living = [server for server in cluster.servers if server.is_running]
    if not all(cluster.servers[at].is_running for at in cluster.masters()):
        return False
    told = [server.ask("CLUSTER", "INFO") for server in living]
    texts = [one.decode() if isinstance(one, bytes) else str(one) for one in told]
    return len(cluster.masters()) >= 3 and all("cluster_state:ok" in text for text in texts)


async def reshard(run: Run) -> None:
    with redis_cluster(run.folder("reshard")) as cluster:

        async def move(number: int) -> dict[str, Any]:
            began_s = time.monotonic()
            new = await asyncio.to_thread(cluster.add_shard, 1)
            added_s = time.monotonic() - began_s
            await asyncio.to_thread(cluster.reshard, new, run.plan.reshard_slots)
            return {"add_s": added_s, "reshard_s": time.monotonic() - began_s - added_s}

        async with opened(open_remote(cluster.url, Credentials())) as store:
            await under_load(run, "add a shard and reshard", store, move, 1)


# nodes


class Member:
    """A node that can be killed and started again at the same address."""

    def __init__(self, run: Run, name: str, **settings: object) -> None:
        self._folder, self._settings = run.folder(name), settings
        self._stack = ExitStack()
        self.server = self._start(None)

    def _start(self, port: int | None) -> Server:
        self._stack.close()
        return self._stack.enter_context(start_kdn(self._folder, self._settings, port=port))

    def kill(self) -> None:
        self.server.process.kill()
        self.server.process.wait()

    def restart(self) -> None:
        self.server = self._start(self.server.address[1])

    def close(self) -> None:
        self._stack.close()


@contextmanager
def members(run: Run, number: int, **settings: object) -> Iterator[list[Member]]:
    with ExitStack() as stack:
        started = []
        for at in range(number):
            started.append(Member(run, f"node{at}", **settings))
            stack.callback(started[-1].close)
        yield started


async def kill_nodes(run: Run) -> None:
    """One of two that share a Cluster: every request has another node to go to."""
    with redis_cluster(run.folder("nodes")) as cluster, members(run, 2, store=cluster.url) as two:

        async def kill(number: int) -> dict[str, Any]:
            two[number % 2].kill()
            await asyncio.sleep(run.plan.away_s)
            return {}

        async def settle() -> None:
            for one in two:
                if one.server.process.poll() is not None:
                    await asyncio.to_thread(one.restart)

        urls = ",".join(one.server.url for one in two)
        async with opened(node_store(open_nodes(urls), "chunks")) as store:
            await under_load(run, "kill a node", store, kill, run.plan.node_kills, settle)


# S3


async def kill_s3(run: Run) -> None:
    with rclone_s3(run.folder("s3") / "data") as server:

        async def kill(number: int) -> dict[str, Any]:
            server.kill()
            await asyncio.sleep(run.plan.away_s)
            began_s = time.monotonic()
            await asyncio.to_thread(server.start)
            return {"away_s": run.plan.away_s, "start_s": time.monotonic() - began_s}

        async with opened(open_remote(server.url("faults"), Credentials())) as store:
            await under_load(run, "kill the S3 server", store, kill, run.plan.s3_kills)


# regions


async def cut_region(run: Run) -> None:
    """A region goes on without its centre, which has everything afterwards."""
    plan = run.plan
    with ExitStack() as stack:
        centre = stack.enter_context(start_kdn(run.folder("centre")))
        link = stack.enter_context(
            long_link(centre.address, plan.link_bits_per_s, plan.link_delay_s)
        )
        region = stack.enter_context(start_kdn(run.folder("region"), {"upstream": link.url}))

        async def cut(number: int) -> dict[str, Any]:
            link.cut()
            await asyncio.sleep(plan.away_s)
            link.restore()
            return {"away_s": plan.away_s}

        async with (
            opened(node_store(open_nodes(region.url), "chunks")) as store,
            opened(node_store(open_nodes(centre.url), "chunks")) as home,
        ):
            await under_load(run, "cut a region", store, cut, plan.cuts, checked=home)
