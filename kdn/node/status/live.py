"""A node's status while it runs: samples of the last minutes, and a snapshot when somebody asks.

Whoever listens gets a snapshot every second. All listeners share it, and it is made only while
there are any.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from kdn.background import supervise
from kdn.depot.tenants import Tenant
from kdn.node.answers import RETRY_AFTER, Refusal
from kdn.node.state import Node
from kdn.node.status.census import Census
from kdn.node.status.counts import merged, process_counts
from kdn.node.status.history import STEP_S, History, sample_of
from kdn.node.status.known import Known
from kdn.node.status.problems import problems_of
from kdn.node.status.snapshot import Snapshot
from kdn.node.status.traffic import Json

EVERY_S = 1.0
MAX_LISTENERS = 16
GIVE_UP_S = 15.0
STOPPING_S = 0.25
"""Between two looks at whether the node is stopping."""


class Status:
    def __init__(self, node: Node):
        self._node = node
        self._started_s = time.time()
        self._history = History()
        self._census = Census(node.depot.store.own)
        self._known = Known(node.depot)
        self._listeners = 0
        self._making: asyncio.Task[None] | None = None
        self._made = asyncio.Condition()
        self._latest: tuple[int, Json] = (0, {})

    async def snapshot(self, history: bool = True) -> Json:
        snapshot, answering = await self._look()
        told = await snapshot.told(self._started_s, answering)
        found = problems_of(told, self._history.recent_errors(snapshot.now))
        worst = found[0].severity if found else "ok"
        told["health"] = {"status": worst, "problems": [one._asdict() for one in found]}
        return {**told, "history": self._history.told()} if history else told

    async def tenant(self, tenant: Tenant) -> Json:
        snapshot, _ = await self._look()
        return snapshot.tenant(tenant, models=True)

    async def tenants(self, some: list[Tenant]) -> list[Json]:
        snapshot, _ = await self._look()
        return [snapshot.tenant(one) for one in some]

    async def _look(self) -> tuple[Snapshot, int]:
        """And how many workers there are to be seen."""
        self._census.begin()
        await self._known.refresh()
        counts, answering = await self._counts(with_tiers=True)
        snapshot = Snapshot(
            self._node, counts, sample_of(counts, time.monotonic()),
            history=self._history, census=self._census, known=self._known,
        )  # fmt: skip
        return snapshot, answering

    async def _counts(self, with_tiers: bool) -> tuple[Json, int]:
        own = await process_counts(self._node, with_tiers)
        if self._node.workers_counts is None:
            return own, 1
        others = await self._node.workers_counts(with_tiers)
        return merged([own, *others]), len(others)

    # samples

    async def run(self) -> None:
        """Until it is cancelled."""
        await supervise("sampling the status", self._sample)

    async def _sample(self) -> None:
        while True:
            counts, _ = await self._counts(with_tiers=False)
            self._history.add(counts, time.monotonic())
            await asyncio.sleep(STEP_S)

    async def close(self) -> None:
        await self._census.close()

    # listeners

    @contextmanager
    def listener(self) -> Iterator[None]:
        if self._listeners >= MAX_LISTENERS:
            raise Refusal(503, "overloaded", "too many listen already", RETRY_AFTER)
        self._listeners += 1
        if self._making is None:
            self._making = asyncio.create_task(supervise("making snapshots", self._make))
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._making.cancel()
                self._making = None

    @property
    def number(self) -> int:
        """Of the latest snapshot that was made for listeners."""
        return self._latest[0]

    async def next(self, after: int) -> tuple[int, Json] | None:
        """The first snapshot beyond that number; None when the node stops, or cannot make one."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + GIVE_UP_S
        while not self._node.stopping and loop.time() < give_up_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOPPING_S), self._made:
                    await self._made.wait_for(lambda: self._latest[0] > after)
                    return self._latest
        return None

    async def _make(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            made = await self.snapshot(history=False)
            async with self._made:
                self._latest = self._latest[0] + 1, made
                self._made.notify_all()
            await asyncio.sleep(max(0.1, began_s + EVERY_S - loop.time()))


@asynccontextmanager
async def telling_status(node: Node) -> AsyncIterator[None]:
    """While a node listens; not in a worker, whose owner tells the status of all."""
    if node.relay is not None:
        yield
        return
    status = node.status = Status(node)
    sampling = asyncio.create_task(status.run())
    try:
        yield
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])
        await status.close()
