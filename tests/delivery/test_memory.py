"""A delivery's buffers go with it, without a collection of cycles: engines put those off."""

from __future__ import annotations

import asyncio
import gc

from kdn.delivery.client import Delivery, deliver
from tests.delivery.world import make_world


def alive() -> int:
    return sum(type(one) is Delivery for one in gc.get_objects())


def test_nothing_of_a_delivery_stays() -> None:
    world = make_world(3)

    async def one() -> tuple[int, ...]:
        return (await deliver(world.request(), [await world.store()])).levels

    gc.collect()
    before = alive()
    gc.disable()
    try:
        assert asyncio.run(one()) == (world.codec.num_levels,) * 3
        assert alive() == before
    finally:
        gc.enable()
