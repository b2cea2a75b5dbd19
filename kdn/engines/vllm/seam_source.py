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

from kdn.background import fault
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
    """Its methods belong to the session's event loop. What is begun goes on in the background,
    whether or not somebody still waits for it: the next one finds it done."""

    def __init__(
        self, session: Session, tag: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`tag`: which seams are meant."""
        self._session, self._tag, self._clock = session, tag, clock
        self._finding: asyncio.Task[Fitted | None] | None = None
        self._folding: asyncio.Task[Codec] | None = None
        self._again_s = 0.0

    async def find(self, limit_s: float) -> Fitted | None:
        """Those of its tag, the same every time; None if there are none, or none in time."""
        task = self._finding
        if task is None or (
            task.done() and task.result() is None and self._clock() >= self._again_s
        ):
            task = self._finding = asyncio.create_task(self._find())
        await asyncio.wait([task], timeout=limit_s)
        return task.result() if task.done() else None

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

    async def close(self) -> None:
        tasks = [task for task in (self._finding, self._folding) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _codec(self, found: Fitted, limit_s: float) -> Codec:
        failed = self._folding is not None and self._folding.done() and self._folding.exception()
        if self._folding is None or failed:  # then once more: it may have lacked memory
            codec = self._session.codec
            self._folding = asyncio.create_task(asyncio.to_thread(codec.repaired, found.seams))
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(self._folding)

    async def _find(self) -> Fitted | None:
        try:
            seams = await find_seams(self._session, self._tag)
            if seams is not None:
                data = await asyncio.to_thread(seams.to_bytes)
                return Fitted(seams, blake2b(data, digest_size=16).digest())
            logger.warning("nothing is joined: there are no seams with the tag %r", self._tag)
        except (KdnError, OSError) as error:
            logger.warning("nothing is joined: %s", error)
        except Exception as error:
            fault("finding seams", error)
        self._again_s = self._clock() + AGAIN_S
        return None
