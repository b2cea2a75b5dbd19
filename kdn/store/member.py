"""One node of several, and what is known of it: whether it works, and how fast it answers.

A node that failed rests, longer each time. Then it is asked for its health, and until it has said
that it is well nobody waits for it again: a node that hangs costs nothing but the first silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from kdn.errors import KdnError
from kdn.store.base import Stats
from kdn.store.http import HttpStore
from kdn.store.node_client import NodeClient
from kdn.store.rendezvous import seed_of
from kdn.store.rest import Rest

FIRST_REST_S = 0.1
LONGEST_REST_S = 5.0
PROBE_S = 1.0
"""For a node to say that it is well."""
LONGEST_HEDGE_S = 2.0
"""However slow a node has been."""
SLOW = 3.0
"""So much longer than its slowest answer of late may a node be silent."""
FADING = 0.9
"""With every answer, a slow one of the past counts less."""


class Member:
    def __init__(
        self,
        name: str,
        client: NodeClient,
        prober: NodeClient,
        *,
        counts: dict[str, Stats],
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        """`name`: the same for all clients. `prober` has a connection of its own, so that health
        does not wait for work. `counts`: by collection."""
        self.name, self.client, self._prober = name, client, prober
        self.seed = seed_of(name)
        self.is_up = True
        """Not to be asked while there are others."""
        self.is_doubted = False
        """It is silent, and whether it is well is being found out: others are asked first."""
        self.heard_s = clock()
        """When it last said anything."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._counts, self._clock, self._rng = counts, clock, rng
        self._stores: dict[str, HttpStore] = {}
        self._rest = Rest(FIRST_REST_S, LONGEST_REST_S)
        self._slowest_s = 0.0
        self._overtaken_s = 0.0  # if it is well, it was that slow
        self._requests = 0

    def __repr__(self) -> str:
        return f"Member({self.name})"

    def store(self, collection: str) -> HttpStore:
        if collection not in self._stores:
            counts = self._counts.setdefault(collection, Stats())
            self._stores[collection] = HttpStore(self.client, collection=collection, counts=counts)
        return self._stores[collection]

    @contextmanager
    def asked(self) -> Iterator[None]:
        """While a request is under way, its connections stay."""
        self._requests += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self.idle.set()

    # what its answers tell

    @property
    def hedge_s(self) -> float:
        """Silence that says that something is wrong with it."""
        usual_s = max(self.client.limits.hedge_s, SLOW * self._slowest_s)
        return min(usual_s, max(LONGEST_HEDGE_S, self.client.limits.hedge_s))

    def heard(self, waited_s: float | None = None) -> None:
        """It said something, and first after so long."""
        self.heard_s = self._clock()
        if waited_s is not None:
            self._slowest_s = max(waited_s, FADING * self._slowest_s)

    def overtaken(self, waited_s: float) -> None:
        """It had not said anything after so long, when another node was done."""
        self._overtaken_s = max(waited_s, self._overtaken_s)

    def worked(self) -> None:
        self.heard_s = self._clock()
        self.is_up = True
        self._rest.worked()

    def failed(self, began_s: float) -> None:
        """A request that began then has failed, or is given up."""
        self.is_up = False
        self._rest.failed(began_s, self._clock(), self._rng)

    @property
    def has_rested(self) -> bool:
        return self._rest.is_over(self._clock())

    async def probe(self) -> bool:
        """Whether it says that it is well. What it is asked next shows whether it works."""
        began_s = self._clock()
        try:
            with self.asked():
                is_well = await self._is_well()
            if is_well:
                self.is_up, self.heard_s = True, self._clock()
                self._slowest_s = max(self._slowest_s, self._overtaken_s)
            elif self.heard_s <= began_s:  # nor did it answer anything else meanwhile
                self.failed(began_s)
        finally:
            self.is_doubted, self._overtaken_s = False, 0.0
        return self.is_up

    async def _is_well(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_S):
                told = (await self._prober.ask("GET", "/healthz")).json
        except (KdnError, OSError):  # a timeout, too
            return False
        return isinstance(told, dict) and told.get("status") == "ok"

    async def close(self) -> None:
        await self.client.close()
        await self._prober.close()
