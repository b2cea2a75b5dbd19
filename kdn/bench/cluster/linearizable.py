"""Clients in several regions read and write names while links are cut and nodes killed.

All operations are recorded and checked (`history.py`). Everything is real: nodes are processes, the
links between regions and centre are TCP proxies, clients speak the protocol and remember what they
have seen, as `places/names.py` does. `run` is for `kdn bench cluster` and for tests.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kdn.bench.cluster.history import (
    DEFAULT,
    LATEST,
    WRITE,
    Operation,
    Violation,
    ages,
    check,
    check_kept,
)
from kdn.bench.cluster.link import Link
from kdn.bench.cluster.processes import REGION, NodeProcess
from kdn.depot.names import MAX_VERSIONS
from kdn.errors import KdnError
from kdn.store.http_answers import Reply
from kdn.store.node_client import HttpLimits, NodeClient

LIMITS = HttpLimits(connect_s=2.0, silence_s=4.0, deadline_s=4.0)
NODE = {"memory_bytes": 1 << 20, "disk_bytes": 1 << 24, "shutdown_timeout_s": 2}
SLACK_S = 0.05
"""Clocks of one machine, and the time that an answer takes to its client."""
MOVES = 0.1
"""Operations after which a client goes to another region."""
CALM_S = 20.0


@dataclass(frozen=True)
class Plan:
    """What happens. Faults come at random times, `faults` of them in all; each lasts up to
    `fault_s`."""

    operations: int = 10_000
    clients: int = 8
    regions: int = 3
    names: int = 6
    faults: int = 40
    fault_s: float = 2.0
    kinds: tuple[str, ...] = ("cut", "hold", "kill region", "kill centre")
    max_stale_s: float = 2.0
    upstream_timeout_s: float = 1.0
    rate_per_s: float = 400.0
    """Of operations by all clients together, at most."""
    seed: int = 0
    bugs: tuple[str, ...] = ()
    """Planted in the regions (`region_process.py`)."""


@dataclass
class Report:
    operations: list[Operation]
    violations: list[Violation]
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def stale_force_latest(self) -> int:
        return sum(one.rule == "latest" for one in self.violations)

    @property
    def acknowledged_lost(self) -> int:
        return sum(one.rule == "lost" for one in self.violations)

    @property
    def ages_s(self) -> list[float]:
        """Of default reads, in order."""
        names = {one.name for one in self.operations}
        each = (ages([one for one in self.operations if one.name == name]) for name in names)
        return sorted(age_s for some in each for _, age_s in some)

    @property
    def counts(self) -> dict[str, int]:
        """How many operations of each kind were answered, and how many were not."""
        done = Counter(one.kind for one in self.operations if one.done)
        failed = Counter(f"{one.kind} failed" for one in self.operations if not one.done)
        return {**done, **failed}


@dataclass
class World:
    centre: NodeProcess
    regions: list[NodeProcess]
    links: list[Link]


@asynccontextmanager
async def world(folder: Path, plan: Plan) -> AsyncIterator[World]:
    """A centre, regions, and a link from each region to it."""
    async with AsyncExitStack() as stack:
        centre = NodeProcess(folder / "centre", NODE)
        stack.callback(centre.kill)
        links, regions = [], []
        for number in range(plan.regions):
            link = await stack.enter_async_context(Link.to("127.0.0.1", centre.port))
            settings = {
                **NODE, "upstream": link.url, "max_stale_s": plan.max_stale_s,
                "upstream_timeout_s": plan.upstream_timeout_s,
            }  # fmt: skip
            node = NodeProcess(folder / f"region{number}", settings, (*REGION, *plan.bugs))
            stack.callback(node.kill)
            links.append(link)
            regions.append(node)
        await asyncio.gather(*(node.start() for node in (centre, *regions)))
        yield World(centre, regions, links)


class Client:
    """One after the other, an operation at a time; moves between regions with what it has seen."""

    def __init__(self, number: int, urls: Sequence[str], rng: random.Random) -> None:
        self._number, self._rng = number, rng
        self._nodes = [NodeClient(url, client=f"c{number}", limits=LIMITS) for url in urls]
        self._at = number % len(urls)
        self._seen = 0
        self._written = 0
        self.operations: list[Operation] = []

    async def step(self, name: str) -> None:
        if self._rng.random() < MOVES:
            self._at = self._rng.randrange(len(self._nodes))
        kind = self._rng.choices((WRITE, LATEST, DEFAULT), (3, 3, 4))[0]
        if kind != WRITE:
            await self.read(name, kind == LATEST)
            return
        newest = await self.read(name, True)
        if newest is not None and newest.done:
            await self.write(name, newest.etag)

    async def read(self, name: str, latest: bool) -> Operation | None:
        headers = {"Kdn-Seen": str(self._seen)} | ({"Kdn-Latest": "true"} if latest else {})
        began_s, told = time.monotonic(), Operation(0, 0, "", name, 0, 0, False)
        with suppress(KdnError):
            reply = await self._ask("GET", name, None, headers, (200, 404))
            told = _told(name, reply)
        return self._record(LATEST if latest else DEFAULT, told, began_s)

    async def write(self, name: str, after: str | None) -> None:
        self._written += 1
        value = f"{self._number}:{self._written}"
        condition = {"If-None-Match": "*"} if after is None else {"If-Match": f'"{after}"'}
        began_s = time.monotonic()
        told = Operation(0, 0, "", name, 0, 0, False, value=value)
        with suppress(KdnError):
            body = json.dumps({"value": value}).encode()
            reply = await self._ask("PUT", name, body, condition, (200, 201, 412))
            # 412 may be the answer to our own request, sent twice over a connection that broke.
            if reply.status != 412:
                version, etag = reply.json["version"], reply.json["etag"]
                told = Operation(0, 0, "", name, 0, 0, True, version, value, etag)
        self._record(WRITE, told, began_s)

    async def _ask(
        self, method: str, name: str, body: bytes | None, headers: dict[str, str],
        expect: tuple[int, ...],
    ) -> Reply:  # fmt: skip
        node = self._nodes[self._at]
        reply = await node.ask(method, f"/v1/names/{name}", body, headers=headers, expect=expect)
        self._seen = max(self._seen, int(reply.headers["Kdn-Sequence"]))
        return reply

    def _record(self, kind: str, told: Operation, began_s: float) -> Operation:
        one = Operation(
            self._number, self._at, kind, told.name, began_s, time.monotonic(), told.done,
            told.version, told.value, told.etag,
        )  # fmt: skip
        self.operations.append(one)
        return one

    async def close(self) -> None:
        for node in self._nodes:
            await node.close()


def _told(name: str, reply: Reply) -> Operation:
    if reply.status == 404:
        return Operation(0, 0, "", name, 0, 0, True)
    version, etag = int(reply.headers["Kdn-Version"]), reply.headers["ETag"].strip('"')
    return Operation(0, 0, "", name, 0, 0, True, version, reply.json["value"], etag)


class Trouble:
    """Faults at random times; at the end all is whole again."""

    def __init__(self, world: World, plan: Plan, rng: random.Random) -> None:
        self._world, self._plan, self._rng = world, plan, rng
        self.counts: Counter[str] = Counter()

    async def make(self, every_s: float) -> None:
        for number in range(self._plan.faults):
            await asyncio.sleep(every_s * self._rng.uniform(0.5, 1.5))
            kind = self._plan.kinds[number % len(self._plan.kinds)]
            self.counts[kind] += 1
            await self._one(kind, self._rng.uniform(0.2, 1.0) * self._plan.fault_s)

    async def _one(self, kind: str, lasts_s: float) -> None:
        at = self._rng.randrange(len(self._world.links))
        link = self._world.links[at]
        if kind in ("cut", "hold"):
            (link.cut if kind == "cut" else link.hold)()
            await asyncio.sleep(lasts_s)
            link.mend()
            return
        node = self._world.centre if kind == "kill centre" else self._world.regions[at]
        node.kill()
        await asyncio.sleep(self._rng.uniform(0, 0.2) * lasts_s)
        await node.start()


async def run(folder: Path, plan: Plan) -> Report:
    """Carry it out, in a folder of its own, and check what came of it."""
    rng = random.Random(plan.seed)
    began_s = time.monotonic()
    async with world(folder, plan) as made:
        urls = [node.url for node in made.regions]
        clients = [
            Client(number, urls, random.Random(rng.random())) for number in range(plan.clients)
        ]
        trouble = Trouble(made, plan, rng)
        expected_s = plan.operations / plan.rate_per_s
        task = asyncio.create_task(trouble.make(expected_s / (plan.faults + 1)))
        try:
            await asyncio.gather(*(_drive(client, plan, task) for client in clients))
            await task
            await _read_all(clients, plan)
            kept = await _history(made.centre.url, plan)
        finally:
            task.cancel()
            for client in clients:
                await client.close()
    operations = [one for client in clients for one in client.operations]
    violations = check(operations, plan.max_stale_s + SLACK_S)
    violations += check_kept(operations, kept, MAX_VERSIONS)
    return Report(operations, violations, trouble.counts, time.monotonic() - began_s)


async def _drive(client: Client, plan: Plan, trouble: asyncio.Task[None]) -> None:
    """Its share of the operations; more as long as there is trouble."""
    rng = random.Random(f"{plan.seed} {client._number}")
    pause_s = plan.clients / plan.rate_per_s
    while len(client.operations) < plan.operations / plan.clients or not trouble.done():
        began_s = time.monotonic()
        await client.step(f"name{rng.randrange(plan.names)}")
        await asyncio.sleep(max(0.0, began_s + pause_s - time.monotonic()))


async def _read_all(clients: Sequence[Client], plan: Plan) -> None:
    """Everything is whole again: everybody must be told the latest."""
    async with asyncio.timeout(CALM_S):
        for client in clients[: plan.regions]:
            for name in range(plan.names):
                while True:
                    told = await client.read(f"name{name}", True)
                    if told is not None and told.done:
                        break
                    await asyncio.sleep(0.1)


async def _history(url: str, plan: Plan) -> dict[str, dict[int, str]]:
    node, kept = NodeClient(url, limits=LIMITS), {}
    try:
        for name in (f"name{number}" for number in range(plan.names)):
            reply = await node.ask("GET", f"/v1/names/{name}/history", expect=(200, 404))
            told = reply.json.get("versions", [])
            kept[name] = {one["version"]: one["etag"] for one in told}
    finally:
        await node.close()
    return kept
