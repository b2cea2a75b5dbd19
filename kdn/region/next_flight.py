"""Many callers, few flights, none of which began before its caller asked.

A shared flight that is under way may already have looked where a caller wants to look: what
happened in between, it would not see. So those who come meanwhile share the next one, which begins
when this one ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from kdn.background import watched
from kdn.errors import KdnError

T = TypeVar("T")


class NextFlight(Generic[T]):
    """A flight runs in its own task, so a caller that is cancelled does not take others down."""

    def __init__(self) -> None:
        self._now: dict[Hashable, asyncio.Task[T]] = {}
        self._next: dict[Hashable, asyncio.Task[T]] = {}

    async def run(self, key: Hashable, fetch: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What a flight for `key` brings that begins now or later."""
        if (task := self._next.get(key)) is None:
            if (before := self._now.get(key)) is None:
                task = self._now[key] = asyncio.create_task(self._fly(key, fetch))
            else:
                task = self._next[key] = asyncio.create_task(self._after(key, before, fetch))
            task.add_done_callback(watched("asking the centre", KdnError, OSError))
        return await asyncio.shield(task)

    async def _fly(self, key: Hashable, fetch: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await fetch()
        finally:
            if self._now.get(key) is asyncio.current_task():
                del self._now[key]

    async def _after(
        self,
        key: Hashable,
        before: asyncio.Task[T],
        fetch: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        await asyncio.wait([before])
        task = asyncio.current_task()
        assert task is not None
        self._now[key] = self._next.pop(key)
        return await self._fly(key, fetch)

    async def close(self) -> None:
        tasks = [*self._now.values(), *self._next.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
