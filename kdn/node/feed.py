"""How far the store of names is, for all who follow it.

They share one look at the store, every tenth of a second: so there may be many of them, and names
may be changed by other nodes, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kdn.background import supervise
from kdn.depot.names import NameStore
from kdn.errors import KdnError
from kdn.node.answers import RETRY_AFTER, Refusal

POLL_S = 0.1
GIVE_UP_S = 5.0
MAX_FOLLOWERS = 64
"""Of one tenant."""


class Feed:
    def __init__(self, names: NameStore) -> None:
        self._names = names
        self._followers: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._polled = asyncio.Condition()
        self.sequence = 0
        self.as_of_s = float("-inf")
        """By the event loop's clock: all changes up to `sequence` were all there were then."""
        self.times_back = 0
        """That the store had fewer changes than before: a failover may lose some that nobody was
        told had happened. Whoever heard of them has to find out."""

    @property
    def num_followers(self) -> int:
        return self._followers.total()

    @contextmanager
    def follower(self, tenant: str) -> Iterator[None]:
        if self._followers[tenant] >= MAX_FOLLOWERS:
            raise Refusal(503, "overloaded", "too many follow these names", RETRY_AFTER)
        self._followers[tenant] += 1
        if self._task is None:
            self._task = asyncio.create_task(supervise("polling names", self._poll))
        try:
            yield
        finally:
            self._followers[tenant] -= 1
            if not self._followers.total():
                self._task.cancel()
                self._task = None

    async def newer(
        self, than_s: float, sequence: int, patience_s: float, ends: Callable[[], bool]
    ) -> bool:
        """Wait until the store has been looked at after `than_s` and is beyond `sequence`; after
        `patience_s` only for the former. False if everything `ends`; ConnectionResetError if the
        store cannot be looked at."""
        loop = asyncio.get_running_loop()
        end_s, give_up_s = loop.time() + patience_s, loop.time() + GIVE_UP_S
        async with self._polled:
            while self.as_of_s <= than_s or (self.sequence <= sequence and loop.time() < end_s):
                if ends():
                    return False
                if loop.time() > give_up_s:
                    raise ConnectionResetError("the store of names does not answer")
                await self._polled.wait()
        return True

    async def _poll(self) -> None:
        while True:
            began_s = asyncio.get_running_loop().time()
            with suppress(KdnError, TimeoutError):
                async with asyncio.timeout(GIVE_UP_S):
                    sequence = await self._names.sequence()
                self.times_back += sequence < self.sequence
                self.sequence, self.as_of_s = sequence, began_s
            async with self._polled:
                self._polled.notify_all()
            await asyncio.sleep(POLL_S)
