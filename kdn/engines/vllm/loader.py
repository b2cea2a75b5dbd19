"""Loads into vLLM's paged memory, a few at a time, each by its deadline.

What this host holds comes first, the rest from places: they have been asked already, by the
scheduler's side, whose answers come with the order; or what they have is on its way already
(`early.py`). A load is good up to the first token that did not arrive, in whole blocks; vLLM
computes what is behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.delivery.known import Known
from kdn.delivery.sink import Sink
from kdn.engines.vllm.joined_load import good_until, join_of, join_sink_of, needed
from kdn.engines.vllm.layout import PagedCache
from kdn.engines.vllm.messages import LoadOrder
from kdn.engines.vllm.paged_sink import (
    GivenUpError,
    LoadJob,
    PagedSink,
    batch_chunks_of,
    sink_of,
)
from kdn.engines.vllm.ranks import Ranks
from kdn.engines.vllm.shared import SharedSession
from kdn.session.delivered import Delivered, Grade
from kdn.session.keeper import KEEP_AFTER_S, MAX_CHUNKS
from kdn.tracing import span

logger = logging.getLogger(__name__)

LOADS_AT_ONCE = 2
"""Decoding uses all cores; more would only need more memory."""
GPU_LOADS_AT_ONCE = 4
"""While one is decoded, others are on their way."""
GRACE_S = 5.0
"""After its deadline, for a load to be decoded and written. Then it is given up: so long, and not
longer, slow loads can keep others from their turn."""
AWAY_S = 5.0
"""After a load that nobody answered, others have what this host holds and no more for so long."""


@dataclass(frozen=True)
class EndedLoad:
    order: LoadOrder
    good_until: int
    """Tokens of the load before this are in their blocks."""
    exact_until: int


def nothing_of(order: LoadOrder) -> EndedLoad:
    return EndedLoad(order, order.start, order.start)


class Loader:
    """Used by vLLM's thread; the loads themselves run on the session's event loop."""

    def __init__(
        self,
        shared: SharedSession,
        paged: PagedCache,
        counts: Counter[str],
        answer_s: float,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks | None = None,
    ) -> None:
        """`answer_s`: places from which no byte has come after so long do not answer. `ranks`: the
        others of this engine, which load the same."""
        self._shared, self._session, self._paged = shared, shared.session, paged
        self._counts, self._answer_s, self._clock = counts, answer_s, clock
        self._jobs: dict[str, LoadJob] = {}
        self._ended: deque[EndedLoad] = deque()  # filled by the event loop, emptied by vLLM's
        on_gpu = paged.device.type == "cuda"
        self._turn = asyncio.Semaphore(GPU_LOADS_AT_ONCE if on_gpu else LOADS_AT_ONCE)
        self._keeping: Future[None] | None = None
        self._away_until_s = 0.0
        self._ranks = ranks
        if ranks is None:  # of several, whoever asks is not alone in loading
            shared.early.batch_chunks = batch_chunks_of(paged)
            shared.early.is_crowded = self._turn.locked

    def __len__(self) -> int:
        """Loads that have not been taken yet."""
        return len(self._jobs)

    def begin(self, order: LoadOrder) -> None:
        job = LoadJob(order, self._clock() + order.deadline_s, self._paged.mark())
        self._jobs[order.request_id] = job
        with order.origin.resumed():
            job.future = self._shared.submit(lambda: self._load(job))

    def wait(self, limit_s: float) -> None:
        """For a load to end, or a lookup; one that ended since the last time counts."""
        if not self._ended:
            self._shared.changed.wait(limit_s)
        self._shared.changed.clear()

    def take_ended(self) -> list[EndedLoad]:
        self._give_up()
        every = [self._ended.popleft() for _ in range(len(self._ended))]
        return [one for one in every if self._is_first(one)]

    def _is_first(self, ended: EndedLoad) -> bool:
        """Not so if it was given up before."""
        request_id = ended.order.request_id
        job = self._jobs.get(request_id)
        if job is None or job.order is not ended.order:
            return False
        del self._jobs[request_id]
        if job.ended_s is not None:
            ended.order.origin.record("kdn.hand_over", self._clock() - job.ended_s)
        return True

    def _give_up(self) -> None:
        """What is far beyond its deadline, if its blocks are not being written."""
        now_s = self._clock()
        for job in list(self._jobs.values()):
            if now_s > job.until_s + GRACE_S and job.give_up():
                logger.error("the load of request %s is given up", job.order.request_id)
                self._ended.append(nothing_of(job.order))

    # on the event loop

    async def _load(self, job: LoadJob) -> None:
        """Always ends with an entry in `_ended`: vLLM waits for it."""
        order, began_s = job.order, self._clock()
        ended = nothing_of(order)
        try:
            if await self._has_turn(job):
                try:
                    with span("kdn.load", tokens=order.end - order.start):
                        ended = await (self._bring(job) if order.join is None else self._join(job))
                finally:
                    self._turn.release()
        except GivenUpError:
            pass  # reported already
        except Exception:
            logger.exception("the load of request %s failed", order.request_id)
        finally:
            job.ended_s = self._clock()
            self._counts["load_ms"] += round(1000 * (job.ended_s - began_s))
            self._ended.append(ended)

    async def _has_turn(self, job: LoadJob) -> bool:
        """By its deadline; afterwards the model had better begin."""
        try:
            async with asyncio.timeout(job.until_s - self._clock()):
                return await self._turn.acquire()
        except TimeoutError:
            self._counts["crowded"] += 1
            return False

    async def _bring(self, job: LoadJob) -> EndedLoad:
        """The beginning of a prompt."""
        order, session = job.order, self._session
        # Of some heads only, values are of no use to others.
        max_kept = 0 if session.host is None or self._ranks is not None else MAX_CHUNKS
        sink = sink_of(session.codec, self._paged, job, max_kept)
        got = await self._deliver(job, order.chunks, sink, order.end)
        if isinstance(sink, PagedSink):
            self._keep(got, sink.decoded)
        return self._usable(order, got)

    async def _join(self, job: LoadJob) -> EndedLoad:
        """Pieces, each to its place. Nothing of it is exact, and nothing is kept for others."""
        order, codec = job.order, self._session.codec
        assert order.join is not None
        join = join_of(order)
        repaired, seams = None, None
        if order.join.seams:
            limit_s = job.until_s - self._clock()
            repaired, seams = await self._shared.seams.repairing(order.join.seams, limit_s)
        sink = join_sink_of(codec, repaired, seams, self._paged, job, join)
        got = await self._deliver(job, needed(order, join), sink, None)
        good = self._in_blocks(order, good_until(order, join, got))
        moved = max(0, good - max(order.start, len(join.pieces[0].tokens)))
        self._counts["joined_tokens"] += good - order.start
        self._counts["moved_tokens"] += moved
        self._counts["repaired_tokens"] += 0 if seams is None else moved
        return EndedLoad(order, good, order.start)

    async def _deliver(
        self, job: LoadJob, chunks: Sequence[Chunk], sink: Sink, end: int | None
    ) -> Delivered:
        order, session, began_s = job.order, self._session, self._clock()
        heads = dict(zip((chunk.key for chunk in order.chunks), order.heads, strict=True))
        deliver, is_away = session.deliver, began_s < self._away_until_s
        if self._ranks is not None:
            deliver = partial(self._ranks.deliver, order.number)
        got = None if is_away else await self._shared.early.deliver(order, chunks, sink)
        if got is not None:
            self._counts["early_loads"] += 1
        else:
            got = await deliver(
                chunks,
                sink,
                known=Known.of_heads(chunks, [heads[c.key] for c in chunks], session.codec),
                end=end,
                enough_kld=order.enough_kld,
                deadline_s=0.0 if is_away else job.until_s - self._clock(),
            )
        self._note(order, got, self._clock() - began_s)
        return got

    def _note(self, order: LoadOrder, got: Delivered, took_s: float) -> None:
        self._counts["fetched_bytes"] += got.fetched_bytes
        self._counts["dropped_early_loads"] = self._shared.early.num_dropped
        for level, size in enumerate(got.level_bytes):
            self._counts[f"level_bytes:{level}"] += size
        if (streams := self._session.streams) is not None:
            self._counts["faded_levels"] = streams.counts["faded"]
            self._counts["forgotten_chunks"] = streams.counts["forgotten"]
            self._counts["unkept_chunks"] = streams.counts["unkept"]
        for trouble in got.troubles:
            logger.warning("loading request %s: %s", order.request_id, trouble)
        result = got.result
        has_come = result is None or result.fetched_bytes or any(result.levels)
        if not has_come and took_s >= self._answer_s:
            self._away_until_s = self._clock() + AWAY_S

    def _usable(self, order: LoadOrder, got: Delivered) -> EndedLoad:
        """Up to where the load is good, in whole blocks, and up to where it is exact."""
        good = got.good_until(order.end, order.enough_kld) if order.strict else got.ready_until
        good = self._in_blocks(order, good)
        if got.held:
            self._counts["host_tokens"] += (
                min(got.chunks[len(got.held) - 1].end, good) - order.start
            )
        exact = good if got.exact_until is None else min(got.exact_until, good)
        return EndedLoad(order, good, exact)

    def _in_blocks(self, order: LoadOrder, good: int) -> int:
        size = self._paged.block_tokens
        return max(order.start, min(good, order.end) // size * size)

    # for others

    def _keep(self, got: Delivered, decoded: dict[bytes, KVCache]) -> None:
        """For other engines of this host; those of one load at a time, to bound memory."""
        kept = [
            (chunk, decoded[chunk.key], grade)
            for chunk, grade in zip(got.chunks, got.grades, strict=True)
            if grade is not None and chunk.key in decoded
        ]
        if kept and self._keeping is None:
            self._keeping = self._shared.submit(lambda: self._keep_later(kept))

    async def _keep_later(self, kept: list[tuple[Chunk, KVCache, Grade]]) -> None:
        try:
            await asyncio.sleep(KEEP_AFTER_S)
            for chunk, values, grade in kept:
                self._session.keep(chunk, values, grade)
        finally:
            self._keeping = None
