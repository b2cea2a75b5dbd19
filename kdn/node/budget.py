"""Memory that requests hold while they are served: fair among tenants, with a deadline for waiting.

A request holds all it needs at once and never asks for more of the same budget, so nobody waits in
a circle. Those of one tenant are served in the order they came. Of the common part (`shares.py`)
the tenant that holds least is served first, and while it waits nobody else gets any of it: so
nobody starves. A tenant's own part is there for it at once, whoever else waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from kdn.node.answers import RETRY_AFTER, Refusal
from kdn.node.shares import Shares


class _Place(NamedTuple):
    size_bytes: int
    granted: asyncio.Future[None]


class Budget:
    """`shares` in bytes; nobody waits longer than `wait_s` for some."""

    def __init__(self, shares: Shares, wait_s: float):
        self._shares = shares
        self._wait_s = wait_s
        self._waiting: dict[str, deque[_Place]] = {}

    def most_bytes(self, tenant: str) -> int:
        """What one request of this tenant can hold at all."""
        return self._shares.most(tenant)

    @property
    def held_bytes(self) -> int:
        """By the requests of all tenants."""
        return self._shares.held_by_all()

    def share(self, tenant: str, size_bytes: int) -> _Share:
        """Hold `size_bytes` of it while in its context. Refusals: 503 if they do not come free in
        time, 413 if they never can."""
        return _Share(self, tenant, size_bytes)

    def _give_back(self, tenant: str, size_bytes: int) -> None:
        self._shares.give_back(tenant, size_bytes)
        if self._waiting:
            self._wake()

    async def _take(self, tenant: str, size_bytes: int) -> None:
        most_bytes = self.most_bytes(tenant)
        if size_bytes > most_bytes:
            raise Refusal(413, "too_large", f"needs {size_bytes} bytes of memory of {most_bytes}")
        alone = not self._waiting or self._next() is None
        if tenant not in self._waiting and self._shares.take(tenant, size_bytes, common=alone):
            return
        place = _Place(size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            async with asyncio.timeout(self._wait_s):
                await place.granted
        except BaseException as error:
            self._leave(tenant, place)
            if isinstance(error, TimeoutError):
                raise Refusal(
                    503, "overloaded", "no memory for this request now", RETRY_AFTER
                ) from None
            raise

    def _leave(self, tenant: str, place: _Place) -> None:
        """Somebody gave up, perhaps just when it was granted."""
        if place.granted.done() and not place.granted.cancelled():
            self._shares.give_back(tenant, place.size_bytes)
        else:
            self._drop(tenant, place)
        self._wake()

    def _drop(self, tenant: str, place: _Place) -> None:
        places = self._waiting.get(tenant, deque())
        if place in places:
            places.remove(place)
            if not places:
                del self._waiting[tenant]

    def _wake(self) -> None:
        while self._grant_one():
            pass

    def _next(self) -> str | None:
        """Whose turn it is to get some of the common part: who holds least, among those who could
        hold what they wait for. Others wait for themselves only."""
        able = [
            tenant
            for tenant, places in self._waiting.items()
            if self._shares.held(tenant) + places[0].size_bytes <= self._shares.most(tenant)
        ]
        return min(able, key=self._shares.held, default=None)

    def _grant_one(self) -> bool:
        following = self._next()
        for tenant in sorted(self._waiting, key=self._shares.held):
            place = self._waiting[tenant][0]
            if place.granted.cancelled():  # and its request has not been told yet
                self._drop(tenant, place)
                return True
            if self._shares.take(tenant, place.size_bytes, common=tenant == following):
                self._drop(tenant, place)
                place.granted.set_result(None)
                return True
        return False


class _Share:
    """Every request passes two of these: a class, since generators take three times as long."""

    __slots__ = ("_budget", "_size_bytes", "_tenant")

    def __init__(self, budget: Budget, tenant: str, size_bytes: int):
        self._budget, self._tenant, self._size_bytes = budget, tenant, size_bytes

    async def __aenter__(self) -> None:
        await self._budget._take(self._tenant, self._size_bytes)

    async def __aexit__(self, *_: object) -> None:
        self._budget._give_back(self._tenant, self._size_bytes)
