"""Many callers, one flight."""

from __future__ import annotations

import asyncio

from kdn.errors import StoreError
from kdn.store.single_flight import SingleFlight
from tests.store.tiers import run


def test_a_flight_that_fails_fails_for_all_and_is_forgotten() -> None:
    async def test() -> None:
        flights: SingleFlight[int] = SingleFlight()
        gate = asyncio.Event()

        async def fail() -> int:
            await gate.wait()
            raise StoreError("gone")

        async def answer() -> int:
            return 7

        waiting = [asyncio.create_task(flights.run("k", fail)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(flights) == 1
        gate.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [StoreError] * 3
        assert await flights.run("k", answer) == 7
        await flights.close(1.0)

    run(test())
