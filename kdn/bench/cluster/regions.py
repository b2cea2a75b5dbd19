"""Part c: regions over long links. What crosses a link, how old answers are, and whether what was
asked for as the latest ever was not."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from kdn.bench.cluster import linearizable
from kdn.bench.cluster.crowd import BATCH, Buffers, Seen, percentile, read_prompt
from kdn.bench.cluster.items import SMALL_BYTES, Item, make_items, put_all
from kdn.bench.cluster.ledger import reason_of
from kdn.bench.cluster.long_link import LongLink, long_link
from kdn.bench.cluster.rows import Run
from kdn.bench.cluster.speed import opened
from kdn.bench.node_servers import Server, start_kdn
from kdn.errors import KdnError
from kdn.places.names import NodeNames
from kdn.store.http import HttpStore
from kdn.store.node_client import NodeClient

WRITE_S = 0.05
"""Between two versions of a name."""
READ_S = 0.005
EDGES_S = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Of the histogram: up to the first, up to the second, and so on, and beyond the last."""


@dataclass
class World:
    centre: Server
    links: Sequence[LongLink]
    regions: Sequence[Server]


@contextmanager
def world(run: Run, number: int) -> Iterator[World]:
    plan = run.plan
    with ExitStack() as stack:
        centre = stack.enter_context(start_kdn(run.folder("centre")))
        links = [
            stack.enter_context(long_link(centre.address, plan.link_bits_per_s, plan.link_delay_s))
            for _ in range(number)
        ]
        regions = [
            stack.enter_context(start_kdn(run.folder(f"region{at}"), {"upstream": link.url}))
            for at, link in enumerate(links)
        ]
        yield World(centre, links, regions)


async def measure_regions(run: Run) -> None:
    with world(run, 1) as one:
        await one_copy(run, one)
    with world(run, run.plan.regions) as several:
        await staleness(run, several)
    await force_latest(run)


# what crosses the link


async def one_copy(run: Run, one: World) -> None:
    """Many clients of a region read one document at once, that only the centre has."""
    number = run.plan.document_chunks
    items = list(islice(make_items(SMALL_BYTES, [run.seed, 7]), number))
    async with opened(HttpStore(NodeClient(one.centre.url), collection="chunks")) as home:
        await put_all(home, items)
    link, size_bytes = one.links[0], sum(item.size_bytes for item in items)
    before, began_s = link.down_bytes, time.monotonic()
    clients = [_reader(run, one.regions[0].url, items, at) for at in range(run.plan.clients)]
    seen = await asyncio.gather(*clients)
    crossed = link.down_bytes - before
    run.rows.add(
        "c", "one document", clients=run.plan.clients, document_bytes=size_bytes,
        link_bytes=crossed, long_link_copies=crossed / size_bytes,
        served_bytes=sum(one.num_bytes for one in seen),
        seconds=time.monotonic() - began_s,
        missing=sum(one.missing for one in seen), wrong_bytes=sum(one.wrong_bytes for one in seen),
    )  # fmt: skip


async def _reader(run: Run, url: str, items: Sequence[Item], number: int) -> Seen:
    seen, buffers = Seen(), Buffers(BATCH, SMALL_BYTES)
    client = NodeClient(url, client=f"reader-{number}")
    async with opened(HttpStore(client, collection="chunks")) as store:
        for first in range(0, len(items), BATCH):
            prompt = items[first : first + BATCH]
            await read_prompt(store, prompt, buffers, seen)
            for at, item in enumerate(prompt):
                seen.missing += buffers.sizes[at] != item.size_bytes
                is_whole = buffers.sizes[at] == item.size_bytes
                seen.wrong_bytes += is_whole and not item.is_whole(buffers.got(at))
    return seen


# how old answers are


@dataclass
class Versions:
    """When each version of a name was acknowledged, in order."""

    acknowledged_s: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def age_s(self, asked_s: float, version: int) -> float:
        """How long there had been a newer version when this one was asked for; 0 if there was
        none."""
        newer = bisect_right(self.versions, version)
        if newer >= len(self.versions):
            return 0.0
        return max(0.0, asked_s - self.acknowledged_s[newer])


async def staleness(run: Run, several: World) -> None:
    """Default reads in every region, while the centre writes."""
    written, stop = Versions(), asyncio.Event()
    writer = asyncio.create_task(_write(several.centre.url, written, stop))
    reads = [
        asyncio.create_task(_read(region.url, stop)) for region in several.regions for _ in range(4)
    ]
    await asyncio.sleep(run.plan.stale_s)
    stop.set()
    await writer
    found = await asyncio.gather(*reads)
    ages = [written.age_s(asked_s, version) for own, _ in found for asked_s, version in own]
    run.rows.add(
        "c", "staleness", reads=len(ages), versions=len(written.versions),
        errors=sum(len(errors) for _, errors in found), age_p50_s=percentile(ages, 50),
        age_p99_s=percentile(ages, 99), age_max_s=max(ages, default=0.0),
        not_monotonic=sum(_steps_back([version for _, version in own]) for own, _ in found),
        histogram=histogram(ages), reasons=sorted({one for _, own in found for one in own})[:5],
    )  # fmt: skip


async def _write(url: str, written: Versions, stop: asyncio.Event) -> None:
    node = NodeClient(url)
    names = NodeNames(node)
    try:
        number = 0
        while not stop.is_set():
            found = await names.get("bench")
            number += 1
            if await names.put("bench", {"number": number}, found.etag if found else None):
                written.acknowledged_s.append(time.monotonic())
                written.versions.append(found.version + 1 if found else 1)
            await asyncio.sleep(WRITE_S)
    finally:
        await node.close()


async def _read(url: str, stop: asyncio.Event) -> tuple[list[tuple[float, int]], list[str]]:
    """When each version was asked for, and what went wrong."""
    node = NodeClient(url)
    names = NodeNames(node)
    seen: list[tuple[float, int]] = []
    errors: list[str] = []
    try:
        while not stop.is_set():
            asked_s = time.monotonic()
            try:
                found = await names.get("bench")
                seen.append((asked_s, found.version if found else 0))
            except KdnError as error:
                errors.append(reason_of(error))
            await asyncio.sleep(READ_S)
    finally:
        await node.close()
    return seen, errors


def _steps_back(versions: Sequence[int]) -> int:
    return sum(after < before for before, after in pairwise(versions))


def histogram(ages_s: Sequence[float]) -> dict[str, int]:
    """How many answers were how old."""
    names = ["0 s", *(f"up to {edge:g} s" for edge in EDGES_S[1:]), f"over {EDGES_S[-1]:g} s"]
    counts: dict[str, Any] = dict.fromkeys(names, 0)
    for age_s in ages_s:
        at = next((at for at, edge in enumerate(EDGES_S) if age_s <= edge), len(EDGES_S))
        counts[names[at]] += 1
    return counts


# whether the latest was the latest


async def force_latest(run: Run) -> None:
    """Clients of three regions read and write names while links are cut and nodes killed; all they
    were told is checked (`history.py`)."""
    plan = run.plan
    told = await linearizable.run(
        run.folder("names"),
        linearizable.Plan(
            operations=plan.name_operations, clients=plan.name_clients, faults=plan.name_faults,
            seed=run.seed,
        ),
    )  # fmt: skip
    rules = Counter(one.rule for one in told.violations)
    run.rows.add(
        "c", "force_latest", operations=len(told.operations), seconds=told.seconds,
        stale_force_latest=told.stale_force_latest, not_monotonic=rules["monotonic"],
        too_old=rules["stale"], acknowledged_lost=told.acknowledged_lost,
        age_p50_s=percentile(told.ages_s, 50), age_p99_s=percentile(told.ages_s, 99),
        **{name.replace(" ", "_"): count for name, count in sorted(told.counts.items())},
        faults=dict(told.faults), reasons=[one.what for one in told.violations[:5]],
        histogram=histogram(told.ages_s),
    )  # fmt: skip
