"""How many names each tenant has, as last asked. Stores of names may be far away, and tenants many:
so each look asks for those that were not asked about for longest, and for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from kdn.depot.depot import Depot
from kdn.depot.names import Totals
from kdn.errors import KdnError

AT_ONCE = 100
"""Tenants that are asked about at each look."""
WAIT_S = 2.0
MAX_COUNTED = 100_000
"""Versions of more names than this are not counted."""


class Names(NamedTuple):
    totals: Totals
    versions: int | None
    """None: nobody knows."""


NONE = Names(Totals(0, 0, 0), None)


class Known:
    def __init__(self, depot: Depot):
        self._depot = depot
        self._names: dict[str, Names] = {}  # those asked about longest ago come first
        self.answers = True
        """Whether the store of names answered the last time."""

    @property
    def names(self) -> Mapping[str, Names]:
        return self._names

    async def refresh(self) -> None:
        new = [one.name for one in self._depot.tenants if one.name not in self._names]
        try:
            async with asyncio.timeout(WAIT_S):
                for tenant in [*new, *self._names][:AT_ONCE]:
                    found = await self._ask(tenant)
                    self._names.pop(tenant, None)
                    self._names[tenant] = found
        except (KdnError, OSError, TimeoutError):
            self.answers = False
        else:
            self.answers = True

    async def _ask(self, tenant: str) -> Names:
        """Versions are counted anew only if something changed."""
        totals, before = await self._depot.names.known(tenant), self._names.get(tenant)
        if before is not None and totals == before.totals:
            return before
        if totals.names > MAX_COUNTED:
            return Names(totals, None)
        return Names(totals, await self._depot.names.num_versions(tenant))
