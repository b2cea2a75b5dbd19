"""Several nodes over one store, each behind a gate that can be shut, hang or be slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kdn.bench.listener import Listener
from kdn.store.base import Store
from kdn.store.evict import open_policy
from kdn.store.many_nodes import ManyNodesStore, node_store, open_nodes
from kdn.store.memory import MemoryStore
from kdn.store.node_client import HttpLimits
from kdn.store.part import PartStore
from tests.node.harness import Running, config_for, running

QUICK = HttpLimits(connect_s=2.0, silence_s=5.0, deadline_s=20.0, hedge_s=0.2, resolve_s=0.2)


class Gate:
    """Passes bytes on, or does not."""

    def __init__(self, target: int, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host, self.port = host, port
        self.requests = 0
        """Times that bytes came from a client."""
        self.questions = 0
        """Lookups and reads that came, answered or not."""
        self.cut_after_bytes: int | None = None
        """So many bytes of an answer, and then the connection ends, once."""
        self.delay_s = 0.0
        self._flows = asyncio.Event()
        self._flows.set()
        self._target = target
        self._listener: Listener | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self._writers)

    async def open(self) -> None:
        self._is_open = True
        self._listener = Listener(self._serve, self.host, self.port)
        self.port = self._listener.port

    def shut(self) -> None:
        """As if the process were killed: connections end, and nobody listens."""
        self._is_open = False
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """Nothing of it is left."""
        self.shut()
        await asyncio.sleep(0)  # connections that were being accepted
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hang(self, hangs: bool = True) -> None:
        """As if the process were stopped: the system still takes connections and bytes."""
        (self._flows.clear if hangs else self._flows.set)()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ends = [writer]
        try:
            if self._is_open:
                source, target = await asyncio.open_connection("127.0.0.1", self._target)
                ends.append(target)
                self._writers.update(ends)
                if self._is_open:
                    await asyncio.gather(
                        self._carry(reader, target, is_answer=False),
                        self._carry(source, writer, is_answer=True),
                        return_exceptions=True,
                    )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers.difference_update(ends)
            for end in ends:
                end.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.requests += not is_answer
                self.questions += not is_answer and data.startswith(b"POST ")
                await self._flows.wait()
                if is_answer and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if is_answer and self.cut_after_bytes is not None:
                    data = data[: self.cut_after_bytes]
                    self.cut_after_bytes -= len(data)
                writer.write(data)
                await writer.drain()
                if is_answer and self.cut_after_bytes == 0:
                    self.cut_after_bytes = None
                    break
        finally:
            writer.close()


@dataclass
class Cluster:
    memory: MemoryStore
    """What the nodes share."""
    nodes: list[Running]
    gates: list[Gate]

    @property
    def urls(self) -> str:
        return ",".join(gate.url for gate in self.gates)

    @asynccontextmanager
    async def store(
        self, urls: str = "", collection: str = "objects", limits: HttpLimits = QUICK
    ) -> AsyncIterator[ManyNodesStore]:
        store = node_store(open_nodes(urls or self.urls, limits=limits), collection)
        assert isinstance(store, ManyNodesStore)
        try:
            yield store
        finally:
            await store.close()


@asynccontextmanager
async def cluster(
    folder: Path, number: int, *, hosts: list[str] | None = None, store: Store | None = None
) -> AsyncIterator[Cluster]:
    """`hosts`: where gates listen, all at one port."""
    memory = MemoryStore(2**28, open_policy("lru"))
    gates: list[Gate] = []
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(
                running(config_for(folder), PartStore(store or memory, b""))
            )
            for _ in range(number)
        ]
        for place, node in enumerate(nodes):
            port = gates[0].port if gates and hosts else 0
            host = hosts[place] if hosts else "127.0.0.1"
            gates.append(Gate(node.listening.port, host, port))
            await gates[-1].open()
            stack.push_async_callback(gates[-1].close)
        yield Cluster(memory, nodes, gates)
