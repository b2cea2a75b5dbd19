"""How much a tenant holds, where many nodes share a store.

The shared store has the sum (`SharedNames.count`). Asking it for every object would be a request
more for each. So a node counts by itself until what it has not told comes to a 64th of the quota;
then it tells that and learns the sum, before it acknowledges more, and before it refuses anything.
A quota is thus exceeded by at most a 64th of it for every node, and by what is on its way in at
that moment. A node tells the rest every COUNT_S, and when it closes.

The sum may drift: a node dies before it told all, two put the same object at the same moment, the
store evicts by itself. So now and then (`SharedNames.recount_s`) one node lists what a tenant with
a quota has, in the background, and sets the sum right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

from kdn.background import supervise
from kdn.depot.names import SharedNames
from kdn.depot.tenants import Tenant
from kdn.errors import KdnError, StoreError
from kdn.store.base import Store
from kdn.store.tally import Usage

logger = logging.getLogger(__name__)

SHARE = 64
COUNT_S = 60.0


class SharedCounts:
    def __init__(self, names: SharedNames, store: Store, tenants: Sequence[Tenant]) -> None:
        self._names, self._store, self._tenants = names, store, tenants
        self._untold = {tenant.name: Usage() for tenant in tenants}
        self._sums: dict[str, Usage] = {}  # as last learnt
        self._manifests = dict.fromkeys(self._untold, 0)  # put here since then
        self._telling = {tenant.name: asyncio.Lock() for tenant in tenants}

    def add(self, tenant: Tenant, objects: int, size_bytes: int) -> None:
        """They came, or went."""
        untold = self._untold[tenant.name]
        untold.objects += objects
        untold.size_bytes += size_bytes

    def add_manifest(self, tenant: Tenant, size_bytes: int) -> None:
        """The names have counted it already: the next sum has it."""
        self._manifests[tenant.name] += size_bytes

    async def held(self, tenant: Tenant) -> Usage:
        """As all nodes have told by now."""
        await self._tell(tenant)
        return self._now(tenant)

    async def settle(self, tenant: Tenant) -> None:
        """Tell what was added, if it is much."""
        untold = abs(self._untold[tenant.name].size_bytes)
        if tenant.quota.limit_bytes and untold > tenant.quota.limit_bytes // SHARE:
            try:
                await self._tell(tenant)
            except StoreError as error:  # the object is there: it is told with the next one
                logger.warning("what %s holds was not told: %s", tenant.name, error)

    async def check(self, tenant: Tenant, more_bytes: int) -> None:
        """QuotaError if so much more would be too much."""
        untold = abs(self._untold[tenant.name].size_bytes)
        untold += self._manifests[tenant.name] + more_bytes
        is_known = tenant.name in self._sums and untold <= tenant.quota.limit_bytes // SHARE
        if is_known and tenant.quota.fits(more_bytes, self._now(tenant).size_bytes):
            return
        await self._tell(tenant)
        tenant.quota.check(more_bytes, self._now(tenant).size_bytes)

    def _now(self, tenant: Tenant) -> Usage:
        known, untold = self._sums[tenant.name], self._untold[tenant.name]
        size_bytes = known.size_bytes + untold.size_bytes + self._manifests[tenant.name]
        return Usage(max(0, known.objects + untold.objects), max(0, size_bytes))

    async def _tell(self, tenant: Tenant) -> None:
        name = tenant.name
        async with self._telling[name]:
            told, self._untold[name] = self._untold[name], Usage()
            try:
                self._manifests[name] = 0
                self._sums[name] = await self._names.count(name, told)
            except BaseException:  # it may have been counted: then it is counted twice
                self.add(tenant, told.objects, told.size_bytes)
                raise

    async def run(self) -> None:
        """Until it is cancelled."""
        await supervise("counting what tenants hold", self._run)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            await self.tell_all()
            for tenant in self._tenants:
                if tenant.quota.limit_bytes:
                    try:
                        await self.recount(tenant, self._names.recount_s)
                    except KdnError as error:
                        logger.warning("what %s holds was not counted: %s", tenant.name, error)

    async def tell_all(self) -> None:
        """What this node has not told yet, as far as the store answers."""
        for tenant in self._tenants:
            if self._untold[tenant.name] != Usage():
                try:
                    await self._tell(tenant)
                except KdnError as error:
                    logger.warning("what %s holds was not told: %s", tenant.name, error)

    async def recount(self, tenant: Tenant, every_s: float) -> None:
        """List all of a tenant's objects, and set the sum right; if nobody did so lately."""
        if not await self._names.begin_recount(tenant.name, every_s):
            return
        believed = await self._names.count(tenant.name, Usage())
        manifests = (await self._names.totals(tenant.name)).size_bytes
        found = Usage()
        async with aclosing(self._store.list(tenant.prefix)) as entries:
            async for entry in entries:
                found.objects += 1
                found.size_bytes += entry.size_bytes
        wrong = Usage(
            found.objects - believed.objects, found.size_bytes - believed.size_bytes + manifests
        )
        if wrong != Usage():
            self._sums[tenant.name] = await self._names.count(tenant.name, wrong)
