"""A worker of a node: reads for clients, on a core of its own.

It answers GET, lookups and batch reads from its memory and from the owner's files (`owners_store`),
and relays everything else to the owner. What tenants share is shared across workers: requests and
connections are counted in one ledger, rates and the limit of egress at the owner.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from kdn.config import Config
from kdn.depot.depot import Depot
from kdn.depot.names import NameStore
from kdn.depot.tenants import owners_of, tenants_of
from kdn.node.bodies import BodyReader
from kdn.node.budget import Budget
from kdn.node.egress import BusyError
from kdn.node.ledger import OPEN, Ledger, LedgerShares, column
from kdn.node.link import Answer, Fields, Handler, Link
from kdn.node.owners_limits import OwnersEgress, OwnersRate
from kdn.node.owners_store import OwnersStore
from kdn.node.relay import Relay
from kdn.node.server import frame_bytes_of, make_egress
from kdn.node.shares import Shares
from kdn.node.state import Node
from kdn.node.status.counts import process_counts
from kdn.node.tenants import Tenants
from kdn.store.base import Stats, Store
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from kdn.store.tiered import Tier, TieredStore

LINK, HTTP = "link", "http"
"""Names of the owner's sockets, in a folder of their own."""
LEAST_QUESTIONS_BYTES = 32 * 2**20


def make_ledger(config: Config) -> Ledger:
    tenants = [tenant.name for tenant in tenants_of(config.tenants)]
    shared = [column(what, name) for what in ("requests", "connections") for name in tenants]
    return Ledger(config.node.workers, [*shared, OPEN])


@dataclass(frozen=True)
class Place:
    """Where a worker is to be found among the others."""

    number: int
    folder: Path
    """Of the owner's sockets."""
    ledger: Ledger


@asynccontextmanager
async def open_worker(
    config: Config, place: Place, owner_gone: asyncio.Event
) -> AsyncIterator[Node]:
    """A node without a depot of its own. `owner_gone` is set when it can no longer answer."""
    place.ledger.begin_row(place.number)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as opened:
        handlers: dict[str, Handler] = {
            "drop": lambda fields: drop(fields),
            "metrics": lambda fields: metrics(fields),
            "counts": lambda fields: counts(fields),
        }
        _, link = await loop.create_unix_connection(
            lambda: Link(handlers, errors=(BusyError,), lost=lambda _: owner_gone.set()),
            str(place.folder / LINK),
        )
        opened.callback(link.close)
        store = _open_store(config, link)
        opened.push_async_callback(store.close)
        node = _make_node(config, place, link, store)
        relay = node.relay = Relay(place.folder / HTTP, config.node)
        opened.push_async_callback(relay.close)

        async def drop(fields: Fields) -> Answer:
            for key in map(bytes.fromhex, fields["keys"]):
                await store.delete(key)
                node.checksums.forget_key(key)
            return {}, b""

        async def metrics(fields: Fields) -> Answer:
            counted = await store.stats()
            return {}, node.stats.expose(
                Stats(hits=counted.hits, misses=counted.misses, tiers=counted.tiers)
            )

        async def counts(fields: Fields) -> Answer:
            return await process_counts(node, **fields), b""

        await link.ask("hello", pid=os.getpid())
        yield node


def _open_store(config: Config, link: Link) -> Store:
    settings = config.node
    owners = OwnersStore(link, settings.data / "objects" if settings.disk_bytes else None)
    memory_bytes = worker_memory_bytes(config)
    if not memory_bytes:
        return owners
    policy = open_policy(
        settings.policy, owners=owners_of(tenants_of(config.tenants)), may_cut=False
    )
    memory = Tier("memory", MemoryStore(memory_bytes, policy), 1.0)
    return TieredStore([memory, Tier(owners.kind, owners, settings.store_timeout_s)])


def _make_node(config: Config, place: Place, link: Link, store: Store) -> Node:
    settings = config.node
    tenants = tenants_of(config.tenants)
    # Names are the owner's: requests for them are relayed.
    depot = Depot(store, cast(NameStore, None), tenants, settings.store_timeout_s)
    known = Tenants(tenants, lambda: 0.0)
    known.rates = {tenant.name: OwnersRate(link, tenant) for tenant in tenants}
    uncapped = {tenant.name: 0 for tenant in tenants}
    caps = {tenant.name: tenant.settings.max_requests for tenant in tenants}
    own = replace(
        settings,
        max_questions_bytes=_part(settings.max_questions_bytes, settings.workers),
        max_answers_bytes=_part(settings.max_answers_bytes, settings.workers),
    )
    is_limited = settings.egress_bits_per_s or settings.egress_trace
    return Node(
        settings,
        depot,
        known,
        OwnersEgress(link) if is_limited else make_egress(config),
        requests=LedgerShares(place.ledger, "requests", settings.max_requests, caps),
        bodies=BodyReader(own, uncapped),
        answers=Budget(Shares(own.max_answers_bytes, uncapped), settings.body_window_s),
        frame_bytes=frame_bytes_of(settings),
        ledger=place.ledger,
    )


def _part(total_bytes: int, workers: int) -> int:
    return max(total_bytes // workers, min(total_bytes, LEAST_QUESTIONS_BYTES))


def worker_memory_bytes(config: Config) -> int:
    """Of the memory for objects, what each worker has. The owner needs none beside a disk."""
    settings = config.node
    return (settings.memory_bytes - owner_memory_bytes(config)) // settings.workers


def owner_memory_bytes(config: Config) -> int:
    return 0 if config.node.disk_bytes else config.node.memory_bytes // 2
