"""Who works next: long work on the event loop, cut into slices that tenants take in turn.

A handler that goes through thousands of keys would keep everybody else waiting. So it rests
between them: after a slice of work it waits for its tenant's next turn. In each round of the event
loop every tenant has one turn, however many of its requests wait for one; reading a little needs
none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter


class Turns:
    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._serving = False  # at the next round of the loop

    async def wait(self, tenant: str) -> None:
        """Until it is this tenant's turn, in the order in which its requests came here."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        if not self._serving:
            self._serving = True
            loop.call_soon(self._serve)
        await turn

    def _serve(self) -> None:
        for tenant, queue in list(self._waiting.items()):
            turn = queue.popleft()
            while turn.done() and queue:  # whoever waited has gone
                turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
            if not queue:
                del self._waiting[tenant]
        self._serving = bool(self._waiting)
        if self._serving:
            asyncio.get_running_loop().call_soon(self._serve)


class Work:
    """One request's work. Ask often whether its slice `is_over`, and then `rest`."""

    def __init__(
        self, turns: Turns, tenant: str, slice_s: float, clock: Callable[[], float] = perf_counter
    ):
        self._turns, self._tenant, self._slice_s, self._clock = turns, tenant, slice_s, clock
        self._end_s = clock() + slice_s

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._end_s

    async def rest(self) -> None:
        """Let others work first, before a piece that cannot be cut."""
        await self._turns.wait(self._tenant)
        self._end_s = self._clock() + self._slice_s
