"""Part a: how fast shards, buckets and nodes in front of them are read, by many clients at once.
And how fast one reader is beside the servers' own protocols, in turns.

Everything is on one machine, so all that is started shares its cores: more shards or nodes do not
make it faster here. What the figures show is what kdn costs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import islice
from statistics import median

from kdn.bench.cluster.crowd import BATCH, Buffers, crowd, read_prompt
from kdn.bench.cluster.items import Item, make_items, put_all
from kdn.bench.cluster.raw import RawRedis, RawS3
from kdn.bench.cluster.rows import Run
from kdn.bench.cluster.shards import start_shards
from kdn.bench.node_servers import start_kdn
from kdn.bench.s3_servers import rclone_s3
from kdn.bench.servers import MissingError
from kdn.credentials import Credentials
from kdn.store.base import Store
from kdn.store.many_nodes import node_store, open_nodes
from kdn.store.object_location import open_client, parse_location
from kdn.store.opening import open_remote
from kdn.store.streaming import Ask

Read = Callable[[Sequence[Item]], Awaitable[int]]


async def measure_speed(run: Run) -> None:
    for measure in (_measure_redis, _measure_s3):
        try:
            await measure(run)
        except MissingError as error:
            run.rows.skip(measure.__name__.removeprefix("_measure_"), error)


async def _measure_redis(run: Run) -> None:
    for number in run.plan.shards:
        with start_shards(run.folder(f"shards{number}"), number) as shards:
            raw = RawRedis(shards)
            try:
                await _measure(run, "redis", shards.url, number, raw)
            finally:
                raw.close()


async def _measure_s3(run: Run) -> None:
    with rclone_s3(run.folder("s3") / "data") as server:
        url = server.url("bench")
        await _measure(run, "s3", url, 1, RawS3(open_client(parse_location(url), None)))


async def _measure(run: Run, kind: str, url: str, shards: int, raw: RawRedis | RawS3) -> None:
    plan, credentials = run.plan, Credentials()
    for size in plan.sizes_bytes:
        items = list(islice(make_items(size, [run.seed, size]), max(BATCH, plan.set_bytes // size)))
        about = {"store": kind, "shards": shards, "object_bytes": size}
        async with opened(open_remote(url, credentials)) as store:
            await put_all(store, items)
            if isinstance(raw, RawRedis):
                raw.put(items)
            else:
                await raw.put(items)
            ratio = await beside(run, store, items, raw)
            run.rows.add("a", "ratio", **about, **ratio)
            seen = await crowd(store, items, plan.clients, plan.window_s, run.seed)
            run.rows.add("a", "clients", **about, nodes=0, clients=plan.clients, **seen)
        for number in plan.nodes:
            with nodes(run, number, url) as urls:
                await _crowd_at(run, urls, items, {**about, "nodes": number})


async def _crowd_at(run: Run, urls: str, items: Sequence[Item], about: dict[str, object]) -> None:
    """Chunks that a node's tenant has: put through the nodes, as engines do."""
    async with opened(node_store(open_nodes(urls), "chunks")) as store:
        await put_all(store, items)
        seen = await crowd(store, items, run.plan.clients, run.plan.window_s, run.seed)
    run.rows.add("a", "clients", **about, clients=run.plan.clients, **seen)


async def beside(
    run: Run, store: Store, items: Sequence[Item], raw: RawRedis | RawS3
) -> dict[str, float]:
    """Bytes a second of all. They take turns prompt by prompt, so that whatever else the machine
    does meanwhile slows all of them; a round's ratio is that of the times they took, and the median
    of the rounds counts. Readers of kdn look up first; whoever reads directly knows what is there.
    So both are told: reading alone, and with the lookup."""
    readers = Readers(store, raw, items)
    every = (await readers.look_up(), readers.with_lookup, readers.directly)
    for read in every:
        await _check_once(read, items, readers)
    rounds = [await _round(every, items, run.plan.round_s, at) for at in range(run.plan.rounds)]
    mine, looking, raws = ([one[at] for one in rounds] for at in range(3))
    ratios = [one / theirs for one, theirs in zip(mine, raws, strict=True)]
    return {
        "ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios),
        "with_lookup": median(one / theirs for one, theirs in zip(looking, raws, strict=True)),
        "kdn_bytes_per_s": median(mine), "raw_bytes_per_s": median(raws),
    }  # fmt: skip


async def _round(
    every: Sequence[Read], items: Sequence[Item], window_s: float, number: int
) -> list[float]:
    """Bytes a second of each reader, whose turns come in another order each time."""
    took_s, num_bytes = [0.0] * len(every), [0] * len(every)
    turn = number
    while min(took_s) < window_s:
        first = turn * BATCH % len(items)
        prompt = [items[(first + at) % len(items)] for at in range(BATCH)]
        for at in range(len(every)):
            which = (at + turn) % len(every)
            began_s = time.perf_counter()
            num_bytes[which] += await every[which](prompt)
            took_s[which] += time.perf_counter() - began_s
        turn += 1
    return [size / seconds for size, seconds in zip(num_bytes, took_s, strict=True)]


class Readers:
    """Ways to read a prompt into the same memory."""

    def __init__(self, store: Store, raw: RawRedis | RawS3, items: Sequence[Item]) -> None:
        self._store, self._raw, self._items = store, raw, items
        most_bytes = max(item.size_bytes for item in items)
        self.buffers = Buffers(BATCH, most_bytes)
        self.memory = [self.buffers.room(number, 0, most_bytes) for number in range(BATCH)]

    async def look_up(self) -> Read:
        """Once; then what it gives reads."""
        found = await self._store.lookup([item.key for item in self._items])
        asks = {one.key: Ask(one.key, 0, one.size_bytes, one.etag) for one in found if one}

        async def read(prompt: Sequence[Item]) -> int:
            self.buffers.begin()
            await self._store.read_into([asks[item.key] for item in prompt], self.buffers)
            return sum(self.buffers.sizes)

        return read

    async def with_lookup(self, prompt: Sequence[Item]) -> int:
        return await read_prompt(self._store, prompt, self.buffers)

    async def directly(self, prompt: Sequence[Item]) -> int:
        if isinstance(self._raw, RawRedis):
            return self._raw.read(prompt, self.memory)
        return await self._raw.read(prompt, self.memory)


async def _check_once(read: Read, items: Sequence[Item], readers: Readers) -> None:
    """Every byte; and what is made on first use is made."""
    prompt = items[:BATCH]
    for one in readers.memory:
        one[:] = bytes(len(one))
    num_bytes = await read(prompt)
    assert num_bytes == sum(item.size_bytes for item in prompt), f"{num_bytes} bytes came"
    for item, data in zip(prompt, readers.memory, strict=True):
        assert item.is_whole(data[: item.size_bytes]), "wrong bytes"


@asynccontextmanager
async def opened(store: Store) -> AsyncIterator[Store]:
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def nodes(run: Run, number: int, url: str) -> Iterator[str]:
    """So many in front of one store, as one place."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(start_kdn(run.folder(f"node{at}"), {"store": url}))
            for at in range(number)
        ]
        yield ",".join(server.url for server in started)
