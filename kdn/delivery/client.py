"""Carrying a plan out: look up, fetch, verify, decode, compute, plan again, and end in time.

One loop does it. Requests (`transfer.py`), decoding (`decode.py`) and the model run beside it and
wake it up when something has changed; it then lets the policy plan again, sends the next requests
and picks the next chunk to decode. It ends when the plan has nothing left to do, or at the deadline
with what there is. Whatever a network, a store or a stream does, the caller gets a result; only
mistakes in code raise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from random import Random

from kdn.delivery.account import Ending
from kdn.delivery.course import PLAN_S, Course
from kdn.delivery.decode import Decoder
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.estimate import Estimator, Gauge
from kdn.delivery.fetcher import Fetcher
from kdn.delivery.flight import Limits, ThroughputEstimator
from kdn.delivery.front import Front
from kdn.delivery.known import Known
from kdn.delivery.lookup import HEAD_BYTES, Incoming, Question, look_up, read_local, reject_spoilt
from kdn.delivery.plan import Fetch, Policy
from kdn.delivery.planner import default
from kdn.delivery.quick import Quick
from kdn.delivery.refine import Refinement
from kdn.delivery.request import (
    FAR_S,
    Arrived,
    OnProgress,
    Request,
    Result,
    Snapshot,
    enough_levels,
)
from kdn.delivery.transfer import Transfer
from kdn.store.base import Store

TICK_S = 0.02
HOPELESS_S = 30.0
"""A delivery that gets no byte for this long ends, whatever its deadline is."""
LOOKUP_S = 0.02
LOOK_SHARE = 0.01
"""The delivery waits this share of the full prefill time for a lookup, or for a link that may prove
fast enough, before the model starts to read."""
PROGRESS_S = 0.05
BEAT_S = 0.001
"""The loop looks around at most this often while bytes arrive: on a fast link a chunk arrives every
half millisecond."""
GATHER_S = 0.004
"""A few chunks wait up to this long for others, so that they are decoded together."""
GATHERED = 4
"""With a batch divided by this, decoding starts without waiting for more."""
GATHERED_BESIDE = 2
"""The same while another batch is being decoded."""


QUICK_S = 2.0
"""What is surely here within this time need not be planned."""
QUICK_LEAST_S, LATE = 0.25, 3.0
"""The fetcher gets at least this long, or this many times what the plan expects. Half of the time
before the deadline is left for fetching the rest without it."""


async def deliver(
    request: Request,
    endpoints: Endpoints | Iterable[Store | Endpoint],
    known: Known | None = None,
    *,
    policy: Policy | None = None,
    estimator: ThroughputEstimator | None = None,
    on_progress: OnProgress | None = None,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
    rng: Random | None = None,
    head_bytes: int = HEAD_BYTES,
    gauge: Gauge | None = None,
    fetcher: Fetcher | None = None,
    asked: asyncio.Event | None = None,
) -> Result:
    """The best of these chunks that is to be had by the deadline, written to the sink.

    What is known of them is looked up, if nobody tells. The estimator may be shared by deliveries
    from the same endpoints, the gauge by those to sinks of one kind: what one has learnt of the
    link and of the machine helps the next. On a fast link, a `fetcher` receives in a process of its
    own. `asked` is set when something has been asked for. Endpoints are not closed.
    """
    if not isinstance(endpoints, Endpoints):
        endpoints = Endpoints(endpoints)
    levels = enough_levels(request.expected_kld, request.enough_kld)
    question = Question(request.chunks, request.codec, clock, rng or Random(), head_bytes, levels)
    delivery = Delivery(
        request,
        question,
        endpoints,
        known,
        policy or default,
        estimator or Estimator(),
        on_progress or (lambda snapshot: None),
        limits or Limits(),
        gauge or Gauge(request.speeds, request.compute is not None),
        fetcher,
        asked,
    )
    return await delivery.run()


class Delivery:
    """One request being served. Use `deliver`."""

    def __init__(
        self,
        request: Request,
        question: Question,
        endpoints: Endpoints,
        told: Known | None,
        policy: Policy,
        estimator: ThroughputEstimator,
        on_progress: OnProgress,
        limits: Limits,
        gauge: Gauge,
        fetcher: Fetcher | None,
        asked: asyncio.Event | None,
    ) -> None:
        self.request, self.question, self.endpoints = request, question, endpoints
        self.estimator, self.limits, self.gauge = estimator, limits, gauge
        self.began_s = question.clock()
        self.known: list[Incoming] = []
        self.lookup_s = 0.0
        self._is_lookup_late = False
        self._can_read = request.compute is not None and request.speeds is not None
        self._look_s = LOOKUP_S
        if request.speeds is not None:
            start = request.chunks[0].start
            alone_s = request.speeds.prefill_s(start, start + request.num_tokens)
            self._look_s = max(LOOKUP_S, LOOK_SHARE * alone_s)
        self._told = told
        self._policy = policy
        self._fetcher, self._asked = fetcher, asked
        self._on_progress = on_progress
        self._reported_s = -PROGRESS_S
        self._gathering_s: float | None = None  # since when chunks wait for others

    def now_s(self) -> float:
        return self.question.clock() - self.began_s

    async def run(self) -> Result:
        until_s = self.began_s + self.request.deadline_s
        self.transfer = Transfer(
            self.known, self.question, self.endpoints, self.estimator, self.limits, until_s,
            self._asked,
        )  # fmt: skip
        self.decoder = Decoder(
            self.request.sink, self.gauge, self.transfer.changed, self.question.clock
        )
        # Not `self.now_s`: a delivery that is part of a cycle keeps its buffers until a collection,
        # which engines put off.
        clock, began_s = self.question.clock, self.began_s
        self.front = Front(
            self.request, self.known, self.decoder, self.transfer.changed, lambda: clock() - began_s
        )
        self.course = Course(
            self.request, self.known, self.transfer, self.decoder, self.front, self.gauge,
            self._policy, lambda: clock() - began_s,
        )  # fmt: skip
        try:
            await self._look_up(until_s)
            if self.known:
                if not await self._fetch_quickly():
                    await self._carry_out()
            elif self.front.is_busy:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.request.deadline_s - self.now_s()):
                        await self.front.wait()
        finally:
            await self._close()
        self._raise_crashes()
        reject_spoilt(self.known, self.endpoints, self.question.clock())
        self._report(force=True)
        return _result_of(self)

    async def _look_up(self, until_s: float) -> None:
        """A model that can read does not wait long for it: whatever becomes of the lookup, the
        whole takes hardly longer than reading."""
        until_s = min(until_s, self.began_s + HOPELESS_S)
        lookup = asyncio.ensure_future(self._find(until_s))
        try:
            if self._can_read:
                await asyncio.wait([lookup], timeout=self._look_s)
                if not lookup.done():
                    self.front.start(lambda done: len(self.request.chunks))
            while not lookup.done() and self.front.num_read < len(self.request.chunks):
                self.front.raise_crash()
                await asyncio.wait([lookup], timeout=TICK_S)
            if lookup.done() and self.front.num_read < len(self.request.chunks):
                spec, skips = self.request.codec.spec, self.request.skips_windows
                windows = spec.windows if skips else ()
                self.known += lookup.result().incoming(self.request.chunks, windows)
            self._is_lookup_late = not lookup.done() or self.question.clock() >= until_s
        finally:
            lookup.cancel()
            await asyncio.wait([lookup])
        self.lookup_s = self.now_s()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - self.question.clock())):
                enough = enough_levels(self.request.expected_kld, self.request.enough_kld)
                await read_local(self.known, self.endpoints, enough)
                # All that is wanted of these may have come with their headers.
                parts = [one.assembly for one in self.known if not one.assembly.is_whole]
                await asyncio.gather(*(one.verify() for one in parts))

    async def _find(self, until_s: float) -> Known:
        if self._told is not None:
            return self._told
        return Known(streams=await look_up(self.question, self.endpoints, until_s))

    async def _fetch_quickly(self) -> bool:
        """Let the fetcher bring the plan, if all of it will surely be here soon. Whether nothing is
        left to do."""
        fetcher, course = self._fetcher, self.course
        if fetcher is None or self.request.compute is not None or not fetcher.is_ready():
            return False
        course.plan_anew()
        surely_s = course.surely_s(QUICK_S)
        if surely_s is None:
            return False
        quick = Quick(
            fetcher, self.known, self.transfer, self.decoder, self.request.sink.batch_chunks,
            self.question.clock,
        )  # fmt: skip
        left_s = surely_s - self.now_s()
        limit_s = max(QUICK_LEAST_S, LATE * left_s)
        limit_s = min(limit_s, (self.request.deadline_s - self.now_s()) / 2)
        await quick.run(course.plan.fetches, self.endpoints, limit_s)
        return all(self.known[one.chunk].decoded >= one.levels for one in course.plan.fetches)

    # the loop

    async def _carry_out(self) -> None:
        changed, course = self.transfer.changed, self.course
        while (left_s := self.request.deadline_s - self.now_s()) > 0:
            course.is_stale |= changed.is_set()
            changed.clear()
            self._raise_crashes()
            self.transfer.watch()
            if course.is_due():
                course.plan_anew()
            self._act(left_s)
            if self._is_done():
                if not course.is_stale:
                    return
                course.plan_anew()
                continue
            if self.transfer.quiet_s() > HOPELESS_S and not course.wants_model:
                return
            await self._news(left_s)

    async def _news(self, left_s: float) -> None:
        """Until something has changed that may be worth a look, or it is time for one."""
        if self.transfer.in_flight_bytes:
            await asyncio.sleep(min(left_s, BEAT_S))
        wait_s = min(left_s, PLAN_S if self.course.is_stale else TICK_S)
        if self._gathering_s is not None:
            wait_s = min(wait_s, self._gathering_s + GATHER_S - self.now_s())
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.transfer.changed.wait()

    def _act(self, left_s: float) -> None:
        fetches = self.course.plan.fetches
        self.transfer.pump(fetches)
        while not self.decoder.is_full:
            idle = self._has_fetched() and not self.course.wants_model
            next_ones = self.decoder.pick(self.known, fetches, left_s, idle)
            if next_ones and not idle and not self._is_gathered(next_ones):
                break
            self._gathering_s = None
            if not next_ones:
                break
            self.decoder.start(self.known, next_ones)
        if self.course.wants_model and not self.front.is_busy and self._knows_link():
            self.front.start(self._next_end)
        self._report()

    def _is_gathered(self, fetches: Sequence[Fetch]) -> bool:
        """Whether these are enough for a batch, or others will not be here soon. Beside a batch
        that is being decoded they are in no hurry."""
        if self.decoder.busy:
            return len(fetches) * GATHERED_BESIDE >= self.request.sink.batch_chunks
        if len(fetches) * GATHERED >= self.request.sink.batch_chunks:
            return True
        now_s, link = self.now_s(), self.transfer.link()
        size = self.known[fetches[0].chunk].assembly.wanted_ends[fetches[0].levels - 1]
        if link.low_rate * GATHER_S < size or not self.transfer.in_flight_bytes:
            return True
        if self._gathering_s is None:
            self._gathering_s = now_s
        return now_s - self._gathering_s >= GATHER_S

    def _has_fetched(self) -> bool:
        """Whether all bytes that are planned are here."""
        return not any(self._misses(fetch) for fetch in self.course.plan.fetches)

    def _misses(self, fetch: Fetch) -> bool:
        one = self.known[fetch.chunk]
        wanted = min(fetch.levels, one.assembly.stored)
        return not one.lost and not one.computed and one.assembly.levels < wanted

    def _is_done(self) -> bool:
        """Whether nothing that is planned is left to do."""
        if self.decoder.busy or self.transfer.is_searching or self.course.wants_model:
            return False
        idle = self._has_fetched()
        return idle and not self.decoder.pick(self.known, self.course.plan.fetches, FAR_S, idle)

    def _raise_crashes(self) -> None:
        self.transfer.raise_crash()
        self.decoder.raise_crash()
        self.front.raise_crash()

    # the model

    def _knows_link(self) -> bool:
        """A model that would slow the decoder down waits for a good look at the link."""
        return not self.request.shared or self.now_s() - self.course.wanted_s >= self._look_s

    def _next_end(self, done: int) -> int:
        """Up to which chunk to read at once: models read long pieces faster, but a plan may change.
        Half of what is left; all of it if nothing is to be loaded anyway, or on a processor, where
        going on from a cache takes nearly twice as long as reading from the beginning."""
        recompute = self.course.plan.recompute
        left = recompute - done
        at_once = self.request.shared or recompute == len(self.known)
        return done + max(0, left if at_once else (left + 1) // 2)

    # reports and the end

    def _report(self, force: bool = False) -> None:
        now_s = self.now_s()
        if not force and now_s - self._reported_s < PROGRESS_S:
            return
        self._reported_s = now_s
        levels = [one.decoded for one in self.known]
        levels += [0] * (len(self.request.chunks) - len(self.known))
        levels[: self.front.num_read] = [-1] * self.front.num_read
        self._on_progress(
            Snapshot(
                elapsed_s=now_s,
                left_s=0.0 if force else max(0.0, self.course.plan.done_s - now_s),
                levels=tuple(levels),
                num_levels=self.request.codec.num_levels,
                fetched_bytes=self.transfer.fetched_bytes,
                rate=self.transfer.link().rate,
            )
        )

    def ending(self) -> Ending:
        return Ending(
            self.known, self.endpoints, self.front.num_read, self._is_lookup_late,
            self.now_s() >= self.request.deadline_s, self.transfer.quiet_s() > HOPELESS_S,
            self.course.first, self.course.plans,
        )  # fmt: skip

    async def _close(self) -> None:
        await self.front.close()
        await self.transfer.close()
        await self.decoder.finish()


def _result_of(delivery: Delivery) -> Result:
    known, transfer = delivery.known, delivery.transfer
    rest = len(delivery.request.chunks) - len(known)
    first_s = transfer.first_byte_s

    def refine(enough_kld: float) -> Refinement:
        levels = enough_levels(delivery.request.expected_kld, enough_kld)
        return Refinement(
            known, levels, delivery.question, delivery.endpoints, delivery.estimator,
            delivery.limits, delivery.request.sink, delivery.gauge,
        )  # fmt: skip

    return Result(
        sink=delivery.request.sink,
        num_levels=delivery.request.codec.num_levels,
        levels=tuple(one.decoded for one in known) + (0,) * rest,
        computed=tuple(i < delivery.front.num_read for i in range(len(known) + rest)),
        stream_ids=tuple(one.decoded_id for one in known) + (b"",) * rest,
        known=len(known),
        fetched_bytes=transfer.fetched_bytes,
        lookup_s=delivery.lookup_s,
        first_byte_s=None if first_s is None else first_s - delivery.began_s,
        done_s=delivery.now_s(),
        failures=transfer.failures,
        troubles=(*transfer.troubles, *delivery.decoder.troubles),
        kld=_expected_kld(delivery),
        account=delivery.ending().account(len(known) + rest, delivery.request.codec.num_levels),
        arrived=tuple(_arrived(known)),
        _refine=refine,
    )


def _arrived(known: Iterable[Incoming]) -> Iterator[Arrived]:
    for one in known:
        if one.assembly.levels and not one.undecodable and one.assembly.is_whole:
            yield Arrived(one.chunk, one.assembly.verified(), one.assembly.levels)


def _expected_kld(delivery: Delivery) -> float:
    request = delivery.request
    tokens = [chunk.num_tokens for chunk in request.chunks]
    parts = [count * weight for count, weight in zip(tokens, request.weights(), strict=True)]
    loaded = [(part, one.decoded) for part, one in zip(parts, delivery.known, strict=False)]
    return sum(part * request.expected_kld[n - 1] for part, n in loaded if n) / sum(parts)
