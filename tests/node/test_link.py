"""Processes of a node ask each other, count together, and go on without one that is silent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from kdn.errors import StoreError
from kdn.node import owner
from kdn.node.egress import BusyError
from kdn.node.ledger import Ledger, LedgerShares, column
from kdn.node.link import Answer, Fields, Handler, Link
from kdn.node.owner import Workers
from kdn.node.stats import NodeStats, summed
from kdn.store.base import Stats
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.node.harness import run


async def linked(
    one: dict[str, Handler], other: dict[str, Handler], **options: Any
) -> tuple[Link, Link]:
    loop = asyncio.get_running_loop()
    ends = socket.socketpair()
    made = []
    for end, handlers in zip(ends, (one, other), strict=True):
        end.setblocking(False)
        _, link = await loop.create_unix_connection(
            lambda handlers=handlers: Link(handlers, **options), sock=end
        )
        made.append(link)
    return made[0], made[1]


def test_questions_and_answers() -> None:
    async def echo(fields: Fields) -> Answer:
        await asyncio.sleep(fields.get("wait_s", 0))
        return {"said": fields["say"]}, b"x" * fields.get("num_bytes", 0)

    async def fail(fields: Fields) -> Answer:
        raise BusyError("too much")

    async def work() -> None:
        here, there = await linked({}, {"echo": echo, "fail": fail}, errors=(BusyError,))
        assert await here.ask("echo", say="a") == ({"said": "a"}, b"")
        asked = [here.ask("echo", say=n, num_bytes=n * 40_000) for n in range(30)]
        for number, (fields, rest) in enumerate(await asyncio.gather(*asked)):
            assert (fields["said"], len(rest)) == (number, number * 40_000)
        with pytest.raises(BusyError, match="too much"):
            await here.ask("fail")
        with pytest.raises(StoreError, match="no answer"):
            await here.ask("echo", 0.05, say="late", wait_s=60)
        async with asyncio.timeout(5):
            while there._answering:  # until it is withdrawn
                await asyncio.sleep(0.01)
        waiting = asyncio.create_task(here.ask("echo", say="never", wait_s=9))
        await asyncio.sleep(0.02)
        there.close()
        with pytest.raises(StoreError, match="gone"):
            await waiting
        with pytest.raises(StoreError, match="gone"):
            await here.ask("echo", say="b")

    run(work())


def test_a_worker_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a deletion is acknowledged, since nobody knows what it still has."""
    monkeypatch.setattr(owner, "DROP_S", 0.2)

    async def hang(fields: Fields) -> Answer:
        await asyncio.sleep(60)
        return {}, b""

    async def work(process: subprocess.Popen[bytes]) -> None:
        store = MemoryStore(2**20, open_policy("lru"))
        node: Any = SimpleNamespace(depot=SimpleNamespace(store=store), others=None)
        workers = Workers(node)
        ends = socket.socketpair()
        loop = asyncio.get_running_loop()
        for end, make in zip(ends, (workers.new_link, lambda: Link({"drop": hang})), strict=True):
            end.setblocking(False)
            _, link = await loop.create_unix_connection(make, sock=end)
        await link.ask("hello", pid=process.pid)
        assert not await node.depot.store.delete(b"k")
        assert process.wait(5) == -signal.SIGKILL
        assert not await node.depot.store.delete(b"k")  # nobody is left to ask

    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            run(work(process))
        finally:
            process.kill()


def test_shares_are_counted_across_processes() -> None:
    """Of 8 places, 2 are each tenant's own."""
    caps = {"ann": 0, "bob": 0}
    ledger = Ledger(2, [column("requests", name) for name in caps])
    shares = LedgerShares(ledger, "requests", 8, caps)
    ready, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:  # the other process takes three, and waits
        ledger.begin_row(1)
        taken = all(shares.take("ann", 1) for _ in range(3))
        os.write(ready[1], b"y" if taken else b"n")
        os.read(go_on[0], 1)
        shares.give_back("ann", 3)
        os._exit(0)
    try:
        ledger.begin_row(0)
        assert os.read(ready[0], 1) == b"y"
        assert (shares.held("ann"), shares.held_here("ann")) == (3, 0)
        assert [shares.take("ann", 1) for _ in range(4)] == [True] * 3 + [False]
        assert [shares.take("bob", 1) for _ in range(3)] == [True] * 2 + [False]
        shares.give_back("ann", 1)
        assert shares.take("bob", 1)
    finally:
        os.write(go_on[1], b"x")
        os.waitpid(pid, 0)
    assert shares.held("ann") == 2
    ledger.begin_row(0)
    assert shares.held("ann") == shares.held("bob") == 0


def test_metrics_are_summed() -> None:
    shown = []
    for number in (1, 2):
        stats = NodeStats()
        stats.hits.inc(number)
        stats.connections.set(number)
        stats.answered(("GET", "/a", 200 + number), 0.002)
        stats.answered(("GET", "/b", 200), 0.002)
        shown.append(stats.expose(Stats(objects=2 - number)))
    lines = summed(shown).decode().splitlines()
    for line in (
        "kdn_hits_total 3.0",
        "kdn_connections 3.0",
        "kdn_store_objects 1.0",
        'kdn_request_seconds_count{method="GET",route="/b",status="200"} 2.0',
        'kdn_request_seconds_count{method="GET",route="/a",status="201"} 1.0',
        'kdn_request_seconds_bucket{le="0.003",method="GET",route="/b",status="200"} 2.0',
    ):
        assert line in lines
    assert len(lines) == len(set(lines))


def test_a_worker_that_ends_while_it_is_told_fails_no_deletion() -> None:
    async def work() -> None:
        store = MemoryStore(1 << 20, open_policy("lru"))
        workers = Workers(SimpleNamespace(depot=SimpleNamespace(store=store)))  # type: ignore[arg-type]
        link = workers.new_link()
        workers._pids[link] = 1
        dropping = asyncio.ensure_future(workers.drop([b"k"]))
        asyncio.get_running_loop().call_soon(workers._lost, link)
        await asyncio.sleep(0)
        workers._lost(link)
        await dropping

    run(work())
