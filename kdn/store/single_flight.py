"""Many callers, one flight: those who ask for what is already being fetched wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from kdn.background import watched
from kdn.errors import KdnError

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """A flight runs in its own task, so a caller that is cancelled does not take others down."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, asyncio.Task[T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._flights

    async def run(self, key: Hashable, fetch: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the flight under way for `key`, or of a new one."""
        return await asyncio.shield(self.start(key, fetch))

    def start(self, key: Hashable, fetch: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """The flight itself, for callers that do not wait for it."""
        task = self._flights.get(key)
        if task is None:
            self._flights[key] = task = asyncio.create_task(fetch())
            task.add_done_callback(lambda _: self._flights.pop(key))
            # Whoever still waits gets it; if nobody is left, only what is unexpected is told.
            task.add_done_callback(watched("fetching", KdnError, OSError))
        return task

    async def landed(self, key: Hashable) -> None:
        """Return when there is no flight for `key`, however it ended."""
        if key in self._flights:
            await asyncio.wait([self._flights[key]])

    async def all_landed(self) -> None:
        """Return when those that are under way now have ended, however."""
        if self._flights:
            await asyncio.wait(list(self._flights.values()))

    async def close(self, deadline_s: float) -> None:
        """Wait for all flights; after the deadline they are cancelled."""
        flights = list(self._flights.values())
        if not flights:
            return
        _, late = await asyncio.wait(flights, timeout=deadline_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
