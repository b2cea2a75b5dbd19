"""A real node on a real socket for each test, and chunks to put into it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import uvloop
import xxhash

from kdn.cache.keys import PUBLIC_SEAL_KEY
from kdn.codec.format import CodecId, DType, Section, StreamInfo, write
from kdn.config import ClientSettings, Config, NodeSettings, TenantSettings
from kdn.depot.depot import Depot
from kdn.depot.sqlite_names import SqliteNames
from kdn.depot.tenants import tenants_of
from kdn.node.server import Listening, listen, make_node
from kdn.node.tenants import token_hash
from kdn.store.base import Store
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore

T = TypeVar("T")
DEADLINE_S = 60.0


def run(work: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
    """On the event loop that a node uses, and never for ever."""

    async def bounded() -> T:
        async with asyncio.timeout(deadline_s):
            return await work

    return uvloop.run(bounded())


def chunk_stream(key: bytes, size_bytes: int = 5000, seed: int = 0, levels: int = 3) -> bytes:
    """A valid bitstream under `key`; its payload means nothing."""
    info = StreamInfo(
        codec=CodecId.KLT, dtype=DType.FLOAT16, chunk_key=key, model=b"m" * 16,
        profile=b"p" * 16, start=0, num_tokens=16, num_layers=2, num_kv_heads=1, head_dim=4,
        num_levels=levels, valid_from=(0, 0),
    )  # fmt: skip
    data = np.random.default_rng(seed).bytes(size_bytes)
    step = -(-size_bytes // levels)
    sections = [Section(i, 0, 0, data[i * step : (i + 1) * step]) for i in range(levels)]
    return write(info, sections, PUBLIC_SEAL_KEY)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def checksum(data: bytes | memoryview) -> str:
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def tenant(name: str, token: str, kind: str = "tokens", **settings: Any) -> TenantSettings:
    return TenantSettings(name, **{kind: (token_hash(token),)}, **settings)


def config_for(folder: Path, *tenants: TenantSettings, **settings: Any) -> Config:
    node = replace(NodeSettings(port=0, data=folder, shutdown_timeout_s=5.0), **settings)
    return Config(node, ClientSettings(), tenants, {})


@dataclass
class Running:
    """A node that runs, and a client session to it."""

    listening: Listening
    session: aiohttp.ClientSession

    @property
    def node(self) -> Any:
        return self.listening.node

    @property
    def url(self) -> str:
        return self.listening.url

    async def ask(
        self, method: str, path: str, data: bytes | None = None, token: str | None = None,
        **headers: str,
    ) -> tuple[int, Mapping[str, str], bytes]:  # fmt: skip
        """(status, headers, body); `Kdn_Checksum="..."` is the header Kdn-Checksum."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        body = None if data is None else BytesIO(data)  # aiohttp warns of large bytes
        async with self.session.request(method, self.url + path, data=body, headers=sent) as answer:
            return answer.status, answer.headers, await answer.read()

    async def put_chunk(
        self, number: int, size_bytes: int = 5000, token: str | None = None, **headers: str
    ) -> bytes:
        stream = chunk_stream(key_of(number), size_bytes, seed=number)
        status, _, body = await self.ask(
            "PUT", f"/v1/chunks/{key_of(number).hex()}", stream, token,
            Kdn_Checksum=checksum(stream), **headers,
        )  # fmt: skip
        assert status == 201, body
        return stream


@asynccontextmanager
async def running(config: Config, store: Store | None = None) -> AsyncIterator[Running]:
    store = store or MemoryStore(2**28, open_policy("lru"))
    config.node.data.mkdir(parents=True, exist_ok=True)
    names = SqliteNames(config.node.data / "names.sqlite")
    depot = Depot(store, names, tenants_of(config.tenants), config.node.store_timeout_s)
    try:
        async with (
            listen(config, make_node(config, depot)) as listening,
            aiohttp.ClientSession(auto_decompress=False) as session,
        ):
            yield Running(listening, session)
    finally:
        await store.close()
        await names.close()


def with_node(
    folder: Path,
    test: Callable[[Running], Coroutine[Any, Any, T]],
    *tenants: TenantSettings,
    store: Callable[[], Store] | None = None,
    **settings: Any,
) -> T:
    """Run `test` against a node of its own."""

    async def work() -> T:
        async with running(config_for(folder, *tenants, **settings), store and store()) as node:
            return await test(node)

    return run(work())


async def connect(node: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", node.listening.port)


async def closed(reader: asyncio.StreamReader, within_s: float) -> bytes:
    """What still came before the node closed the connection."""
    async with asyncio.timeout(within_s):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def request(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def requests_of(node: Running) -> dict[tuple[str, str], int]:
    """How many requests a node has answered, by method and route."""
    [metric] = node.node.stats.requests_s.collect()
    counts: Counter[tuple[str, str]] = Counter()
    for one in metric.samples:
        if one.name == "kdn_request_seconds_count":
            counts[one.labels["method"], one.labels["route"]] += int(one.value)
    return dict(counts)


async def settled(node: Running) -> dict[tuple[str, str], int]:
    """The same, when it has counted everything: it counts an answer after it was sent."""
    while node.node.num_requests:
        await asyncio.sleep(0.01)
    return requests_of(node)


async def read_answer(reader: asyncio.StreamReader, is_head: bool = False) -> bytes:
    """The next answer of a raw connection, head and body."""
    async with asyncio.timeout(10):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 100 Continue" in head:
                head += await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            return error.partial
        length = re.search(rb"Content-Length: (\d+)", head)
        if length is None or is_head or b" 304 " in head:
            return head
        return head + await reader.readexactly(int(length[1]))
