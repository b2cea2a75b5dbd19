"""Publishing what a model had to compute, in the background, so that nobody computes it again.

A chunk is read from its source, encoded in a thread, and put: one request. One encodes while one
is sent; both wait in bounded queues. A node that goes away is tried again, with growing pauses;
meanwhile chunks go to a spool on disk, if there is one, and are sent from there later. Whatever
goes wrong with one chunk is its own affair: it is counted, and the next one gets its turn.

Callers decide what is worth publishing: what nobody has yet, and whose values carry no losses.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count
from random import Random
from types import TracebackType
from typing import Protocol

from xxhash import xxh3_64_intdigest

from kdn.background import fault, supervise
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.header import Header
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.spool import Parcel, Spool
from kdn.errors import ChecksumError, KdnError, NoSpaceError, StoreError
from kdn.store.base import Hints, Store

PUT_S = 60.0
ATTEMPTS = 3
PARCELS = 2
QUEUE_BYTES = 1 << 30


class Source(Protocol):
    """Where the values of chunks are: an engine's memory, or tensors at hand."""

    def read(self, chunk: Chunk) -> KVCache:
        """The chunk's values, in memory that nobody else writes to."""


@dataclass(frozen=True)
class Values:
    """Values at hand. Each chunk is copied out of them, unless they are `final`: then nobody writes
    to them any more."""

    cache: KVCache
    final: bool = False

    def read(self, chunk: Chunk) -> KVCache:
        part = self.cache.slice(chunk.start, chunk.end)
        if self.final:
            return part
        return KVCache(part.keys.clone(), part.values.clone(), part.start, part.valid_from)


class Admission(Enum):
    """What becomes of a chunk that was given to `publish`."""

    QUEUED = "queued"
    ALREADY = "already on its way"
    LOSSY = "computed on top of losses: refused"
    FULL = "too much is waiting: refused"


@dataclass
class Counts:
    """Chunks since the publisher was opened."""

    published: int = 0
    known: int = 0
    """Another publisher was first: the place keeps what it has."""
    replaced: int = 0
    """Of the published ones, those in the place of a stream that was forged or does not decode."""
    refused: int = 0
    """Not encodable, not accepted by the store for good, or given up after a fault."""
    spooled: int = 0
    dropped: int = 0
    """Lost: no room to spool them, or no time left at the end."""
    failures: int = 0
    """Attempts that failed."""
    faults: int = 0
    """Failures nobody expected: a mistake in a codec or a store, which the log shows."""


@dataclass(frozen=True)
class Job:
    chunk: Chunk
    cache: KVCache
    saved_s: float


class Publisher:
    def __init__(
        self,
        place: Store | Endpoint,
        codec: Codec,
        *,
        spool: Spool | None = None,
        max_queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self.counts = Counts()
        self._endpoint = place if isinstance(place, Endpoint) else Endpoint(place)
        self._codec = codec
        self._spool = spool
        self._max_queue_bytes = max_queue_bytes
        self._clock = clock
        self._rng = rng or Random()
        self._jobs: deque[Job] = deque()
        self._queued_bytes = 0
        self._under_way: set[bytes] = set()  # keys from `publish` until stored, spooled or given up
        self._parcels: deque[Parcel] = deque()
        self._moved = asyncio.Event()  # set when a queue has changed
        self._tasks: list[asyncio.Task[None]] = []

    # for callers

    async def __aenter__(self) -> Publisher:
        self._tasks = [
            asyncio.create_task(supervise("encoding", self._encode_all)),
            asyncio.create_task(supervise("sending", self._send_all)),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def queued_bytes(self) -> int:
        """Of values that were read and are not encoded yet."""
        return self._queued_bytes

    def publish(self, chunk: Chunk, source: Source, *, saved_s: float = 0.0) -> Admission:
        """Read the chunk's values, now, and publish them later. What is not wanted is not read."""
        if chunk.key in self._under_way or (self._spool is not None and chunk.key in self._spool):
            return Admission.ALREADY
        if self._queued_bytes >= self._max_queue_bytes:
            return Admission.FULL
        cache = source.read(chunk)
        self._queued_bytes += cache.size_bytes
        self._under_way.add(chunk.key)
        self._jobs.append(Job(chunk, cache, saved_s))
        self._moved.set()
        return Admission.QUEUED

    async def flush(self, deadline_s: float) -> bool:
        """Wait until everything is stored or spooled; False if that took too long."""
        until_s = self._clock() + deadline_s
        while self._under_way:
            if not await self._wait(until_s):
                return False
        return True

    async def close(self, deadline_s: float = 5.0) -> None:
        """Finish what can be finished; what is encoded by then and not stored is spooled."""
        await self.flush(deadline_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._parcels:
            await self._put_aside(self._parcels.popleft())
        self.counts.dropped += len(self._under_way)
        self._under_way.clear()
        self._tasks = []

    async def _wait(self, until_s: float = float("inf")) -> bool:
        """For a change; False if it is too late."""
        left_s = until_s - self._clock()
        if left_s <= 0:
            return False
        self._moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, 1.0)):
                await self._moved.wait()
        return True

    def _done(self, key: bytes) -> None:
        self._under_way.discard(key)
        self._moved.set()

    def _refuse(self, key: bytes) -> None:
        self.counts.refused += 1
        self._done(key)

    def _fault(self, doing: str, error: Exception) -> None:
        self.counts.faults += 1
        fault(doing, error)

    # encoding

    async def _encode_all(self) -> None:
        while True:
            while not self._jobs or len(self._parcels) >= PARCELS:
                await self._wait()
            job = self._jobs.popleft()
            try:
                await self._encode(job)
            except Exception as error:
                self._fault("encoding a chunk", error)
                self._refuse(job.chunk.key)
            finally:
                self._queued_bytes -= job.cache.size_bytes

    async def _encode(self, job: Job) -> None:
        chunk = job.chunk
        try:
            data = await asyncio.to_thread(self._codec.encode, chunk, job.cache)
        except KdnError:
            self._refuse(chunk.key)
            return
        parent = chunk.parent if chunk.start else None  # a root has none that is stored
        hints = Hints(parent, job.saved_s)
        self._parcels.append(Parcel(chunk.key, Header.parse(data).stream_id, data, hints))
        self._moved.set()

    # sending

    async def _send_all(self) -> None:
        while True:
            if self._parcels:
                await self._send_next()
            elif self._spool and self._endpoint.is_ready(self._clock()):  # and not empty
                await self._send_spooled(self._spool)
            elif self._spool:
                await self._wait(self._endpoint.rests_until_s)
            else:
                await self._wait()

    async def _send_next(self) -> None:
        parcel = self._parcels[0]  # stays there meanwhile: `close` spools what was not sent
        try:
            await self._send(parcel)
        except Exception as error:
            self._fault("sending a chunk", error)
            self._refuse(parcel.key)
        self._parcels.popleft()
        self._moved.set()

    async def _send(self, parcel: Parcel) -> None:
        """Until it is stored, or, if there is a spool, until that is the better place for it."""
        away = self._spool is not None and not self._endpoint.is_ready(self._clock())
        for attempt in count(1):
            if not away and await self._try(parcel):
                break
            if self._spool is not None and (away or attempt >= ATTEMPTS):
                await self._put_aside(parcel)
                break
            await asyncio.sleep(max(0.0, self._endpoint.rests_until_s - self._clock()))
        self._done(parcel.key)

    async def _send_spooled(self, spool: Spool) -> None:
        parcel = await asyncio.to_thread(spool.first)
        if parcel is None:
            return
        began_s = self._clock()
        try:
            if await self._try(parcel):
                await asyncio.to_thread(spool.remove, parcel.key)
                self._moved.set()
        except Exception as error:
            self._fault("sending a spooled chunk", error)
            self._failed(began_s)
            spool.defer(parcel.key)  # it is safe where it is; others may have better luck

    async def _put_aside(self, parcel: Parcel) -> None:
        try:
            kept = self._spool is not None and await asyncio.to_thread(self._spool.add, parcel)
        except OSError:
            kept = False
        except Exception as error:
            self._fault("spooling a chunk", error)
            kept = False
        if kept:
            self.counts.spooled += 1
            self._done(parcel.key)
        elif self._spool is not None:
            self.counts.dropped += 1
            self._done(parcel.key)

    async def _try(self, parcel: Parcel) -> bool:
        """Put it. False if it is worth trying again."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(PUT_S):
                mine = await self._put(await self._endpoint.store(), parcel)
        except NoSpaceError:
            self.counts.refused += 1
        except (ChecksumError, StoreError, OSError):
            return self._failed(began_s)
        except KdnError:
            self.counts.refused += 1
        else:
            self._endpoint.worked()
            self.counts.published += mine
            self.counts.known += not mine
        return True

    async def _put(self, store: Store, parcel: Parcel) -> bool:
        """True if the store has these bytes, False if it keeps another's."""
        key, data = parcel.key, parcel.data
        checksum, bad = xxh3_64_intdigest(data), self._endpoint.rejected(key)
        entry = await store.put(
            key, data, etag=parcel.etag, checksum=checksum, hints=parcel.hints, replacing=bad
        )
        if bad is not None and entry.etag == parcel.etag:
            self._endpoint.accept(key)
            self.counts.replaced += 1
        return entry.etag == parcel.etag

    def _failed(self, began_s: float) -> bool:
        self.counts.failures += 1
        self._endpoint.failed(began_s, self._clock(), self._rng)
        return False
