"""A node, a fetcher, and a man in the middle of the two: whatever happens to a fetcher's
connections, the delivery itself still reaches the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from kdn.bench.listener import Listener
from kdn.delivery.client import deliver
from kdn.delivery.estimate import Estimator, Gauge
from kdn.delivery.fetch_messages import Hello
from kdn.delivery.fetcher import Fetcher
from kdn.delivery.plan import Link
from kdn.delivery.request import Result
from kdn.store.base import NodeAt
from kdn.store.http import HttpStore
from kdn.store.node_client import NodeClient
from kdn.store.streaming import Ask, Receiver
from tests.delivery.world import World, put_stream
from tests.node.harness import config_for, running, tenant

FAST = Link(rate=1e9, low_rate=1e9, latency_s=0.001)
ARENA_BYTES = 1 << 30
TOKEN = "only-for-tests-0123456789"
Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Watched(HttpStore):
    """Notes what is read without a fetcher, and sends the fetcher elsewhere."""

    def __init__(self, node: NodeClient) -> None:
        super().__init__(node, collection="chunks")
        self.asked: list[Ask] = []
        self.fetch_from: NodeAt | None = None

    async def read_into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        self.asked += asks
        await super().read_into(asks, receiver)

    async def nodes_of(self, keys: Sequence[bytes]) -> Sequence[tuple[NodeAt, Sequence[int]]]:
        if self.fetch_from is None:
            return await super().nodes_of(keys)
        return [(self.fetch_from, range(len(keys)))]


class Setup:
    def __init__(self, world: World, store: Watched, fetcher: Fetcher) -> None:
        self.world, self.store, self.fetcher = world, store, fetcher

    async def ready(self) -> None:
        async with asyncio.timeout(30.0):
            while not self.fetcher.is_ready():
                await asyncio.sleep(0.01)

    async def deliver(self, **options: Any) -> Result:
        """Checked: every chunk is its stream, or is left to the model."""
        gauge = Gauge(None, can_compute=False)
        for _ in range(3):
            gauge.decoded(256, self.world.codec.num_levels, 0.0001)
        named = {"deadline_s": 20.0, "enough_kld": self.world.expected_kld[-1], **options}
        result = await deliver(
            self.world.request(**named), [self.store], estimator=Estimator(FAST), gauge=gauge,
            fetcher=self.fetcher,
        )  # fmt: skip
        self.world.check(result)
        return result

    @asynccontextmanager
    async def between(self, handle: Handle) -> AsyncIterator[None]:
        """The fetcher meets this instead of the node."""
        serving: set[asyncio.Task[Any]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            serving.add(task)
            try:
                await handle(reader, writer)
            finally:
                serving.discard(task)
                writer.close()

        listener = Listener(serve, "127.0.0.1")
        self.store.fetch_from = NodeAt(f"http://127.0.0.1:{listener.port}")
        try:
            yield
        finally:
            self.store.fetch_from = None
            listener.close()
            ending = list(serving)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)


@asynccontextmanager
async def fetching(world: World, folder: Path, connections: int = 3) -> AsyncIterator[Setup]:
    """A node with the world's streams, for whoever has the token, and a fetcher that is ready."""
    async with running(config_for(folder, tenant("t", TOKEN))) as node:
        client = NodeClient(node.url, token=TOKEN)
        store = Watched(client)
        for stream in world.streams:
            await put_stream(store, stream)
        fetcher = Fetcher(Hello(connections, ARENA_BYTES, TOKEN, "tests"))
        try:
            setup = Setup(world, store, fetcher)
            await setup.ready()
            yield setup
        finally:
            await fetcher.close()
            await store.close()


def relay(node_url: str, change: Callable[[bytes, int], Awaitable[bytes]]) -> Handle:
    """Passes everything on; what the node answers as `change` makes it, which is given some bytes
    and how many came before them. None of them (b"") ends the connection."""
    host, port = node_url.removeprefix("http://").split(":")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_node = await asyncio.open_connection(host, int(port))

        async def ask() -> None:
            while data := await reader.read(1 << 16):
                to_node.write(data)

        asking, count = asyncio.create_task(ask()), 0
        try:
            with suppress(ConnectionError):
                while data := await there.read(1 << 14):
                    changed = await change(data, count)
                    if not changed:
                        break
                    writer.write(changed)
                    await writer.drain()
                    count += len(data)
        finally:
            asking.cancel()
            to_node.close()

    return handle
