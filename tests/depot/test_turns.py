"""Turns on the event loop: exact orders."""

from __future__ import annotations

import asyncio

from kdn.depot.turns import Turns, Work
from tests.node.harness import run


def test_each_tenant_has_one_turn_in_each_round() -> None:
    async def work() -> None:
        turns, order = Turns(), []

        async def wait(tenant: str, number: int) -> None:
            await turns.wait(tenant)
            order.append(f"{tenant}{number}")

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(wait("a", number))
            group.create_task(wait("b", 0))
        assert order == ["a0", "b0", "a1", "a2", "a3"]

    run(work())


def test_who_has_gone_takes_nobodys_turn() -> None:
    async def work() -> None:
        turns = Turns()
        waiting = [asyncio.create_task(turns.wait("a")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        await waiting[2]
        alone = asyncio.create_task(turns.wait("a"))
        await asyncio.sleep(0)
        alone.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        await turns.wait("a")

    run(work())


def test_work_rests_when_its_slice_is_over() -> None:
    async def work() -> None:
        now_s, waited = 0.0, []

        class Counted(Turns):
            async def wait(self, tenant: str) -> None:
                waited.append(now_s)

        job = Work(Counted(), "a", 2.0, lambda: now_s)
        for _ in range(5):
            if job.is_over:
                await job.rest()
            now_s += 1.0
        assert waited == [2.0, 4.0]

    run(work())
