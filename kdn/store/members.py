"""The nodes behind one place as they are now: by a list of URLs, by a name with several addresses.

Names are resolved again every few seconds while there are requests. A new address is a new node
from then on. One that is gone gets no more requests; its connections are closed when those that it
has are answered. An address that a single answer leaves out stays until the next one, as some name
servers tell a part of many.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from random import Random
from typing import Any

from kdn.background import watched
from kdn.store.addresses import addresses_of, at_address, is_fixed
from kdn.store.base import Stats
from kdn.store.member import Member
from kdn.store.node_client import HttpLimits, NodeClient

logger = logging.getLogger(__name__)

MAX_MISSING = 2
"""So many answers in a row must leave an address out before it is gone; one, if it is down."""
SOONEST_S = 0.5
"""Between two answers, even when nodes fail."""
LEAVE_S = 1.0
"""For requests that have chosen this node and not yet begun."""
WARN_S = 60.0
"""Between two warnings of one node."""
MAX_HEDGES = 5.0
HEDGES_PER_REQUEST = 0.1
"""So many requests may be sent twice because a node is silent that nobody knows to hang: if it is
busy, it must not become busier by that."""

Connect = Callable[[str, str | None], NodeClient]
"""The client of a node by its URL, and by which of its addresses."""


class Members:
    def __init__(
        self,
        urls: Sequence[str],
        connect: Connect,
        limits: HttpLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self.counts: dict[str, Stats] = {}
        """By collection, of all nodes."""
        self.clock = clock
        self._connect, self._limits = connect, limits
        self._rng = rng or Random()
        self._all: dict[str, Member] = {}
        self._missing: dict[str, int] = {}  # by member: answers in a row that left it out
        self._told: dict[str, list[str]] = {}  # by URL: the names of its nodes, when last told
        self._unknown: set[str] = set()  # URLs whose addresses nobody told the last time
        self._names = [url for url in urls if not is_fixed(url)]
        self._fixed = {url for url in urls if is_fixed(url)}
        for url in urls:
            if url in self._fixed:
                self._join(url, url, None)
        self._resolved_s: float | None = None
        self._resolving: asyncio.Task[None] | None = None
        self._probing: set[Member] = set()
        self._warned_s: dict[str, float] = {}  # by member
        self._tasks: set[asyncio.Task[None]] = set()
        self._hedges = MAX_HEDGES

    async def every(self) -> list[Member]:
        """All there are. Waits for names to be resolved once; later that happens beside."""
        if self._names:
            task = self._resolve_if_due(self._limits.resolve_s)
            if self._resolved_s is None and task is not None:
                await asyncio.shield(task)
        for member in self._all.values():
            if not member.is_up and member.has_rested:
                self._probe(member)
        return list(self._all.values())

    def count_request(self) -> None:
        self._hedges = min(self._hedges + HEDGES_PER_REQUEST, MAX_HEDGES)

    def may_hedge(self) -> bool:
        """Whether a request may be sent twice although its node seems well. Each counts."""
        if self._hedges < 1:
            return False
        self._hedges -= 1
        return True

    def doubt(self, member: Member, after_s: float) -> None:
        """If it said nothing to anybody for so long, it may hang: that is known soon."""
        if member.is_up and self.clock() - member.heard_s >= after_s:
            member.is_doubted = True
            self._probe(member)

    def failed(self, member: Member, began_s: float) -> None:
        """One of its requests, begun then. Perhaps it is gone."""
        member.failed(began_s)
        self._is_down(member)

    def _is_down(self, member: Member) -> None:
        now_s = self.clock()
        if now_s - self._warned_s.get(member.name, -WARN_S) >= WARN_S:
            self._warned_s[member.name] = now_s
            logger.warning("%s fails: others are asked instead", member.name)
        if self._names:
            self._resolve_if_due(SOONEST_S)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._all.values():
            await member.close()
        self._resolving = None

    # what goes on beside requests

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # In a context of its own: it is no part of the request that happens to begin it.
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(watched("the nodes of a place"))
        return task

    def _probe(self, member: Member) -> None:
        """One at a time."""
        if member not in self._probing:
            self._probing.add(member)
            self._begin(self._probed(member))

    async def _probed(self, member: Member) -> None:
        try:
            if not await member.probe():
                self._is_down(member)
        finally:
            self._probing.discard(member)

    def _resolve_if_due(self, after_s: float) -> asyncio.Task[None] | None:
        """The resolution under way, if there is one now."""
        is_running = self._resolving is not None and not self._resolving.done()
        is_due = self._resolved_s is None or self.clock() - self._resolved_s >= after_s
        if not is_running and is_due:
            self._resolving = self._begin(self._resolve())
        return self._resolving

    async def _resolve(self) -> None:
        found = await asyncio.gather(*map(self._addresses, self._names))
        for url, addresses in zip(self._names, found, strict=True):
            if addresses is not None or url not in self._told:
                self._told[url] = self._take(url, addresses or [])
        wanted = self._fixed.union(*self._told.values())
        for name in self._all.keys() - wanted:
            self._missing[name] += 1
            if self._missing[name] >= MAX_MISSING or not self._all[name].is_up:
                self._leave(name)
        self._resolved_s = self.clock()

    async def _addresses(self, url: str) -> list[str] | None:
        """None: nobody knows now, and what was known stays."""
        try:
            async with asyncio.timeout(self._limits.connect_s):
                found = await addresses_of(url)
        except (OSError, UnicodeError) as error:  # a timeout, too; a name that cannot be one
            if url not in self._unknown:
                logger.warning("the addresses of %s are not known: %r", url, error)
            self._unknown.add(url)
            return None
        self._unknown.discard(url)
        return found

    def _take(self, url: str, addresses: list[str]) -> list[str]:
        """The names of the nodes at these addresses, each a member from now on. A single one is
        reached by its name, whichever family it has; unless it is what is left of several."""
        had_several = any(name != url for name in self._told.get(url, ()))
        if len(addresses) > 1 or (addresses and had_several):
            named: dict[str, str | None] = {at_address(url, one): one for one in addresses}
        else:
            named = {url: None}
        for name, address in named.items():
            self._missing[name] = 0
            if name not in self._all:
                self._join(name, url, address)
        return list(named)

    def _join(self, name: str, url: str, address: str | None) -> None:
        client, prober = self._connect(url, address), self._connect(url, address)
        self._all[name] = Member(
            name, client, prober, counts=self.counts, clock=self.clock, rng=self._rng
        )

    def _leave(self, name: str) -> None:
        member = self._all.pop(name)
        del self._missing[name]
        self._warned_s.pop(name, None)
        self._begin(self._retire(member))

    async def _retire(self, member: Member) -> None:
        """Every request has a deadline, so it is idle one day. A closing place does not wait."""
        try:
            await asyncio.sleep(LEAVE_S)
            await member.idle.wait()
        finally:
            await member.close()
