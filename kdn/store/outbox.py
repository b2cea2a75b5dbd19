"""Objects on their way down to slower tiers: still readable, bounded, written in the background.

What has been evicted above and not yet arrived below is nowhere else: it stays here until it is
written, is tried again when that fails, and is given up (and counted) only after ATTEMPTS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kdn.background import fault
from kdn.errors import StoreError
from kdn.store.base import Entry

WRITERS = 4
ATTEMPTS = 3
RETRY_S = 0.2

Write = Callable[[Entry, bytes], Awaitable[bool]]


class Outbox:
    def __init__(self, write: Write, max_bytes: int, *, retry_s: float = RETRY_S) -> None:
        self._write = write  # True if it arrived
        self._max_bytes = max_bytes
        self._retry_s = retry_s
        self._waiting: dict[bytes, tuple[Entry, bytes]] = {}  # first in, first out
        self._writing: dict[bytes, tuple[Entry, bytes]] = {}
        self._writers: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Condition()  # notified when something has left
        self.size_bytes = 0
        self.lost = 0
        """Objects given up."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._writing)

    def add(self, entry: Entry, data: bytes) -> None:
        """Take an object at once, even beyond the bound: see `room`."""
        if self.find(entry.key):
            return
        self._waiting[entry.key] = (entry, data)
        self.size_bytes += len(data)
        if len(self._writers) < WRITERS:
            writer = asyncio.create_task(self._work())
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)

    def find(self, key: bytes) -> tuple[Entry, bytes] | None:
        return self._waiting.get(key) or self._writing.get(key)

    def entries(self) -> list[Entry]:
        return [entry for entry, _ in (*self._waiting.values(), *self._writing.values())]

    async def room(self, deadline_s: float) -> None:
        """Wait until there is less here than the bound: whoever causes evictions waits first."""
        await self._until(lambda: self.size_bytes < self._max_bytes, deadline_s)

    async def drain(self, deadline_s: float) -> None:
        """Wait until all has arrived below (or was given up)."""
        await self._until(lambda: not len(self), deadline_s)

    async def drop(self, key: bytes, deadline_s: float) -> bool:
        """Forget an object, or wait for its writing to end; True if it was only waiting."""
        item = self._waiting.pop(key, None)
        if item:
            await self._left(item[1])
        await self._until(lambda: key not in self._writing, deadline_s)
        return item is not None

    async def close(self) -> None:
        """Stop; what is still here is lost."""
        self.lost += len(self)
        self._waiting.clear()
        for writer in list(self._writers):
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)

    async def _until(self, true: Callable[[], bool], deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s), self._moved:
                await self._moved.wait_for(true)
        except TimeoutError as error:
            raise StoreError(
                f"the tiers below took none of {len(self)} objects ({self.size_bytes} bytes) that "
                f"wait for them within {deadline_s:g} s"
            ) from error

    async def _left(self, data: bytes) -> None:
        self.size_bytes -= len(data)
        async with self._moved:
            self._moved.notify_all()

    async def _work(self) -> None:
        while self._waiting:
            key = next(iter(self._waiting))
            entry, data = self._writing[key] = self._waiting.pop(key)
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(self._retry_s * 2 ** (attempt - 1))
                if await self._arrives(entry, data):
                    break
            else:
                self.lost += 1
            del self._writing[key]
            await self._left(data)

    async def _arrives(self, entry: Entry, data: bytes) -> bool:
        """An error here would leave an object that is neither written nor lost, for ever."""
        try:
            return await self._write(entry, data)
        except Exception as error:
            fault("writing to the tiers below", error)
            return False
