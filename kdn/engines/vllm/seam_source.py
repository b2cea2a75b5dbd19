"""The seams that an engine repairs joins with: found when they are first needed, then kept.

The scheduler's side decides by them what is joined, the worker's side decodes with them: orders say
which seams are meant, so both use the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from kdn.blend.seams import Seams
from kdn.codec.base import Codec
from kdn.errors import KdnError, MismatchError
from kdn.session.seams import find_seams
from kdn.session.session import Session

logger = logging.getLogger(__name__)

AGAIN_S = 60.0
"""So long after none were found nobody is asked again."""


@dataclass(frozen=True)
class Fitted:
    seams: Seams
    seams_id: bytes

    @property
    def kld(self) -> float:
        """What joins are expected to diverge by over some tokens, with nothing recomputed."""
        found = self.seams.expected.get(0.0)
        return float("inf") if found is None else found[1]


class SeamSource:
    """Its methods belong to the session's event loop."""

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._clock = session, clock
        self.tag = ""
        """Which are meant."""
        self._found: Fitted | None = None
        self._again_s = 0.0
        self._repaired: Codec | None = None
        self._lock = asyncio.Lock()  # one looks for them, or folds them in, at a time

    async def find(self, limit_s: float) -> Fitted | None:
        """Those of its tag, the same every time; None if there are none, or none in time."""
        if self._found is not None or self._clock() < self._again_s:
            return self._found
        try:
            async with asyncio.timeout(limit_s), self._lock:
                if self._found is None:
                    self._found = await self._fetch()
        except TimeoutError:
            return None  # with more time, or on another try, there may be some
        if self._found is None:
            self._again_s = self._clock() + AGAIN_S
        return self._found

    async def _fetch(self) -> Fitted | None:
        try:
            seams = await find_seams(self._session, self.tag)
        except (KdnError, OSError) as error:
            logger.warning("nothing is joined: %s", error)
            return None
        if seams is None:
            logger.warning("nothing is joined: there are no seams with the tag %r", self.tag)
            return None
        data = await asyncio.to_thread(seams.to_bytes)
        return Fitted(seams, blake2b(data, digest_size=16).digest())

    async def repairing(self, seams_id: bytes, limit_s: float) -> tuple[Codec, Seams]:
        """The session's codec, repaired by these seams; MismatchError if others are here."""
        found = await self.find(limit_s)
        if found is None or found.seams_id != seams_id:
            raise MismatchError("the seams that a join is to be repaired with are not here")
        return await self._codec(found, limit_s), found.seams

    async def prepare(self, limit_s: float) -> Codec | None:
        """The codec that repairs, before it is needed; None if there are no seams."""
        found = await self.find(limit_s)
        return None if found is None else await self._codec(found, limit_s)

    async def _codec(self, found: Fitted, limit_s: float) -> Codec:
        async with asyncio.timeout(limit_s), self._lock:
            if self._repaired is None:
                codec = self._session.codec
                self._repaired = await asyncio.to_thread(codec.repaired, found.seams)
            return self._repaired
