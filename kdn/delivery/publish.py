"""Publishing what a model had to compute, in the background, so that nobody computes it again.

A chunk is read from its source, encoded in a thread, and put: one request. One encodes while one
is sent (sending.py); both wait in bounded queues. Chunks whose values are on a GPU are encoded a
few at a time, and more of them may wait to be sent, so that the GPU's memory is soon free. While a
place is away, chunks wait in the spool on disk, if there is one, else in memory. Whatever goes
wrong with one chunk is its own affair: it is counted, and the next one gets its turn.

Callers decide what is worth publishing: what nobody has yet, and whose values carry no losses.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from random import Random
from typing import NamedTuple, Protocol, runtime_checkable

from kdn.background import fault, outwait, supervise
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.header import Header
from kdn.defaults import QUEUE_BYTES
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.parcel import Parcel
from kdn.delivery.sending import Counts, OnAccepted, OnRefused, Sender
from kdn.delivery.spool import Spool
from kdn.errors import KdnError
from kdn.store.base import Hints, Store
from kdn.tracing import Request, span

PARCELS = 2
"""Encoded chunks that wait to be sent."""
GPU_PARCELS = 32
GPU_SHARE = 0.02
"""The share of a core's time that encoding on a GPU may take while nobody waits for it."""
MAX_REST_S = 1.0
"""The first batch compiles kernels, and takes long."""
GPU_BATCH = 4
"""Chunks on a GPU that are encoded together."""

OnEncoded = Callable[[Chunk, bytes], None]
"""Gets each stream; called in a thread."""

ADOPT_S = 30.0
"""How often the spool is searched for chunks of processes that died."""


class Source(Protocol):
    """Where the values of chunks are: in an engine's memory, or in given tensors."""

    def read(self, chunk: Chunk) -> KVCache:
        """The chunk's values, in memory that nobody else writes to."""


@runtime_checkable
class Lent(Source, Protocol):
    """A source in memory that its owner wants back."""

    def give_back(self) -> None:
        """Called once nobody reads from it any more."""


@dataclass(frozen=True)
class Values:
    """A source of given tensors. Each chunk is copied, unless the values are `final`: then nobody
    writes to them any more."""

    cache: KVCache
    final: bool = False

    def read(self, chunk: Chunk) -> KVCache:
        part = self.cache.slice(chunk.start, chunk.end)
        return part if self.final else part.copy()


class Admission(Enum):
    """What becomes of a chunk that was given to `publish`."""

    QUEUED = "queued"
    ALREADY = "already on its way"
    LOSSY = "computed on top of losses: refused"
    FULL = "too much is waiting: refused"
    READ_ONLY = "the place takes nothing: refused"


@dataclass(frozen=True)
class Job:
    chunk: Chunk
    cache: KVCache
    saved_s: float
    source: Source
    levels: int | None
    """To be stored, the coarsest of them; None: all."""

    @property
    def is_on_gpu(self) -> bool:
        return self.cache.keys.is_cuda

    def end(self) -> None:
        """Its values are not needed any more."""
        if isinstance(self.source, Lent):
            self.source.give_back()


class Encoded(NamedTuple):
    data: bytes
    stream_id: bytes
    level_ends: tuple[int, ...]


class Publisher:
    """All methods are for one event loop."""

    def __init__(
        self,
        place: Store | Endpoint,
        codec: Codec,
        *,
        spool: Spool | None = None,
        max_queue_bytes: int = QUEUE_BYTES,
        on_encoded: OnEncoded | None = None,
        on_accepted: OnAccepted | None = None,
        on_refused: OnRefused | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        """Place and spool are closed by those who opened them, afterwards."""
        endpoint = place if isinstance(place, Endpoint) else Endpoint(place)
        self._sender = Sender(endpoint, spool, on_accepted, on_refused, clock=clock, rng=rng)
        self._codec, self._on_encoded = codec, on_encoded
        self._spool = spool
        self._max_queue_bytes = max_queue_bytes
        self._clock = clock
        self._jobs: deque[Job] = deque()
        self._queued_bytes = 0
        # Keys from `publish` until accepted or given up, and whose request they were part of.
        self._under_way: dict[bytes, Request] = {}
        self._parcels: deque[Parcel] = deque()
        self._moved = asyncio.Event()  # set when a queue has changed
        self._num_waiting = 0  # callers, for what is published
        self._tasks: list[asyncio.Task[None]] = []  # that which encodes comes first

    # for callers

    async def __aenter__(self) -> Publisher:
        works = {"encoding": self._encode_all, "sending": self._send_all}
        if self._spool is not None:
            works["adopting"] = partial(self._adopt_all, self._spool)
        self._tasks = [asyncio.create_task(supervise(*work)) for work in works.items()]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def counts(self) -> Counts:
        return self._sender.counts

    @property
    def queued_bytes(self) -> int:
        """Of values that were read and are not encoded yet."""
        return self._queued_bytes

    def publish(
        self, chunk: Chunk, source: Source, *, saved_s: float = 0.0, levels: int | None = None
    ) -> Admission:
        """Read the chunk's values, now, and publish them later: with all levels, or with the first
        `levels` of them. What is not wanted is not read.
        What was lent is given back when it is encoded, if it is QUEUED; else it never was taken."""
        if self._is_on_its_way(chunk.key):
            return Admission.ALREADY
        if self._queued_bytes >= self._max_queue_bytes:
            return Admission.FULL
        cache = source.read(chunk)
        self._queued_bytes += cache.size_bytes
        self._under_way[chunk.key] = Request.current()
        self._sender.refused.pop(chunk.key, None)
        self._jobs.append(Job(chunk, cache, saved_s, source, levels))
        self._moved.set()
        return Admission.QUEUED

    def publish_stream(
        self, key: bytes, data: bytes, stream_id: bytes, *, parent: bytes, saved_s: float = 0.0
    ) -> Admission:
        """The same of a stream that is encoded: it waits in memory to be sent."""
        if self._is_on_its_way(key):
            return Admission.ALREADY
        waiting_bytes = sum(len(parcel.data) for parcel in self._parcels)
        if waiting_bytes and waiting_bytes + len(data) > self._max_queue_bytes:
            return Admission.FULL
        self._under_way[key] = Request.current()
        self._sender.refused.pop(key, None)
        bad = self._sender.endpoint.gives_way(key, len(data))
        self._parcels.append(Parcel(key, stream_id, data, Hints(parent, saved_s), replacing=bad))
        self._moved.set()
        return Admission.QUEUED

    async def flush(self, deadline_s: float) -> bool:
        """Wait until each chunk that was queued before is accepted, or refused for good; False if
        that took too long.

        A chunk is accepted when the place has its key, or when it lies in the spool: then neither
        a kill nor a power loss loses it, and whoever opens the spool next sends it. How many were
        refused since, and how many are only spooled, `counts` tells.
        """
        before, until_s = set(self._under_way), self._clock() + deadline_s
        with self.waited_for():
            while not before.isdisjoint(self._under_way):
                if not await self._wait(until_s):
                    return False
        return True

    async def store_all(self, keys: Collection[bytes], deadline_s: float) -> bool:
        """Wait until the place has accepted or refused these, those in the spool, too; False if
        that took too long."""
        until_s = self._clock() + deadline_s
        with self.waited_for():
            while any(map(self._is_on_its_way, keys)):
                if not await self._wait(until_s):
                    return False
        return True

    def refused(self, keys: Iterable[bytes]) -> dict[bytes, str]:
        """Those of them that were refused since they were published last, and why."""
        every = self._sender.refused
        return {key: every[key] for key in keys if key in every}

    async def close(self, deadline_s: float = 5.0) -> None:
        """Finish what can be finished by then. If there is a spool, the place gets half of the
        time; in the other half, what is left is encoded and spooled."""
        until_s = self._clock() + deadline_s
        self._num_waiting += 1  # from now on
        if self._spool is None:
            await self.flush(deadline_s)
        elif not await self.flush(deadline_s / 2):
            await _stop(self._tasks[1:])
            self._sender.try_spool_again()
            while self._parcels or (self._under_way and await self._wait(until_s)):
                await self._spool_parcels()
        await _stop(self._tasks)
        await self._spool_parcels()
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

    def _is_on_its_way(self, key: bytes) -> bool:
        return key in self._under_way or (self._spool is not None and key in self._spool)

    def _done(self, key: bytes) -> None:
        self._under_way.pop(key, None)
        self._moved.set()

    def _refuse(self, key: bytes, why: Exception) -> None:
        with self._work_for(key):
            self._sender.refuse(key, why)
        self._done(key)

    def _work_for(self, key: bytes) -> AbstractContextManager[object]:
        """The request that a chunk is published for, while it is worked on."""
        request = self._under_way.get(key)
        return nullcontext() if request is None else request.resumed()

    # encoding

    async def _encode_all(self) -> None:
        while True:
            if jobs := self._next_jobs():
                took_s = await self._encode(jobs)
                if jobs[0].is_on_gpu:
                    await self._rest(took_s)
            else:
                await self._wait()

    async def _rest(self, took_s: float) -> None:
        """An engine computes in the same interpreter: encoding leaves it nearly all of the time,
        unless somebody waits for what is published."""
        until_s = self._clock() + min(took_s * (1 / GPU_SHARE - 1), MAX_REST_S)
        while not self._num_waiting and await self._wait(until_s):
            pass

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Somebody waits for what is published, or for room: encoding does not rest."""
        self._num_waiting += 1
        self._moved.set()
        try:
            yield
        finally:
            self._num_waiting -= 1

    def _next_jobs(self) -> list[Job]:
        """One, or a few that are on a GPU."""
        on_gpu = bool(self._jobs) and self._jobs[0].is_on_gpu
        if len(self._parcels) >= (GPU_PARCELS if on_gpu else PARCELS):
            return []
        jobs: list[Job] = []
        while self._jobs and len(jobs) < (GPU_BATCH if on_gpu else 1):
            if jobs and not self._jobs[0].is_on_gpu:
                break
            jobs.append(self._jobs.popleft())
        return jobs

    async def _encode(self, jobs: Sequence[Job]) -> float:
        """Returns how long it kept a core busy, in seconds."""
        took_s = 0.0
        try:
            with self._work_for(jobs[0].chunk.key), span("kdn.encode", chunks=len(jobs)):
                encoding = asyncio.ensure_future(asyncio.to_thread(self._timed, jobs))
                await outwait(encoding)  # until then the jobs' memory is not their owners'
            found, took_s = encoding.result()
            for job, one in zip(jobs, found, strict=True):
                self._take(job, one)
        except Exception as error:
            for job in jobs:
                self._sender.fault("encoding a chunk", error)
                self._refuse(job.chunk.key, error)
        finally:
            for job in jobs:
                self._queued_bytes -= job.cache.size_bytes
                job.end()
        return took_s

    def _timed(self, jobs: Sequence[Job]) -> tuple[list[Encoded | Exception], float]:
        began_s = time.thread_time()
        return self._encoded(jobs), time.thread_time() - began_s

    def _encoded(self, jobs: Sequence[Job]) -> list[Encoded | Exception]:
        """In a thread. What fails together is tried one by one: a chunk's fault is its own."""
        try:
            found = self._codec.encode_batch([(job.chunk, job.cache) for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                return [error]
            return [one for job in jobs for one in self._encoded([job])]
        return [self._shown(job.chunk, one) for job, one in zip(jobs, found, strict=True)]

    def _shown(self, chunk: Chunk, found: bytes | KdnError) -> Encoded | Exception:
        if isinstance(found, KdnError):
            return found
        try:
            header = Header.parse(found)
        except KdnError as error:
            return RuntimeError(f"the encoder made no stream: {error}")
        if self._on_encoded is not None:
            try:
                self._on_encoded(chunk, found)
            except Exception as error:
                fault("keeping an encoded chunk", error)
        return Encoded(found, header.stream_id, header.level_ends)

    def _take(self, job: Job, found: Encoded | Exception) -> None:
        chunk = job.chunk
        if isinstance(found, Exception):
            if not isinstance(found, KdnError):
                self._sender.fault("encoding a chunk", found)
            self._refuse(chunk.key, found)
            return
        # Of a stream its first levels are a byte prefix; its header and its id stay what they are.
        data = found.data if job.levels is None else found.data[: found.level_ends[job.levels - 1]]
        bad = self._sender.endpoint.gives_way(chunk.key, len(data))
        cuts = tuple(dict.fromkeys(found.level_ends))  # a level may be empty
        parent = chunk.parent if chunk.start else None  # no root's is stored
        hints = Hints(parent, job.saved_s, cuts)
        self._parcels.append(Parcel(chunk.key, found.stream_id, data, hints, replacing=bad))
        self._moved.set()

    # sending

    async def _send_all(self) -> None:
        while True:
            if self._parcels:
                await self._send_next()
            elif not self._spool:  # there is none, or it is empty
                await self._wait()
            elif not await self._wait(self._sender.spool_rests_until_s):
                await self._sender.send_spooled(self._spool)
                self._moved.set()

    async def _send_next(self) -> None:
        parcel = self._parcels[0]  # stays there meanwhile: `close` spools what was not sent
        try:
            with self._work_for(parcel.key), span("kdn.publish", bytes=len(parcel.data)):
                await self._sender.send(parcel)
        except Exception as error:
            self._sender.fault("sending a chunk", error)
            self._refuse(parcel.key, error)
        self._parcels.popleft()
        self._done(parcel.key)

    async def _spool_parcels(self) -> None:
        """At the end, when nothing is sent any more."""
        while self._parcels:
            parcel = self._parcels.popleft()
            self.counts.dropped += not await self._sender.put_aside(parcel)
            self._done(parcel.key)

    async def _adopt_all(self, spool: Spool) -> None:
        while True:
            await asyncio.sleep(ADOPT_S)
            if await asyncio.to_thread(spool.adopt):
                self._moved.set()


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
