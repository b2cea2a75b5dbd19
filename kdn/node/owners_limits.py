"""Limits that all workers of a node have together, kept by its owner: rates, and the way out."""

from __future__ import annotations

import asyncio

from kdn.depot.tenants import Tenant
from kdn.node.egress import DEFAULT_MAX_WAIT_S, Egress, Turn
from kdn.node.link import Link
from kdn.node.scheduler import FairQueue
from kdn.node.tenants import Rate

ANSWER_S = 5.0


class OwnersRate(Rate):
    """A tenant's rate of requests, whichever workers they come to."""

    def __init__(self, link: Link, tenant: Tenant):
        self._link = link
        self._tenant = tenant.name
        self.per_s = tenant.settings.requests_per_s

    def take_now(self) -> bool:
        """Where there is a limit, the owner has to be asked, and that takes a moment."""
        return not self.per_s

    async def wait_s(self) -> int:
        if not self.per_s:
            return 0
        answer, _ = await self._link.ask("rate", ANSWER_S, tenant=self._tenant)
        return int(answer["wait_s"])


class OwnersEgress(Egress):
    """A link of a limited rate, which the owner shares among tenants and clients of all workers."""

    def __init__(self, link: Link):
        super().__init__(FairQueue())
        self._link = link

    @property
    def is_free(self) -> bool:
        return False

    async def _begin(self, turn: Turn) -> None:
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        await self._link.ask(
            "turn", DEFAULT_MAX_WAIT_S + ANSWER_S,
            tenant=turn.tenant, client=turn.client, num_bytes=turn.num_bytes,
        )  # fmt: skip
        turn.waited_s = loop.time() - begin_s

    def _end(self) -> None:
        """The owner's turn ended when it was granted."""
