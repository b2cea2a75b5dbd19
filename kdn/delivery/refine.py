"""After the first token: the levels that were left out arrive in the background, and the cache gets
better when its owner says so.

    async with result.refine() as better:
        for token in answer:            # between decoding steps
            await better.apply()

Only chunks that were loaded are refined: what the model computed is exact already, and what it
recomputed after the delivery belongs to the caller. Nothing is written but within `apply`, a chunk
changes as a whole, and only memory that nobody shares may be refined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kdn.delivery.decode import Decoder, is_waiting
from kdn.delivery.endpoints import Endpoints
from kdn.delivery.estimate import Gauge
from kdn.delivery.flight import Limits, ThroughputEstimator
from kdn.delivery.lookup import Incoming, Question, reject_spoilt
from kdn.delivery.plan import Fetch
from kdn.delivery.sink import Sink
from kdn.delivery.transfer import Transfer

TICK_S = 0.05
REFINE_S = 600.0
"""Longer than this, nobody waits for better levels."""


class Refinement:
    def __init__(
        self,
        known: Sequence[Incoming],
        levels: int,
        question: Question,
        endpoints: Endpoints,
        estimator: ThroughputEstimator,
        limits: Limits,
        sink: Sink,
        gauge: Gauge,
    ) -> None:
        self._clock = question.clock
        self._until_s = self._clock() + REFINE_S
        self._known, self._endpoints = known, endpoints
        self._chunks = [one for one in known if one.decoded]
        for one in known:  # what arrived too late to be decoded, the model has read meanwhile
            one.computed |= not one.decoded
        self._num_levels = levels
        self._transfer = Transfer(known, question, endpoints, estimator, limits, self._until_s)
        self._decoder = Decoder(sink, gauge, asyncio.Event(), self._clock)
        self._news = asyncio.Event()  # a level has arrived, or nothing more will
        self._task: asyncio.Task[None] | None = None

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels in the cache by now, of every chunk that was known."""
        return tuple(one.decoded for one in self._known)

    @property
    def ready(self) -> tuple[int, ...]:
        """Chunks that `apply` would improve now: each is decoded once, when all of it is here."""
        return tuple(one.number for one in self._chunks if is_waiting(one) and self._is_here(one))

    @property
    def is_complete(self) -> bool:
        """Whether all that can be had is in the cache."""
        return self._all_fetched() and not self.ready

    @property
    def fetched_bytes(self) -> int:
        return self._transfer.fetched_bytes

    async def apply(self, limit_s: float = float("inf")) -> tuple[int, ...]:
        """Write what has arrived into the cache, as much as fits into `limit_s`: the chunks that
        are better now. Nobody may read the cache meanwhile."""
        until_s, improved = self._clock() + limit_s, []
        while fetches := self._next(until_s - self._clock()):
            before = {one.chunk: self._known[one.chunk].decoded for one in fetches}
            self._decoder.start(self._known, fetches)
            await self._decoder.finish()
            self._decoder.raise_crash()
            improved += [chunk for chunk, was in before.items() if self._known[chunk].decoded > was]
        return tuple(improved)

    def _next(self, left_s: float) -> list[Fetch]:
        waiting = [Fetch(number, self._known[number].assembly.levels) for number in self.ready]
        return self._decoder.pick(self._known, waiting, left_s, False)

    async def wait(self, limit_s: float) -> bool:
        """Until `apply` has something to do, or nothing more will come; False if it took longer."""
        until_s = self._clock() + limit_s
        while not self.ready and not self._all_fetched():
            left_s = until_s - self._clock()
            if left_s <= 0:
                return False
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news.wait()
        return True

    def _all_fetched(self) -> bool:
        return all(map(self._is_here, self._chunks))

    def _is_here(self, one: Incoming) -> bool:
        """All of it that will come."""
        over = self._task is not None and self._task.done()
        return over or one.lost or one.assembly.levels >= self._wanted(one)

    def _wanted(self, one: Incoming) -> int:
        return min(self._num_levels, one.assembly.stored)

    async def _fetch(self) -> None:
        """From the back: what goes on from a context depends most on its end."""
        fetches = [
            Fetch(one.number, self._wanted(one))
            for one in reversed(self._chunks)
            if one.decoded < self._wanted(one)
        ]
        changed = self._transfer.changed
        while not self._all_fetched() and self._clock() < self._until_s:
            changed.clear()
            self._transfer.raise_crash()
            self._transfer.watch()
            self._transfer.pump(fetches)
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await changed.wait()
            self._news.set()

    async def __aenter__(self) -> Refinement:
        self._task = asyncio.create_task(self._fetch())
        self._task.add_done_callback(lambda _: self._news.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop fetching. What has arrived may still be applied."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._transfer.close()
        reject_spoilt(self._known, self._endpoints, self._clock())
        if not self._task.cancelled():
            self._task.result()
