"""What was put here and is not yet at the centre: durable, bounded, sent in the background.

An object is acknowledged when it is in the outbox, a store on disk of its own from which nothing is
evicted; it leaves the outbox when the centre has answered for its key. So what only this region has
is never dropped, whatever happens to the region's other copies.

A few objects are sent at a time. When one cannot be sent, all wait: ever longer, and each time a
random part of it, so that many regions do not come back together. Then one goes first, two next,
and so on: after a long cut the centre is not overrun. What the centre refuses is tried again much
later, and is not in the way of others.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing

from xxhash import xxh3_64_intdigest

from kdn.background import supervise
from kdn.errors import FormatError, KdnError, MismatchError, NoSpaceError, RefusedError
from kdn.store.base import Entry, Hints, Store
from kdn.store.evict import Policy
from kdn.store.tally import Usage

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 4
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
REFUSED_PAUSE_S = 300.0
SEND_S = 600.0
"""For one object to be sent, over however slow a link."""
ASK_S = 20.0
_REFUSALS = (NoSpaceError, RefusedError, FormatError, MismatchError)

Settled = Callable[[Entry, Entry], Awaitable[None]]
"""Called with what was sent and what the centre has under its key."""


class KeepAll(Policy):
    """Nothing may go: a full store refuses what is new."""

    def add(self, key: bytes, size_bytes: int, hints: Hints) -> None: ...

    def touch(self, key: bytes, start: int = 0, end: int | None = None) -> None: ...

    def remove(self, key: bytes) -> None: ...

    def victim(self, held: bool = False) -> bytes | None:
        return None

    def hold(self, key: bytes) -> None: ...

    def release(self, key: bytes) -> None: ...


class Outbox:
    def __init__(
        self,
        store: Store,
        spare: Store,
        centre: Store,
        settled: Settled,
        *,
        jitter: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store` is all its own, with `KeepAll`; `spare` may have the same objects."""
        self.store, self._spare, self._centre, self._settled = store, spare, centre, settled
        self._jitter, self._clock = jitter, clock
        self._waiting: dict[bytes, Entry] = {}  # those to be sent first come first
        self._not_before_s: dict[bytes, float] = {}  # of what the centre refused
        self._added = asyncio.Event()
        self._sending: set[bytes] = set()
        self._leaving: set[bytes] = set()  # being deleted from the store
        self._left = asyncio.Condition()  # told when something leaves either of them
        self._is_failing = False
        self._task: asyncio.Task[None] | None = None
        self.sent = 0
        self.failures = 0
        self.refused = 0
        """Times that the centre said no."""
        self.lost = 0
        """Objects that were damaged on disk before they were sent."""

    async def open(self) -> None:
        """With what earlier processes left."""
        async with aclosing(self.store.list()) as entries:
            async for entry in entries:
                self._waiting[entry.key] = entry
        self._added.set()
        self._task = asyncio.create_task(supervise("the outbox", self._run))

    @property
    def is_failing(self) -> bool:
        """The last attempt to send something did not reach the centre."""
        return self._is_failing

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def usage(self, prefix: bytes) -> Usage:
        return self.store.usage(prefix)

    async def add(self, entry: Entry, data: bytes, checksum: int) -> Entry:
        """The entry that waits under this key: this one, or an earlier. It survives a power loss.
        NoSpaceError if the outbox is full."""
        kept = await self.store.put_entry(entry, data, checksum)
        self._waiting.setdefault(kept.key, kept)
        self._added.set()
        return kept

    def found(self, entry: Entry) -> None:
        """It is in the store, so it has to be sent. A put that took too long, or that nobody waited
        for, may have ended with it there and nobody told."""
        if entry.key not in self._waiting and entry.key not in self._leaving:
            self._waiting[entry.key] = entry
            self._added.set()

    async def remove(self, key: bytes) -> bool:
        """It need not be sent any more."""
        self._leaving.add(key)
        try:
            was_here = await self.store.delete(key)
            self._waiting.pop(key, None)
            self._not_before_s.pop(key, None)
        finally:
            self._leaving.discard(key)
        await self._tell()
        return was_here

    async def withdraw(self, key: bytes) -> bool:
        """The same, and when this returns it is not on its way either."""
        was_here = await self.remove(key)
        async with self._left:
            await self._left.wait_for(lambda: key not in self._sending)
        return was_here

    async def _tell(self) -> None:
        async with self._left:
            self._left.notify_all()

    async def hurry(self, keys: Iterable[bytes], wait_s: float) -> bool:
        """Send these first, and wait so long, unless the centre is away: whether none is left."""
        first = {key: self._waiting[key] for key in keys if key in self._waiting}
        if not first or self._is_failing:
            return not first
        rest = {key: entry for key, entry in self._waiting.items() if key not in first}
        self._waiting = first | rest
        try:
            async with asyncio.timeout(wait_s), self._left:
                await self._left.wait_for(lambda: not first.keys() & self._waiting.keys())
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """What waits is sent by the next process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.store.close()

    async def _run(self) -> None:
        at_once, pause_s = 1, FIRST_PAUSE_S
        while True:
            batch = self._next(at_once)
            if not batch:
                await self._rest()
                continue
            self._is_failing = not await self._send_all(batch)
            if not self._is_failing:
                at_once, pause_s = min(2 * at_once, MAX_AT_ONCE), FIRST_PAUSE_S
                continue
            self.failures += 1
            await asyncio.sleep(pause_s * (0.5 + self._jitter()))
            at_once, pause_s = 1, min(2 * pause_s, LONGEST_PAUSE_S)

    def _next(self, count: int) -> list[Entry]:
        now_s, batch = self._clock(), []
        for key, entry in self._waiting.items():
            if self._not_before_s.get(key, 0.0) <= now_s:
                batch.append(entry)
                if len(batch) == count:
                    break
        return batch

    async def _rest(self) -> None:
        """Until something is added, or what was refused may be tried again."""
        self._added.clear()
        again_s = min(self._not_before_s.values(), default=None)
        wait_s = None if again_s is None else max(0.0, again_s - self._clock()) + 0.01
        try:
            async with asyncio.timeout(wait_s):
                await self._added.wait()
        except TimeoutError:
            pass

    async def _send_all(self, batch: Sequence[Entry]) -> bool:
        """Whether the centre answered for all of them."""
        try:
            async with asyncio.timeout(ASK_S):
                there = await self._centre.lookup([entry.key for entry in batch])
        except _REFUSALS as error:
            if len(batch) == 1:
                self._refuse(batch[0], error)
                return True
            # As of a tenant whose token is not the right one: that is not the others' affair.
            return all([await self._send_all([entry]) for entry in batch])
        except (KdnError, OSError, TimeoutError) as error:
            logger.info("the centre cannot be reached: %s", error)
            return False
        sending = [self._send(one, kept) for one, kept in zip(batch, there, strict=True)]
        return all(await asyncio.gather(*sending))

    async def _send(self, entry: Entry, kept: Entry | None) -> bool:
        """`kept`: what the centre has already, of which no byte need travel."""
        if self._waiting.get(entry.key) != entry:
            return True  # withdrawn
        self._sending.add(entry.key)
        try:
            is_less = kept is not None and kept.etag == entry.etag  # as of a stream that was cut
            if kept is None or (is_less and kept.size_bytes < entry.size_bytes):
                data = await self._read(entry)
                if data is None:
                    return True
                checksum = xxh3_64_intdigest(data)
                async with asyncio.timeout(SEND_S):
                    kept = await self._centre.put_entry(entry, data, checksum)
            await self._settled(entry, kept)
            if self._waiting.get(entry.key) == entry:
                await self.remove(entry.key)
            self.sent += 1
            return True
        except _REFUSALS as error:
            self._refuse(entry, error)
            return True
        except (KdnError, OSError, TimeoutError) as error:
            logger.info("could not send %s: %s", entry.key.hex(), error)
            return False
        finally:
            self._sending.discard(entry.key)
            await self._tell()

    def _refuse(self, entry: Entry, error: KdnError) -> None:
        """Later again, behind all others."""
        if self._waiting.get(entry.key) != entry:
            return  # withdrawn
        self.refused += 1
        self._waiting[entry.key] = self._waiting.pop(entry.key)
        self._not_before_s[entry.key] = self._clock() + REFUSED_PAUSE_S
        logger.warning("the centre refuses %s: %s", entry.key.hex(), error)

    async def _read(self, entry: Entry) -> bytes | None:
        for store in (self.store, self._spare):
            span = await store.get(entry.key, etag=entry.etag)
            if span is not None and len(span.data) == entry.size_bytes:
                return bytes(span.data)
        if self._waiting.get(entry.key) == entry:  # not withdrawn meanwhile
            self.lost += 1
            self._waiting.pop(entry.key)
            self._not_before_s.pop(entry.key, None)
            logger.error("%s was damaged before it was sent: it is lost", entry.key.hex())
        return None
