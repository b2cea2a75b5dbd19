"""Shares and budgets: what a tenant alone may have, and what nobody can take from another."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kdn.node.answers import Refusal
from kdn.node.bodies import Pace
from kdn.node.budget import Budget
from kdn.node.shares import Shares
from tests.node.harness import run


def test_half_is_divided_and_half_is_common() -> None:
    shares = Shares(100, {"ann": 0, "bob": 0})  # 25 each, and 50
    assert shares.most("ann") == 75
    assert shares.take("ann", 75)
    assert not shares.take("ann", 1)
    assert not shares.take("bob", 26)
    assert shares.take("bob", 25)
    shares.give_back("ann", 60)  # she keeps 15 of her own
    assert shares.take("bob", 50)
    assert not shares.take("bob", 1)
    assert shares.take("ann", 10)
    assert not shares.take("ann", 1)


def test_a_tenant_alone_has_everything_unless_capped() -> None:
    assert Shares(100, {"public": 0}).take("public", 100)
    capped = Shares(100, {"ann": 10})
    assert capped.most("ann") == 10
    assert capped.take("ann", 10)
    assert not capped.take("ann", 1)


def test_whatever_the_others_do_a_tenant_finds_its_own() -> None:
    rng = Random(3)
    names = [f"tenant {number}" for number in range(7)]
    shares = Shares(1000, dict.fromkeys(names, 0))
    held: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(5000):
        name = rng.choice(names[1:])
        amount = rng.randrange(300)
        if shares.take(name, amount):
            held[name].append(amount)
        elif held[name]:
            shares.give_back(name, held[name].pop(rng.randrange(len(held[name]))))
        assert sum(map(sum, held.values())) <= 1000
        assert shares.take(names[0], 1000 // 14)
        shares.give_back(names[0], 1000 // 14)


def test_the_pace_by_the_clock() -> None:
    """1,000 bytes in each 10 seconds."""
    pace = Pace(10.0, 100, now_s=0.0)
    assert pace.deadline_s == 10.0
    assert not pace.arrived(999, 5.0)
    assert pace.deadline_s == 10.0
    assert pace.arrived(1, 9.0)
    assert pace.deadline_s == 19.0
    assert pace.arrived(10**9, 9.5)  # however much came at once, silence after it is no better
    assert pace.deadline_s == 19.5


async def waits(budget: Budget, tenant: str, size_bytes: int, order: list[str]) -> None:
    async with budget.share(tenant, size_bytes):
        order.append(tenant)


def test_who_waits_for_memory_is_served_fairly() -> None:
    async def work() -> None:
        budget = Budget(Shares(80, {"ann": 0, "bob": 0, "cat": 0, "dan": 0}), 5.0)  # 10 each, 40
        order: list[str] = []
        async with budget.share("ann", 20):
            async with budget.share("ann", 30):
                first = asyncio.create_task(waits(budget, "ann", 30, order))
                await asyncio.sleep(0)
                second = asyncio.create_task(waits(budget, "bob", 30, order))
                await asyncio.sleep(0)
                async with budget.share("cat", 10):  # its own: nobody's turn is before it
                    assert order == []
            await asyncio.gather(first, second)
        assert order[0] == "bob"  # who held nothing, though ann was waiting first

    run(work())


def test_a_large_request_is_not_passed_over_for_ever() -> None:
    async def work() -> None:
        budget = Budget(Shares(80, {"ann": 0, "bob": 0}), 5.0)  # 20 each, and 40
        order: list[str] = []
        async with budget.share("ann", 40):
            large = asyncio.create_task(waits(budget, "bob", 60, order))
            await asyncio.sleep(0)
            small = asyncio.create_task(waits(budget, "ann", 1, order))
            await asyncio.sleep(0.01)
            assert order == []  # there is room for the small one; the large one's turn is first
        await asyncio.gather(large, small)
        assert order == ["bob", "ann"]

    run(work())


def test_waiting_for_memory_ends() -> None:
    async def work() -> None:
        budget = Budget(Shares(100, {"ann": 0}), 0.05)
        async with budget.share("ann", 80):
            for size_bytes, status in ((30, 503), (101, 413)):
                with pytest.raises(Refusal) as caught:
                    async with budget.share("ann", size_bytes):
                        pass
                assert caught.value.status == status
        async with budget.share("ann", 100):
            pass

    run(work())


def test_memory_comes_back_whoever_gives_up_when() -> None:
    async def work() -> None:
        rng = Random(5)
        shares = Shares(100, {"ann": 0, "bob": 0})
        budget = Budget(shares, 5.0)

        async def hold(tenant: str) -> None:
            async with budget.share(tenant, rng.randrange(1, 70)):
                await asyncio.sleep(rng.random() / 1000)

        tasks = [asyncio.create_task(hold(rng.choice(["ann", "bob"]))) for _ in range(300)]
        while not all(task.done() for task in tasks):
            rng.choice(tasks).cancel()
            await asyncio.sleep(rng.random() / 1000)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert shares.held("ann") == shares.held("bob") == 0
        assert shares.take("ann", 75)
        assert shares.take("bob", 25)

    run(work())


def test_who_can_be_served_by_itself_only_keeps_nobody_waiting() -> None:
    """It holds so much that only what it gives back could serve it: the common part is free."""

    async def test() -> None:
        budget = Budget(Shares(100, {"ann": 0, "bob": 0}), wait_s=30.0)  # 25 each, and 50
        async with budget.share("ann", 50):
            waiting = asyncio.create_task(budget._take("ann", 40))  # 90 of the 75 that she may
            await asyncio.sleep(0)
            async with asyncio.timeout(10.0), budget.share("bob", 40):
                assert not waiting.done()
        async with asyncio.timeout(10.0):
            await waiting

    run(test())
