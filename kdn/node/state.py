"""What the handlers of one node share, and the context of one request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from aiohttp import web

from kdn.config import NodeSettings
from kdn.errors import StoreError
from kdn.node.answers import bad_request
from kdn.node.bodies import BodyReader
from kdn.node.budget import Budget
from kdn.node.checksums import Checksums
from kdn.node.egress import Egress
from kdn.node.names import NameStore
from kdn.node.shares import Shares
from kdn.node.stats import NodeStats
from kdn.node.storage import Retainer
from kdn.node.tenants import Tenant, Tenants
from kdn.node.turns import Turns
from kdn.protocol.frames import MAX_KEY_BYTES
from kdn.store.base import Store

Result = TypeVar("Result")
_CLIENT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")


@dataclass
class Node:
    """One node: its parts are made in `server.py`."""

    settings: NodeSettings
    store: Store
    names: NameStore
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
    turns: Turns = field(default_factory=Turns)
    retainer: Retainer = field(default_factory=Retainer)
    checksums: Checksums = field(default_factory=Checksums)
    puts: WeakValueDictionary[bytes, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """By store key: one put of a key at a time."""
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large manifest is parsed: for that moment it takes up to 13 times its bytes."""
    num_requests: int = 0
    stopping: bool = False

    async def wait(self, operation: Awaitable[Result]) -> Result:
        """An operation of the store, with its deadline."""
        try:
            async with asyncio.timeout(self.settings.store_timeout_s):
                return await operation
        except TimeoutError:
            raise StoreError(
                f"the store took longer than {self.settings.store_timeout_s} s"
            ) from None

    def is_alone(self, tenant: Tenant) -> bool:
        """Whether nobody else has a request in progress."""
        return self.num_requests <= self.requests.held(tenant.name)

    async def held_bytes(self, tenant: Tenant) -> int:
        """What a tenant's objects and manifests take of its quota."""
        names_bytes = await self.wait(self.names.size_bytes(tenant.name))
        return names_bytes + self.store.usage(tenant.prefix).size_bytes


NODE = web.AppKey("node", Node)
TENANT = web.RequestKey("tenant", Tenant)
CLIENT = web.RequestKey("client", str)


def client_of(request: web.Request) -> str:
    """Who shares a tenant's egress: told in a header, else the peer's address."""
    told = request.headers.get("Kdn-Client")
    if told is None:
        return request.remote or "unknown"
    if not _CLIENT.fullmatch(told):
        raise bad_request("Kdn-Client: expected 1 to 64 letters, digits, '.', '_', '-'")
    return told


def parse_hex(what: str, text: object, max_bytes: int = MAX_KEY_BYTES) -> bytes:
    if not isinstance(text, str) or len(text) > 2 * max_bytes or not _HEX.fullmatch(text):
        raise bad_request(f"{what}: expected 1 to {max_bytes} bytes in lower-case hex")
    return bytes.fromhex(text)


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


async def close_iterator(entries: AsyncIterator[object]) -> None:
    """A listing that is left early is closed at once, not when the collector finds it."""
    if (close := getattr(entries, "aclose", None)) is not None:
        await close()
