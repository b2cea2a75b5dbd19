"""What the handlers of one node share, and the context of one request."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kdn.config import NodeSettings
from kdn.depot.depot import Depot
from kdn.depot.tenants import Tenant
from kdn.node.answers import bad_request
from kdn.node.bodies import BodyReader
from kdn.node.budget import Budget
from kdn.node.checksums import Checksums
from kdn.node.egress import Egress
from kdn.node.feed import Feed
from kdn.node.ledger import Ledger
from kdn.node.rates import Rates
from kdn.node.shares import Shares
from kdn.node.stats import NodeStats
from kdn.node.status.traffic import Traffic
from kdn.node.tenants import Tenants

if TYPE_CHECKING:
    from kdn.node.status.live import Status

_CLIENT = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass
class Node:
    """One node: its parts are made in `server.py`."""

    settings: NodeSettings
    depot: Depot
    tenants: Tenants
    egress: Egress
    requests: Shares
    """In progress, of those that passed the guard."""
    bodies: BodyReader
    answers: Budget
    """Memory of what lookups, reads and names found. Asked for while holding a question's body and
    never the other way round, so nobody waits in a circle."""
    frame_bytes: int
    stats: NodeStats = field(default_factory=NodeStats)
    traffic: Traffic = field(default_factory=Traffic)
    checksums: Checksums = field(default_factory=Checksums)
    rates: Rates = field(default_factory=Rates)
    lookups: defaultdict[str, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    """By tenant: held during each part of a long lookup."""
    num_requests: int = 0
    stopping: bool = False
    feed: Feed = field(init=False)
    """Of names, for those who follow them."""
    # Of a node that has several processes (`workers.py`):
    behind_workers: bool = False
    """It keeps everything, and its workers guard it."""
    relay: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    """Of a worker: how requests get to the owner."""
    ledger: Ledger | None = None
    """Of a worker: what tenants hold of all of them."""
    others: Callable[[], Awaitable[list[bytes]]] | None = None
    """Of the owner: the metrics of all workers."""
    workers_counts: Callable[[bool], Awaitable[list[dict[str, Any]]]] | None = None
    """Of the owner: what all workers counted for the status."""
    status: Status | None = None
    """Of the process that tells it: none of a worker."""

    def __post_init__(self) -> None:
        self.depot.changed = self.checksums.forget
        self.feed = Feed(self.depot.names)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While a request waits most of the time: it is no reason for others to hold back."""
        self.num_requests -= 1
        try:
            yield
        finally:
            self.num_requests += 1

    def is_alone(self, tenant: Tenant) -> bool:
        """Whether nobody else has a request in progress."""
        return self.num_requests <= self.requests.held_here(tenant.name)


NODE = web.AppKey("node", Node)
TENANT = web.RequestKey("tenant", Tenant)
CLIENT = web.RequestKey("client", str)


def client_of(request: web.Request) -> str:
    """Who shares a tenant's egress: told in a header, else the peer's address."""
    return client_named(request.headers.get("Kdn-Client"), request.remote)


def client_named(told: str | None, remote: str | None) -> str:
    return remote or "unknown" if told is None else checked_client(told)


def checked_client(told: object) -> str:
    if not isinstance(told, str) or not _CLIENT.fullmatch(told):
        raise bad_request("Kdn-Client: expected 1 to 64 letters, digits, '.', '_', '-'")
    return told


def query_number(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or not low <= int(text) <= high:
        raise bad_request(f"{name}: expected a number from {low} to {high}")
    return int(text)


def query_flag(request: web.Request, name: str) -> bool:
    text = request.query.get(name, "false")
    if text not in ("true", "false"):
        raise bad_request(f"{name}: expected true or false")
    return text == "true"
