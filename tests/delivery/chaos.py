"""A real node behind bad networks: connections that are cut, stall and flip bits, a node that is
killed and started again, chunks published anew with other bytes, addresses that change."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random

from xxhash import xxh3_64_intdigest

from kdn.bench.listener import Listener
from kdn.codec.header import Header
from kdn.depot.depot import Depot
from kdn.depot.sqlite_names import SqliteNames
from kdn.depot.tenants import tenants_of
from kdn.node.server import Listening, listen, make_node
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.delivery.world import World
from tests.node.harness import config_for

PIECE_BYTES = 2048
FAULTS = ("none", "none", "none", "cut", "cut", "stall", "flip")


class FragileNode:
    """A node that can be killed; its store survives, its port does not."""

    def __init__(self, folder: Path) -> None:
        self._store = MemoryStore(2**28, open_policy("lru"))
        self._config = config_for(folder, shutdown_timeout_s=0.2)
        self._names = SqliteNames(folder / "names.sqlite")
        self._running: AsyncExitStack | None = None
        self.listening: Listening | None = None

    async def start(self) -> None:
        self._running = AsyncExitStack()
        depot = Depot(self._store, self._names, tenants_of(()), 60.0)
        node = make_node(self._config, depot)
        [self._tenant] = node.tenants
        self.listening = await self._running.enter_async_context(listen(self._config, node))

    async def kill(self) -> None:
        """Every connection breaks at once."""
        if self._running is None or self.listening is None:
            return
        running, listening = self._running, self.listening
        self._running = self.listening = None
        listening.connections.abort_all()
        await running.aclose()

    async def put(self, stream: bytes) -> None:
        """Behind the node's back, as another node of the same store would."""
        header = Header.parse(stream)
        await self._store.put(
            self._tenant.store_key("chunks", header.info.chunk_key), stream,
            etag=header.stream_id, checksum=xxh3_64_intdigest(stream),
        )  # fmt: skip

    async def delete(self, key: bytes) -> None:
        await self._store.delete(self._tenant.store_key("chunks", key))

    async def close(self) -> None:
        await self.kill()
        await self._names.close()


class Gateway:
    """Passes bytes on to the node, badly: one fault, or none, for each connection."""

    def __init__(self, node: FragileNode, rng: Random, stall_s: float, seen: Counter[str]) -> None:
        self._node, self._rng, self._stall_s, self._seen = node, rng, stall_s, seen
        self._listener: Listener | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._port = 0  # any, the first time

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def open(self) -> None:
        self._listener = Listener(self._accept, "127.0.0.1", self._port)
        self._port = self._listener.port

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def restart(self, after_s: float) -> None:
        """All its connections break, and nobody answers for a while."""
        await self.close()
        await asyncio.sleep(after_s)
        await self.open()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self._node.listening is not None:
                port = self._node.listening.port
                source, upstream = await asyncio.open_connection("127.0.0.1", port)
                await self._carry(reader, writer, source, upstream)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            for end in (writer, upstream):
                if end is not None:
                    end.transport.abort()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> None:
        """Until one side ends, or the fault ends both."""
        ways = [
            asyncio.create_task(self._requests(reader, upstream)),
            asyncio.create_task(self._answers(source, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Slowly enough that things happen in the middle, and with the connection's own fault."""
        rng = self._rng
        fault, at = rng.choice(FAULTS), int(10 ** rng.uniform(1.5, 5.3))
        rate = 10 ** rng.uniform(5.3, 6.7)
        sent = 0
        while data := await reader.read(PIECE_BYTES):
            if sent <= at < sent + len(data) and fault != "none":
                self._seen[fault] += 1
                if fault == "cut":
                    writer.write(data[: at - sent])
                    with suppress(OSError):
                        await writer.drain()
                    return
                if fault == "stall":
                    await asyncio.sleep(self._stall_s)
                if fault == "flip":
                    spoilt = bytearray(data)
                    spoilt[at - sent] ^= 1 << rng.randrange(8)
                    data = bytes(spoilt)
            sent += len(data)
            await asyncio.sleep(len(data) / rate)
            writer.write(data)
            await writer.drain()


async def make_trouble(
    node: FragileNode, gateways: list[Gateway], world: World, rng: Random, seen: Counter[str]
) -> None:
    """One thing after another, until cancelled."""
    while True:
        await asyncio.sleep(rng.uniform(0.02, 0.25))
        what = rng.choice(("kill", "republish", "republish", "restart", "delete"))
        seen[what] += 1
        if what == "kill":
            await node.kill()
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            await node.start()
        elif what == "restart":
            await rng.choice(gateways).restart(rng.uniform(0.0, 0.1))
        else:
            number = rng.randrange(len(world.chunks))
            await node.delete(world.chunks[number].key)
            if what == "delete":
                await asyncio.sleep(rng.uniform(0.0, 0.05))
            await node.put(rng.choice((world.streams, world.others))[number])
