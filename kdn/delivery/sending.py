"""How an encoded chunk is accepted: by its place, or, while that is away, by the spool on disk.

A place that fails is tried again, with growing pauses. What was spooled is sent when it is back.
One that refuses is not asked again: the chunk is given up. If it was spooled, it stays for others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random

from xxhash import xxh3_64_intdigest

from kdn.background import fault
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.parcel import Parcel
from kdn.delivery.spool import Spool
from kdn.errors import (
    ChecksumError,
    KdnError,
    NoSpaceError,
    NotAllowedError,
    RefusedError,
    StoreError,
)
from kdn.protocol.limits import SLOWEST_BYTES_S
from kdn.store.rest import Rest

logger = logging.getLogger(__name__)

PUT_S = 60.0
"""And longer for many bytes (`SLOWEST_BYTES_S`)."""
ATTEMPTS = 3

REFUSALS = 3
"""So many spooled chunks are refused, one after the other, before the spool is left to others."""
MAX_REFUSED = 4096
MAX_REASON_CHARS = 500

SPOOL_PAUSE_S = 60.0
"""How long a spool that is full, or cannot be written to, is left alone."""


@dataclass
class Counts:
    """Chunks since the publisher was opened, with those that it found in the spool."""

    published: int = 0
    """The place has these very bytes."""
    known: int = 0
    """Another publisher was first: the place keeps what it has."""
    replaced: int = 0
    """Published chunks that replaced a stream that was forged, did not decode, or lacked levels."""
    refused: int = 0
    """Not encodable, not accepted by the place for good, or given up after a fault."""
    spooled: int = 0
    """Safe on disk. When they are sent, they count among the published, known or refused, too."""
    dropped: int = 0
    """Lost when the publisher was closed: no time left, or no room to spool them."""
    failures: int = 0
    """Attempts that failed."""
    faults: int = 0
    """Failures nobody expected: a mistake in a codec or a store, which the log shows."""


OnAccepted = Callable[[bytes], None]
"""Hears the key of each chunk that the place has, now that it was sent there."""
OnRefused = Callable[[bytes, str], None]
"""Hears the key of each chunk that was given up, and why."""


class Sender:
    def __init__(
        self,
        endpoint: Endpoint,
        spool: Spool | None = None,
        on_accepted: OnAccepted | None = None,
        on_refused: OnRefused | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self.counts = Counts()
        self.endpoint = endpoint
        self._spool, self._on_accepted, self._on_refused = spool, on_accepted, on_refused
        self._clock = clock
        self._rng = rng or Random()
        self.refused: OrderedDict[bytes, str] = OrderedDict()
        """Why, by key: of the last MAX_REFUSED ones."""
        self._rest = Rest()  # of the place
        self._spool_rest = Rest()  # of reading from it
        self._refused_in_a_row = 0  # of those in the spool
        self._trouble: Exception | None = None  # with adding to the spool, the last time
        self._may_add_from_s = 0.0

    @property
    def spool_rests_until_s(self) -> float:
        """When what was spooled is worth a try: the place has to work, and the disk."""
        return max(self._rest.until_s, self._spool_rest.until_s)

    async def send(self, parcel: Parcel) -> None:
        """Until the place or the spool has accepted it, or the place has refused it for good."""
        away = self._spool is not None and not self._rest.is_over(self._clock())
        for attempt in count(1):
            try:
                if not away and await self._try(parcel):
                    return
            except (NoSpaceError, RefusedError) as error:
                self.refuse(parcel.key, error)
                return
            if (away or attempt >= ATTEMPTS) and await self.put_aside(parcel):
                return
            away = False  # the spool is full, or there is none
            await asyncio.sleep(max(0.0, self._rest.until_s - self._clock()))

    async def send_spooled(self, spool: Spool) -> None:
        """The oldest one. Whatever fails, it is safe where it is; others may have better luck."""
        began_s, parcel = self._clock(), None
        try:
            parcel = await asyncio.to_thread(spool.first)
            if parcel is None:
                return
            if await self._try(parcel):
                await asyncio.to_thread(spool.remove, parcel.key)
                self._spool_rest.worked()
                self._refused_in_a_row = 0
        except (NoSpaceError, RefusedError) as error:
            self._refused_in_a_row += 1
            is_stranger = isinstance(error, NotAllowedError)
            if is_stranger and self._refused_in_a_row >= min(REFUSALS, len(spool)):
                await self._leave(spool, error)
            elif self._refused_in_a_row >= len(spool):  # all of them: there may be room later
                self._refused_in_a_row = 0
                self._spool_rest.until_s = self._clock() + SPOOL_PAUSE_S
        except Exception as error:
            self.fault("sending a spooled chunk", error)
            self.counts.failures += 1
            self._spool_rest.failed(began_s, self._clock(), self._rng)
        if parcel is not None:
            await asyncio.to_thread(spool.defer, parcel.key)  # if it is still there

    async def _leave(self, spool: Spool, why: StoreError) -> None:
        """To processes that the place trusts more."""
        keys = spool.keys()
        logger.warning("%d spooled chunks are left to other processes: %s", len(keys), why)
        for key in keys:
            self._note(key, why)
        self._spool = None
        await asyncio.to_thread(spool.close)

    async def put_aside(self, parcel: Parcel) -> bool:
        """Into the spool; False if there is none. One that takes nothing is left alone a while."""
        if self._spool is None or self._clock() < self._may_add_from_s:
            return False
        trouble: Exception | None = None
        try:
            if not await asyncio.to_thread(self._spool.add, parcel):
                trouble = NoSpaceError("it is full")
        except (OSError, StoreError) as error:
            trouble = error
        except Exception as error:
            self.fault("spooling a chunk", error)
            trouble = error
        if type(trouble) is not type(self._trouble):
            now = f"takes no chunks: {trouble}" if trouble else "takes chunks again"
            logger.warning("the spool for %s %s", self.endpoint.name, now)
        self._trouble = trouble
        if trouble is not None:
            self._may_add_from_s = self._clock() + SPOOL_PAUSE_S
        self.counts.spooled += trouble is None
        return trouble is None

    def try_spool_again(self) -> None:
        """Once, even if it is left alone."""
        self._may_add_from_s = 0.0

    def refuse(self, key: bytes, why: Exception) -> None:
        """This chunk is given up."""
        self.counts.refused += 1
        self._note(key, why)
        if self._on_refused is not None:
            self._on_refused(key, str(why)[:MAX_REASON_CHARS])
        if self.counts.refused.bit_count() == 1:  # ever more rarely
            logger.warning("a chunk was refused (%d by now): %s", self.counts.refused, why)

    def _note(self, key: bytes, why: Exception) -> None:
        self.refused[key] = str(why)[:MAX_REASON_CHARS]
        self.refused.move_to_end(key)
        if len(self.refused) > MAX_REFUSED:
            self.refused.popitem(last=False)

    def fault(self, doing: str, error: Exception) -> None:
        self.counts.faults += 1
        fault(doing, error)

    async def _try(self, parcel: Parcel) -> bool:
        """Put it. False if it is worth trying again soon; NoSpaceError or RefusedError if not."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(PUT_S + len(parcel.data) / SLOWEST_BYTES_S):
                mine = await self._put(parcel)
        except (NoSpaceError, RefusedError):
            raise
        except (ChecksumError, StoreError, OSError):
            return self._failed(began_s)
        except KdnError as error:
            self.refuse(parcel.key, error)
        else:
            self._rest.worked()
            self.counts.published += mine
            self.counts.known += not mine
            if self._on_accepted is not None:
                self._on_accepted(parcel.key)
        return True

    async def _put(self, parcel: Parcel) -> bool:
        """True if the place has these bytes, False if it keeps another's."""
        bad = self.endpoint.gives_way(parcel.key, len(parcel.data)) or parcel.replacing
        entry = await self.endpoint.store.put(
            parcel.key, parcel.data, etag=parcel.etag, checksum=xxh3_64_intdigest(parcel.data),
            hints=parcel.hints, replacing=bad,
        )  # fmt: skip
        mine = entry.etag == parcel.etag
        if mine and bad is not None:
            self.endpoint.accept(parcel.key)
            self.counts.replaced += 1
        return mine

    def _failed(self, began_s: float) -> bool:
        self.counts.failures += 1
        self._rest.failed(began_s, self._clock(), self._rng)
        return False
