"""Caches in front of a store that other nodes delete from, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kdn.store.shared import SharedStore
from kdn.store.tiered import Tier
from tests.store.contract import content, put
from tests.store.tiers import Flaky, memory, run

DATA = content("data", 1000)

Drop = Callable[[SharedStore], Awaitable[object]]


@pytest.mark.parametrize("slow", ["shared", "disk"])
@pytest.mark.parametrize(
    "drop",
    [
        lambda store: store.drop(b"key"),
        lambda store: store.drop_all(),
        lambda store: store.delete(b"key"),
    ],
    ids=["drop", "drop_all", "delete"],
)
def test_what_is_dropped_while_it_is_put_does_not_come_back(slow: str, drop: Drop) -> None:
    async def test() -> None:
        ram, disk, shared = memory(), Flaky(memory()), Flaky(memory())
        store = SharedStore([Tier("ram", ram, 5), Tier("disk", disk, 5)], Tier("store", shared, 5))
        slowed = {"shared": shared, "disk": disk}[slow]
        slowed.stalls.clear()
        putting = asyncio.create_task(put(store, b"key", DATA))
        while "put" not in slowed.calls:
            await asyncio.sleep(0)
        dropping = asyncio.ensure_future(drop(store))
        await asyncio.sleep(0.01)
        slowed.stalls.set()
        await asyncio.gather(putting, dropping)
        await shared.store.delete(b"key")
        assert await store.get(b"key") is None
        await put(store, b"key", DATA)
        await shared.store.delete(b"key")
        assert await store.get(b"key") is not None, "the caches are used again"
        await store.close()

    run(test())
