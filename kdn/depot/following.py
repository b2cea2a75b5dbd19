"""What one node of a shared store deletes, all others let go of: each asks every FOLLOW_S what was
removed, and drops it from its caches.

A node that could not ask for STALE_S reads past its caches until it can. So no node serves a
deleted object longer than STALE_S after the deletion was acknowledged, however it is cut off; as a
rule it is FOLLOW_S.

A cache on disk outlives its process: how far it has followed is kept beside it. Whoever was away
for so long that the store no longer knows what was removed since begins with empty caches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kdn.background import supervise
from kdn.depot.names import SharedNames
from kdn.errors import KdnError
from kdn.files import write_whole
from kdn.store.shared import SharedStore

logger = logging.getLogger(__name__)

FOLLOW_S = 2.0
STALE_S = 10.0
NOWHERE = -1
"""A sequence that no store knows."""


class Follower:
    def __init__(
        self,
        store: SharedStore,
        names: SharedNames,
        kept: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kept`: a file for how far it came, if a cache outlives the process."""
        self._store, self._names, self._kept, self._clock = store, names, kept, clock
        self._sequence = _read(kept)
        self._current_s: float | None = None  # when it last asked, with success
        store.is_current = self.is_current

    def is_current(self) -> bool:
        return self._current_s is not None and self._clock() - self._current_s < STALE_S

    async def run(self) -> None:
        """Until it is cancelled."""
        await supervise("following deletions", self._run)

    async def _run(self) -> None:
        is_told = False
        while True:
            try:
                async with asyncio.timeout(STALE_S):
                    await self.follow()
                is_told = False
            except (KdnError, OSError, TimeoutError) as error:
                if not is_told:
                    logger.warning("it is not known what others deleted, so caches rest: %s", error)
                is_told = True
            await asyncio.sleep(FOLLOW_S)

    async def follow(self) -> None:
        """Drop what was removed until now."""
        now_s = self._clock()
        if self._current_s is None:
            await self._names.sequence()  # from now on there is something to follow
        sequence, removed = await self._names.removed(self._sequence)
        if removed is None:
            await self._store.drop_all()
        for key in removed or ():
            await self._store.drop(key)
        if sequence != self._sequence and self._kept is not None:
            await asyncio.to_thread(_write, self._kept, sequence)
        self._sequence, self._current_s = sequence, now_s


def _read(kept: Path | None) -> int:
    with suppress(OSError, ValueError):
        if kept is not None:
            return int(kept.read_text("ascii"))
    return NOWHERE


def _write(kept: Path, sequence: int) -> None:
    write_whole(kept, str(sequence).encode(), kept.with_name(kept.name + ".new"))
