"""A publisher for one test: opened, used, closed, with nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from kdn.delivery.publish import Admission, Publisher, Values
from kdn.store.base import Store
from tests.delivery.world import Down, World, run


def publish_all(publisher: Publisher, world: World) -> list[Admission]:
    return [
        publisher.publish(chunk, Values(cache), saved_s=0.5)
        for chunk, cache in zip(world.chunks, world.caches, strict=True)
    ]


def publishing(
    world: World,
    store: Callable[[], Awaitable[Store]],
    test: Callable[[Publisher, Any], Awaitable[None]],
    **options: Any,
) -> Publisher:
    async def work() -> Publisher:
        opened = await store()
        async with Publisher(opened, world.codec, rng=Random(1), **options) as publisher:
            await test(publisher, opened)
        assert len(asyncio.all_tasks()) == 1
        return publisher

    return run(work())


async def all_accepted(publisher: Publisher, world: World) -> None:
    publish_all(publisher, world)
    assert await publisher.flush(10.0)


def down(world: World) -> Callable[[], Awaitable[Store]]:
    """A place with nobody there."""

    async def store() -> Store:
        return Down(await world.store([]))

    return store
