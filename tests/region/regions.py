"""A centre and regions on real sockets, and a link between them that can be cut, held, counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kdn.bench.cluster.link import Link
from kdn.config import Config
from kdn.node.server import listen, open_node
from kdn.places.names import NodeNames
from kdn.region.depot import RegionDepot
from kdn.store.http import HttpStore
from kdn.store.node_client import NodeClient
from tests.node.harness import Running, config_for

FAST = {"upstream_timeout_s": 2.0, "max_stale_s": 1.0, "memory_bytes": 2**24, "disk_bytes": 2**26}
"""Settings of a region in tests, which do not wait."""


@asynccontextmanager
async def whole(config: Config) -> AsyncIterator[Running]:
    """A node with a depot of its own."""
    async with (
        open_node(config) as node,
        listen(config, node) as listening,
        aiohttp.ClientSession(auto_decompress=False) as session,
    ):
        yield Running(listening, session)


@asynccontextmanager
async def region(
    folder: Path, centre: Running | Link, *tenants: Any, **settings: Any
) -> AsyncIterator[Running]:
    config = config_for(folder, *tenants, **{**FAST, "upstream": centre.url, **settings})
    async with whole(config) as running:
        yield running


@asynccontextmanager
async def centre_and_link(folder: Path) -> AsyncIterator[tuple[Running, Link]]:
    async with AsyncExitStack() as stack:
        centre = await stack.enter_async_context(whole(config_for(folder, disk_bytes=2**26)))
        link = await stack.enter_async_context(Link.to("127.0.0.1", centre.listening.port))
        yield centre, link


@asynccontextmanager
async def names_at(*nodes: Running) -> AsyncIterator[list[NodeNames]]:
    """A client of each."""
    clients = [NodeClient(node.url) for node in nodes]
    try:
        yield [NodeNames(client) for client in clients]
    finally:
        for client in clients:
            await client.close()


@asynccontextmanager
async def store_at(node: Running, collection: str = "objects") -> AsyncIterator[HttpStore]:
    store = HttpStore(node.url, collection=collection)
    try:
        yield store
    finally:
        await store.close()


def depot_of(node: Running) -> RegionDepot:
    depot = node.node.depot
    assert isinstance(depot, RegionDepot)
    return depot


async def until(holds: Callable[[], bool], deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not holds():
            await asyncio.sleep(0.01)


async def sent(node: Running) -> None:
    """All that was put there is at the centre."""
    outbox = depot_of(node).region.outbox
    assert outbox is not None
    await until(lambda: not len(outbox))


async def following(node: Running) -> None:
    """It has heard of the centre's names."""
    depot = depot_of(node)
    feeds = depot.names._following.values()  # type: ignore[attr-defined]
    await until(lambda: all(feed.age_s < 1.0 for feed in feeds))


def forgive(node: Running) -> None:
    """A region leaves a centre alone that failed again and again: not any more."""
    depot_of(node).region._tier.rests_until_s = 0.0
