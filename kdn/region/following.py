"""A region listens to the centre's change feed of names, and knows how old what it knows is.

The age needs no clocks that agree, and no trust in a link that may hold bytes back: the centre says
how long after the request it had told everything, and the request was sent no later than it
arrived. So if `age_s` seconds after the arrival all was told, all was told `age_s` seconds after
the sending, or later.

After a cut the region goes on where it was. If the centre has forgotten that place, all names are
listed, page by page. Many regions that were cut together come back at random times.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kdn.checked import is_name
from kdn.depot.names import Version
from kdn.errors import KdnError, StoreError
from kdn.protocol.limits import MAX_LISTED, MAX_VERSION
from kdn.region.centre_names import CentreNames, sequence_of
from kdn.region.names_copy import NamesCopy, Newest
from kdn.store.http_answers import member

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
MAX_TOLD = 500
"""Changes that are written to the copy at once."""
WRITE_S = 5.0
"""Between two writes of where the feed is, while nothing changes."""
FORGOTTEN = 410

Gone = Callable[[Version], Awaitable[None]]
"""Called when a name was deleted, with the version whose manifest is still here."""


async def _ignore(held: Version) -> None:
    """Nobody wants to know."""


class Following:
    """One tenant's feed."""

    def __init__(
        self,
        tenant: str,
        centre: CentreNames,
        copy: NamesCopy,
        *,
        gone: Gone = _ignore,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.tenant, self._centre, self._copy = tenant, centre, copy
        self._gone, self._clock, self._jitter = gone, clock, jitter
        self._view = copy.view(tenant)
        self._as_of_s = float("-inf")
        self._usable_from = 0  # position before which a new list is not yet one moment's
        self._pending: list[Newest] = []
        self._written_s = float("-inf")
        self.times_renewed = 0

    @property
    def age_s(self) -> float:
        """How long ago all that is here was all that there is; infinite while nobody knows."""
        if self._view.position < self._usable_from:
            return float("inf")
        return self._clock() - self._as_of_s

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = self._clock()
            try:
                await self._listen()
                logger.info("the centre has ended the feed")
            except (KdnError, OSError, TimeoutError) as error:
                logger.info("the feed of names broke off: %s", error)
            if self._clock() - began_s > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s * (0.5 + self._jitter()))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _listen(self) -> None:
        sent_s = self._clock()
        async with self._centre.changes(self._view.position) as (reply, lines):
            if reply.status == 200:
                try:
                    async for line in lines:
                        await self._hear(line, sent_s)
                finally:
                    await self._write()
                return
        if reply.status != FORGOTTEN:
            raise reply.error("the centre")
        await self._renew(sequence_of(reply))

    async def _hear(self, line: bytes, sent_s: float) -> None:
        told = _parse(line)
        sequence = member(told, "sequence", int)
        if sequence < self._view.position:
            raise StoreError(f"expected a sequence after {self._view.position}, found {sequence}")
        if "name" in told:
            await self._change(_newest(told), sequence)
            return
        age_s = member(told, "age_s", float)
        if not 0 <= age_s < float("inf"):
            raise StoreError(f"expected an age, found {age_s}")
        self._view.position = sequence
        # Never later than now, whatever the centre says.
        self._as_of_s = min(max(self._as_of_s, sent_s + age_s), self._clock())
        if self._pending or self._clock() - self._written_s > WRITE_S:
            await self._write()

    async def _change(self, newest: Newest, sequence: int) -> None:
        """In memory at once, so that position and names always fit together."""
        view, held = self._view, None
        if newest.etag is None:
            view.names.pop(newest.name, None)
            held = view.held.pop(newest.name, None)
        else:
            view.names[newest.name] = newest
        view.position = sequence
        self._pending.append(newest)
        if held is not None:
            await self._gone(held)
        if len(self._pending) >= MAX_TOLD:
            await self._write()

    async def _write(self) -> None:
        changes, self._pending = self._pending, []
        self._written_s = self._clock()
        await self._copy.write(self.tenant, changes, self._view.position, time.time())

    async def _renew(self, sequence: int) -> None:
        """List all names. While that goes on names change, so that the list is of no one moment:
        only when the feed has come to its end is it right."""
        names: list[Newest] = []
        after, last = "", sequence
        while True:
            page, last = await self._centre.page("", after, MAX_LISTED)
            if any(one.name <= after or not is_name(one.name) for one in page):
                raise StoreError(f"expected names after {after!r}")
            names += (Newest(one.name, one.version, one.etag) for one in page)
            if len(page) < MAX_LISTED:
                break
            after = page[-1].name
        left = {one.name for one in names}
        for held in [one for one in self._view.held.values() if one.name not in left]:
            await self._gone(held)
        self._as_of_s, self._usable_from = float("-inf"), last
        self._pending = []
        await self._copy.renew(self.tenant, names, sequence, time.time())
        self.times_renewed += 1


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"expected a change in JSON, found {line[:200]!r}") from error


def _newest(told: Any) -> Newest:
    name, version = member(told, "name", str), member(told, "version", int)
    etag = told.get("etag")
    if not is_name(name) or not 0 < version <= MAX_VERSION:
        raise StoreError(f"expected a change of a name, found {str(told)[:200]}")
    if etag is not None and not (isinstance(etag, str) and 0 < len(etag) <= 64):
        raise StoreError(f"expected an etag, found {str(etag)[:200]}")
    return Newest(name, version, etag)
