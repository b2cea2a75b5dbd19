"""The worker's side: loads into vLLM's paged memory and copies out of it what is to be published.

What this host holds decoded already is written into the blocks that vLLM set aside for a load. The
rest is delivered into memory of its own by its deadline, then written, up to the first token that
did not arrive; the blocks behind are reported and vLLM computes them. Blocks are written only while
their request waits for them: who writes and who gives a load up agree on that under a lock. Copies
out are made between two steps, when nothing writes.

Chunks are named after the weights of the checkpoint. Before anything is published, and before vLLM
may use what was loaded, the weights must be those that it started with; otherwise all ends there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.delivery.client import deliver
from kdn.delivery.request import Request, Result, worst_kld
from kdn.engines.vllm.layout import PagedCache
from kdn.engines.vllm.messages import Load, Loaded, Save, Step
from kdn.engines.vllm.runtime import Runtime
from kdn.errors import KdnError

logger = logging.getLogger(__name__)

LOADS_AT_ONCE = 2
"""Decoding uses all cores; more would only need more memory."""
GRACE_S = 5.0
"""After its deadline, for a load to be decoded and written. Then it is given up: so long, and not
longer, slow loads can keep others from their turn."""
AWAY_S = 5.0
"""After a load that nobody answered, others fail at once for so long."""
IDLE_S = 0.005
"""A step without tokens waits so long for something to happen, instead of spinning."""

KEEP_AFTER_S = 1.0
"""What was loaded is kept for others so much later: first the request gets its first token."""


@dataclass
class Job:
    """A load under way. Once given up, its blocks may be anybody's."""

    load: Load
    until_s: float
    future: Future[None] | None = None
    _given_up: bool = False
    _writing: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Its blocks are this thread's; GivenUp if they are not any more."""
        with self._lock:
            if self._given_up:
                raise GivenUp
            self._writing = True
        try:
            yield
        finally:
            self._writing = False

    def give_up(self) -> bool:
        """Unless its blocks are being written."""
        with self._lock:
            self._given_up = not self._writing
        if self._given_up and self.future is not None:
            self.future.cancel()  # another load may have its turn
        return self._given_up


class GivenUp(Exception):
    """A load took too long."""


@dataclass(frozen=True)
class Ended:
    load: Load
    good_until: int
    """Tokens of the load before this are in their blocks."""
    exact_until: int


def nothing_of(load: Load) -> Ended:
    return Ended(load, load.start, load.start)


class WorkerSide:
    def __init__(
        self,
        runtime: Runtime,
        paged: PagedCache,
        weights_changed: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._runtime, self._paged, self._clock = runtime, paged, clock
        self._weights_changed = weights_changed
        self._is_over = False  # the weights have changed, or may have: once and for all
        self._jobs: dict[str, Job] = {}
        self._ended: deque[Ended] = deque()  # filled by the event loop, emptied by vLLM's thread
        self._turn = asyncio.Semaphore(LOADS_AT_ONCE)
        self._keeping: Future[None] | None = None
        self._away_until_s = 0.0
        self._failed_blocks: set[int] = set()
        self._report = Loaded()
        self._step = Step()
        self._began_s = 0.0

    # called by vLLM's thread, in this order, once a step

    def begin(self, step: Step) -> None:
        self._step, self._began_s = step, self._clock()
        self._is_over |= step.stopped

    def start_loads(self) -> None:
        for load in self._step.loads:
            job = Job(load, self._clock() + load.deadline_s)
            self._jobs[load.request_id] = job
            if self._is_over:
                self._ended.append(nothing_of(load))
            else:
                job.future = self._runtime.submit(self._load(job))

    def save(self) -> None:
        if self._step.saves and self._has_other_weights():
            return
        for save in self._step.saves:
            try:
                self._save(save)
            except (KdnError, RuntimeError):
                logger.exception("request %s is not published", save.request_id)

    def take_finished(self) -> set[str]:
        """Requests whose loads have ended, well or not."""
        self._rest()
        self._give_up()
        done: set[str] = set()
        every = [self._ended.popleft() for _ in range(len(self._ended))]
        is_over = bool(every) and self._has_other_weights()
        for ended in every:
            job = self._jobs.get(ended.load.request_id)
            if job is None or job.load is not ended.load:
                continue  # it was given up before
            del self._jobs[ended.load.request_id]
            done.add(ended.load.request_id)
            self._settle(nothing_of(ended.load) if is_over else ended)
        return done

    def take_failed_blocks(self) -> set[int]:
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> Loaded:
        report, self._report = self._report, Loaded()
        return report

    def _has_other_weights(self) -> bool:
        """Than at start. Then nothing is loaded or published any more, here and, as soon as it is
        reported, by the scheduler's side."""
        if not self._is_over and self._weights_changed():
            self._is_over = self._report.weights_changed = True
            self._weights_changed = lambda: True  # and let go of the old ones
            logger.error(
                "kdn: the model has other weights than at start; "
                "from now on this engine neither loads nor publishes"
            )
        return self._is_over

    # loading

    def _rest(self) -> None:
        """Without anything to compute, vLLM would spin and take the time from decoding."""
        if self._step.num_tokens or not (self._jobs or self._step.waiting) or self._ended:
            return
        self._runtime.changed.clear()
        if not self._ended:
            self._runtime.changed.wait(IDLE_S)

    def _give_up(self) -> None:
        """What is far beyond its deadline, if its blocks are not being written."""
        now_s = self._clock()
        for job in list(self._jobs.values()):
            if now_s > job.until_s + GRACE_S and job.give_up():
                logger.error("the load of request %s is given up", job.load.request_id)
                self._ended.append(nothing_of(job.load))

    def _settle(self, ended: Ended) -> None:
        load, size = ended.load, self._paged.block_tokens
        self._failed_blocks.update(load.block_ids[ended.good_until // size : load.end // size])
        self._report.exact_until[load.request_id] = ended.exact_until
        if ended.good_until < load.end:
            self._report.failed_from[load.request_id] = ended.good_until
        self.counts["loads"] += 1
        self.counts["loaded_tokens"] += ended.good_until - load.start
        self.counts["failed_tokens"] += load.end - ended.good_until

    async def _load(self, job: Job) -> None:
        """Always ends with an entry in `_ended`: vLLM waits for it."""
        load, began_s = job.load, self._clock()
        ended = nothing_of(load)
        try:
            if await self._has_turn(job):
                try:
                    ended = await self._held_then_delivered(job)
                finally:
                    self._turn.release()
        except GivenUp:
            pass  # reported already
        except Exception:
            logger.exception("the load of request %s failed", load.request_id)
        finally:
            self.counts["load_ms"] += int(1000 * (self._clock() - began_s))
            self._ended.append(ended)

    async def _has_turn(self, job: Job) -> bool:
        """By its deadline; afterwards the model had better begin."""
        try:
            async with asyncio.timeout(job.until_s - self._clock()):
                return await self._turn.acquire()
        except TimeoutError:
            self.counts["crowded"] += 1
            return False

    async def _held_then_delivered(self, job: Job) -> Ended:
        load = job.load
        ended = nothing_of(load)
        if self._runtime.host is not None:
            ended = await asyncio.to_thread(self._write_held, job)
            self.counts["host_tokens"] += ended.good_until - load.start
        good, exact = ended.good_until, ended.exact_until
        rest = replace(load, start=good, chunks=tuple(c for c in load.chunks if c.end > good))
        result = await self._deliver(job, rest) if rest.start < rest.end else None
        if result is None:
            return ended
        good_until, exact_until = self._usable(rest, result)
        await asyncio.to_thread(self._write, job, result.cache, rest.start, good_until)
        self._keep(rest.chunks, result)
        return Ended(load, good_until, exact_until if exact == good else exact)

    def _write(self, job: Job, cache: KVCache, start: int, end: int) -> None:
        with job.writing():
            self._paged.write(cache, start, end, job.load.block_ids)

    def _write_held(self, job: Job) -> Ended:
        """From the host's shared memory, as far as it goes without a gap."""
        host, load, size = self._runtime.host, job.load, self._paged.block_tokens
        assert host is not None
        good = exact = load.start
        for chunk in load.chunks:
            held = host.get(chunk, worst_kld(chunk, load.end, load.enough_kld))
            if held is None or (chunk.end % size and chunk.end < load.end):
                break  # a block with tokens of two chunks is not written in two halves
            end = min(chunk.end, load.end) // size * size
            self._write(job, held.cache, max(chunk.start, load.start), end)
            exact = end if held.exact and exact == good else exact
            good = end
        host.used([chunk for chunk in load.chunks if chunk.start < good])
        return Ended(load, good, exact)

    async def _deliver(self, job: Job, load: Load) -> Result | None:
        left_s = job.until_s - self._clock()
        if left_s <= 0 or self._clock() < self._away_until_s:
            return None
        runtime = self._runtime
        request = Request(
            load.chunks, runtime.codec, runtime.expected_kld, deadline_s=left_s,
            enough_kld=load.enough_kld, dtype=self._paged.dtype,
        )  # fmt: skip
        result = await deliver(request, runtime.places.endpoints, estimator=runtime.estimator)
        self.counts["fetched_bytes"] += result.fetched_bytes
        had_time = left_s >= runtime.settings.lookup_s
        if not result.known and had_time and self._clock() >= job.until_s:
            self._away_until_s = self._clock() + AWAY_S
        for trouble in result.troubles:
            logger.warning("loading request %s: %s", load.request_id, trouble)
        return result

    def _usable(self, load: Load, result: Result) -> tuple[int, int]:
        """Up to where the load is good, in whole blocks, and up to where it is exact."""
        missing = (
            chunk.start
            for chunk, levels in zip(load.chunks, result.levels, strict=True)
            if not levels or (load.strict and self._is_coarse(load, chunk, levels))
        )
        good = next(missing, load.end)
        if any(position > load.start for position in result.cache.valid_from):
            good = load.start  # a layer lacks tokens, and blocks cannot say so
        size = self._paged.block_tokens
        good = max(load.start, min(good, load.end) // size * size)
        chunks = load.chunks
        exact = result.exact_chunks
        exact_until = chunks[exact].start if exact < len(chunks) else load.end
        return good, min(exact_until, good)

    def _is_coarse(self, load: Load, chunk: Chunk, levels: int) -> bool:
        worst = worst_kld(chunk, load.end, load.enough_kld)
        return self._runtime.expected_kld[levels - 1] > worst

    # for others

    def _keep(self, chunks: Sequence[Chunk], result: Result) -> None:
        """What was decoded, for other engines of this host; one load at a time, to bound memory."""
        if self._runtime.host is not None and self._keeping is None:
            self._keeping = self._runtime.submit(self._keep_later(chunks, result))

    async def _keep_later(self, chunks: Sequence[Chunk], result: Result) -> None:
        try:
            await asyncio.sleep(KEEP_AFTER_S)
            for number, chunk in enumerate(chunks):
                levels = result.levels[number]
                if levels:
                    part = result.cache.slice(chunk.start, chunk.end)
                    kld = self._runtime.expected_kld[levels - 1]
                    self._runtime.keep(chunk, part, kld, exact=levels == result.num_levels)
        finally:
            self._keeping = None

    def _save(self, save: Save) -> None:
        took_s = self._clock() - self._began_s
        for chunk in save.chunks:
            if not self._runtime.has_room():
                self.counts["unpublished_chunks"] += 1
                continue
            cache = self._paged.read(chunk.start, chunk.end, save.block_ids)
            saved_s = took_s * chunk.num_tokens / max(self._step.num_tokens, chunk.num_tokens)
            self._runtime.publish(chunk, cache, saved_s)
            self._runtime.keep(chunk, cache, 0.0, exact=True)
            self.counts["published_chunks"] += 1
