"""Turns on the event loop: exact orders, and that long requests take them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kdn.node import batch
from kdn.node.turns import Turns, Work
from kdn.protocol.frames import split
from tests.node.harness import Running, key_of, run, tenant, with_node


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


@pytest.mark.parametrize("question", ["lookup", "read"])
def test_many_keys_are_gone_through_in_turns(
    tmp_path: Path, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slices of no length there is a turn for every key, and the answer is the same."""
    for name in ("LOOKUP_SLICE_S", "READ_SLICE_S"):
        monkeypatch.setattr(batch, name, 0.0)
    for name in ("SEEN", "SENT"):
        monkeypatch.setattr(batch, name, 1)
    keys = [key_of(number).hex() for number in range(600)]
    asked = {"keys": keys} if question == "lookup" else {"spans": [{"key": key} for key in keys]}

    async def test(node: Running) -> None:
        taken: list[str] = []
        wait = node.node.turns.wait

        async def counted(tenant: str) -> None:
            taken.append(tenant)
            await wait(tenant)

        node.node.turns.wait = counted
        await node.put_chunk(7, token="a")
        body = json.dumps(asked).encode()
        status, _, answer = await node.ask("POST", f"/v1/{question}", body, "a")
        assert status == 200
        found = [frame.number for frame, _ in split(answer) if frame.status == 200]
        assert found == [7]
        assert len(taken) > 1200
        assert set(taken) == {"ann"}

    with_node(tmp_path, test, tenant("ann", "a"), tenant("bob", "b"))
