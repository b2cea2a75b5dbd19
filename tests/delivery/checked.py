"""A delivery with what must hold of every one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.flight import Limits
from kdn.delivery.request import Result
from kdn.store.base import Store
from tests.delivery.world import World, level_major, run

QUICK = Limits(hedge_s=0.05, silence_s=0.2)
LATE_S = 3.0
"""What a busy machine may add to a deadline."""
REQUEST_OPTIONS = {"enough_kld", "cache", "dtype", "speeds", "compute"}


def deliver_from(
    world: World, places: Callable[[], Awaitable[Sequence[Store | Endpoint]]], **options: Any
) -> Result:
    """One delivery, checked: correct, in time, and nothing left running."""
    deadline_s = options.pop("deadline_s", 5.0)
    named = {name: options.pop(name) for name in list(options) if name in REQUEST_OPTIONS}

    async def test() -> Result:
        began_s = time.monotonic()
        result = await deliver(
            world.request(deadline_s=deadline_s, **named),
            await places(),
            **{"policy": level_major, "limits": QUICK, "rng": Random(1), **options},
        )
        assert time.monotonic() - began_s < deadline_s + LATE_S
        assert len(asyncio.all_tasks()) == 1
        return result

    result = run(test())
    world.check(result)
    return result
