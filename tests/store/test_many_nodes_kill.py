"""Nodes as processes, killed and stopped under the load of many clients: only time tells of it.

The nodes keep nothing but RAM, over one Redis.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from random import Random

from kdn.bench.node_servers import Server, start_kdn
from kdn.bench.servers import RedisServer
from kdn.places.names import NodeNames
from kdn.store.base import Store
from kdn.store.many_nodes import ManyNodes, node_store, open_nodes
from kdn.store.member import LONGEST_HEDGE_S
from kdn.store.node_client import HttpLimits, NodeClient
from kdn.store.streaming import Ask, Collected
from tests.node.harness import key_of, run
from tests.servers import emptied
from tests.store.contract import content, etag_of, put

CLIENTS = 25
OBJECTS = 40
SIZE = 60_000
BUSY_S = 6.0
"""What all clients and 4 processes on a busy machine may add: hangs are looked for, of 10 s."""


@asynccontextmanager
async def nodes_over(redis: RedisServer, folder: Path) -> AsyncIterator[list[Server]]:
    settings = {"store": redis.url, "disk_bytes": 0, "log_level": "warning"}
    with ExitStack() as stack:
        starting = [start_kdn(folder / str(i), settings) for i in range(3)]
        yield await asyncio.gather(
            *(asyncio.to_thread(stack.enter_context, one) for one in starting)
        )


def data_of(number: int) -> bytes:
    return content(f"object {number}", SIZE)


ETAGS = [etag_of(data_of(i)) for i in range(OBJECTS)]


class Client:
    """Looks up, reads, puts and changes a name until it is told to stop; whatever is wrong is
    raised."""

    def __init__(self, number: int, nodes: NodeClient | ManyNodes, known: dict[int, bytes]) -> None:
        self._number, self._store, self._known = number, node_store(nodes), known
        self._names = NodeNames(nodes)
        self._rng = Random(number)
        self.calls = 0
        self.longest_s = 0.0
        self.put_numbers: list[int] = []
        self.versions = 0

    async def work(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for step in (self._look_up, self._read, self._put, self._change):
                began_s = time.monotonic()
                await step()
                self.calls += 1
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    async def _look_up(self) -> None:
        numbers = self._rng.sample(range(OBJECTS + 5), 16)
        found = await self._store.lookup([key_of(i) for i in numbers], head_bytes=20)
        for i, entry in zip(numbers, found, strict=True):
            head = self._known[i][:20] if i in self._known else None
            assert (entry and entry.head) == head

    async def _read(self) -> None:
        numbers = self._rng.sample(range(OBJECTS), 8)
        starts = [self._rng.randrange(SIZE // 2) for _ in numbers]
        asks = [
            Ask(key_of(i), start, SIZE, ETAGS[i]) for i, start in zip(numbers, starts, strict=True)
        ]
        found = Collected(len(asks))
        await self._store.read_into(asks, found)
        for i, start, data in zip(numbers, starts, found.found, strict=True):
            assert data == self._known[i][start:]

    async def _put(self) -> None:
        number = 1000 * (self._number + 1) + len(self.put_numbers)
        data = content(f"{number}", 1000)
        assert (await put(self._store, key_of(number), data)).etag == etag_of(data)
        self.put_numbers.append(number)

    async def _change(self) -> None:
        """Whoever lost an answer must know all the same what became of it."""
        name = f"client-{self._number}"
        found = await self._names.get(name)
        assert (found.version if found else 0) == self.versions, "changed once for each change"
        manifest = {"version": self.versions + 1}
        assert await self._names.put(name, manifest, found.etag if found else None)
        self.versions += 1


async def under_load(clients: list[Client], nodes: list[Server]) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.work(stop))
        await asyncio.sleep(1.0)
        nodes[0].process.send_signal(signal.SIGKILL)
        await asyncio.sleep(1.0)
        nodes[1].process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.0)
        nodes[1].process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        stop.set()


async def check_puts(store: Store, clients: list[Client]) -> int:
    numbers = [number for client in clients for number in client.put_numbers]
    found = await store.lookup([key_of(number) for number in numbers], head_bytes=1000)
    for number, entry in zip(numbers, found, strict=True):
        assert entry is not None, "acknowledged, and lost"
        assert entry.head == content(f"{number}", 1000)
    return len(numbers)


def test_no_request_fails_when_one_node_is_killed_and_another_hangs(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    emptied(redis_server)
    known = {i: data_of(i) for i in range(OBJECTS)}

    async def work() -> None:
        async with nodes_over(redis_server, tmp_path) as nodes:
            urls, limits = ",".join(node.url for node in nodes), HttpLimits(connections=4)
            opened = [open_nodes(urls, limits=limits) for _ in range(CLIENTS)]
            clients = [Client(i, one, known) for i, one in enumerate(opened)]
            store = node_store(opened[0])
            try:
                for i, data in known.items():
                    await put(store, key_of(i), data)
                await under_load(clients, nodes)
                assert await check_puts(store, clients) >= CLIENTS
            finally:
                for one in opened:
                    await one.close()
        assert min(client.versions for client in clients) >= 1
        assert max(client.longest_s for client in clients) < LONGEST_HEDGE_S + BUSY_S

    run(work(), deadline_s=60.0)
