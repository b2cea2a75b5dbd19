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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from random import Random

from kdn.delivery.decode import Decoder
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.estimate import Estimator, Gauge
from kdn.delivery.flight import Limits, ThroughputEstimator
from kdn.delivery.front import Front
from kdn.delivery.known import Known
from kdn.delivery.lookup import HEAD_BYTES, Incoming, Question, look_up, read_local, reject_spoilt
from kdn.delivery.plan import Fetch, Offer, Plan, Policy, Progress, Reading, Situation
from kdn.delivery.planner import default
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
PLAN_S = 0.005
"""Not more often, nor more than a fifth of the time, is spent on planning."""
REPLAN_S = 0.25
BREAK = 0.25
"""An estimate that has moved by this much makes a new plan."""
HOPELESS_S = 30.0
"""Without a byte for so long, no deadline is worth waiting for."""
LOOKUP_S = 0.02
LOOK_SHARE = 0.01
"""Of the time the model would need for all: so long it waits for a lookup, or for a link that may
prove fast enough."""
PROGRESS_S = 0.05


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
) -> Result:
    """The best of these chunks that is to be had by the deadline, written to the sink.

    What is known of them is looked up, if nobody tells. The estimator may be shared by deliveries
    from the same endpoints: what one has learnt of the link helps the next. Endpoints are not
    closed.
    """
    if not isinstance(endpoints, Endpoints):
        endpoints = Endpoints(endpoints)
    question = Question(request.chunks, request.codec, clock, rng or Random(), head_bytes)
    delivery = Delivery(
        request,
        question,
        endpoints,
        known,
        policy or default,
        estimator or Estimator(),
        on_progress or (lambda snapshot: None),
        limits or Limits(),
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
    ) -> None:
        self.request, self.question, self.endpoints = request, question, endpoints
        self.estimator, self.limits = estimator, limits
        self.began_s = question.clock()
        self.gauge = Gauge(request.speeds, request.compute is not None)
        self.known: list[Incoming] = []
        self._weights = request.weights()
        self.lookup_s = 0.0
        self._can_read = request.compute is not None and request.speeds is not None
        self._look_s = LOOKUP_S
        if request.speeds is not None:
            alone_s = request.speeds.prefill_s(request.chunks[0].start, request.chunks[-1].end)
            self._look_s = max(LOOKUP_S, LOOK_SHARE * alone_s)
        self._told = told
        self._policy = policy
        self._on_progress = on_progress
        self._plan = Plan((), 0, 0.0, 0.0)
        self._planned_s = -REPLAN_S
        self._planning_s = 0.0
        self._planned_rate = 0.0
        self._is_stale = True  # something has changed since the last plan
        self._offers: tuple[Offer, ...] = ()
        self._offered: tuple[bytes, ...] = ()
        self._reported_s = -PROGRESS_S
        self._wanted_s = 0.0  # since then every plan has wanted the model

    def now_s(self) -> float:
        return self.question.clock() - self.began_s

    async def run(self) -> Result:
        until_s = self.began_s + self.request.deadline_s
        self.transfer = Transfer(
            self.known, self.question, self.endpoints, self.estimator, self.limits, until_s
        )
        self.decoder = Decoder(
            self.request.sink, self.gauge, self.transfer.changed, self.question.clock
        )
        # Not `self.now_s`: a delivery that is part of a cycle keeps its buffers until a collection,
        # which engines put off.
        clock, began_s = self.question.clock, self.began_s
        self.front = Front(
            self.request, self.known, self.decoder, self.transfer.changed, lambda: clock() - began_s
        )
        try:
            await self._look_up(until_s)
            if self.known:
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
                self.known += lookup.result().incoming(self.request.chunks)
        finally:
            lookup.cancel()
            await asyncio.wait([lookup])
        self.lookup_s = self.now_s()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - self.question.clock())):
                enough = enough_levels(self.request.expected_kld, self.request.enough_kld)
                await read_local(self.known, self.endpoints, enough)

    async def _find(self, until_s: float) -> Known:
        if self._told is not None:
            return self._told
        return Known(streams=await look_up(self.question, self.endpoints, until_s))

    # the loop

    async def _carry_out(self) -> None:
        changed = self.transfer.changed
        while (left_s := self.request.deadline_s - self.now_s()) > 0:
            self._is_stale |= changed.is_set()
            changed.clear()
            self._raise_crashes()
            self.transfer.watch()
            if self._should_plan():
                self._make_plan()
            self._act(left_s)
            if self._is_done():
                if not self._is_stale:
                    return
                self._make_plan()
                continue
            if self.transfer.quiet_s() > HOPELESS_S and not self._wants_model():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, PLAN_S if self._is_stale else TICK_S)):
                    await changed.wait()

    def _act(self, left_s: float) -> None:
        self.transfer.pump(self._plan.fetches)
        if not self.decoder.busy:
            idle = self._has_fetched() and not self._wants_model()
            next_ones = self.decoder.pick(self.known, self._plan.fetches, left_s, idle)
            if next_ones:
                self.decoder.start(self.known, next_ones)
        if self._wants_model() and not self.front.is_busy and self._knows_link():
            self.front.start(self._next_end)
        self._report()

    def _has_fetched(self) -> bool:
        """Whether all bytes that are planned are here."""
        return not any(self._misses(fetch) for fetch in self._plan.fetches)

    def _misses(self, fetch: Fetch) -> bool:
        one = self.known[fetch.chunk]
        return not one.lost and not one.computed and one.assembly.levels < fetch.levels

    def _is_done(self) -> bool:
        """Whether nothing that is planned is left to do."""
        if self.decoder.busy or self.transfer.is_searching or self._wants_model():
            return False
        idle = self._has_fetched()
        return idle and not self.decoder.pick(self.known, self._plan.fetches, FAR_S, idle)

    def _raise_crashes(self) -> None:
        self.transfer.raise_crash()
        self.decoder.raise_crash()
        self.front.raise_crash()

    # planning

    def _should_plan(self) -> bool:
        since_s = self.now_s() - self._planned_s
        if since_s < max(PLAN_S, 5 * self._planning_s):
            return False
        rate = self.transfer.link().rate
        broken = abs(rate - self._planned_rate) > BREAK * max(self._planned_rate, 1.0)
        return self._is_stale or broken or since_s >= REPLAN_S

    def _make_plan(self) -> None:
        self._planned_s = self.now_s()
        situation = self._situation()
        self._plan = self._policy(situation)
        if not self._wants_model():
            self._wanted_s = self.now_s()
        self._planned_rate = situation.link.rate
        self._planning_s = self.now_s() - self._planned_s
        self._is_stale = False

    def _situation(self) -> Situation:
        now_s = self.now_s()
        return Situation(
            now_s=now_s,
            deadline_s=self.request.deadline_s,
            enough_kld=self.request.enough_kld,
            offers=self._current_offers(),
            progress=tuple(map(_progress, self.known)),
            link=self.transfer.link(),
            speeds=self.gauge.speeds,
            reading=self._reading(),
            shared=self.request.shared,
        )

    def _reading(self) -> Reading | None:
        """Of what the model has in hand, the part that could be loaded as well."""
        reading = self.front.reading
        if reading is None or self.front.num_read >= len(self.known):
            return None
        return Reading(min(reading.end, len(self.known)), reading.began_s)

    def _current_offers(self) -> tuple[Offer, ...]:
        """The same object as long as nothing has changed: planners keep what they derive of it."""
        streams = tuple(one.assembly.stream_id for one in self.known)
        if streams != self._offered:
            kld = tuple(self.request.expected_kld)
            self._offered = streams
            self._offers = tuple(
                Offer(one.chunk.num_tokens, one.assembly.level_ends, kld, self._weights[one.number])
                for one in self.known
            )
        return self._offers

    # the model

    def _wants_model(self) -> bool:
        return self.request.compute is not None and self.front.num_read < self._plan.recompute

    def _knows_link(self) -> bool:
        """A model that would slow the decoder down waits for a good look at the link."""
        return not self.request.shared or self.now_s() - self._wanted_s >= self._look_s

    def _next_end(self, done: int) -> int:
        """Up to which chunk to read at once: models read long pieces faster, but a plan may change.
        Half of what is left; all of it if nothing is to be loaded anyway, or on a processor, where
        going on from a cache takes nearly twice as long as reading from the beginning."""
        left = self._plan.recompute - done
        at_once = self.request.shared or self._plan.recompute == len(self.known)
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
                left_s=0.0 if force else max(0.0, self._plan.done_s - now_s),
                levels=tuple(levels),
                num_levels=self.request.codec.num_levels,
                fetched_bytes=self.transfer.fetched_bytes,
                rate=self.transfer.link().rate,
            )
        )

    async def _close(self) -> None:
        await self.front.close()
        await self.transfer.close()
        await self.decoder.finish()


def _progress(one: Incoming) -> Progress:
    if one.lost:  # nothing more will come: for a planner it is as good as done
        return Progress(one.assembly.level_ends[-1], len(one.assembly.level_ends))
    return Progress(one.assembly.arrived_bytes, one.decoded, one.computed)


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
        arrived=tuple(_arrived(known)),
        _refine=refine,
    )


def _arrived(known: Iterable[Incoming]) -> Iterator[Arrived]:
    for one in known:
        if one.assembly.levels and not one.undecodable:
            yield Arrived(one.chunk, one.assembly.verified(), one.assembly.levels)


def _expected_kld(delivery: Delivery) -> float:
    request = delivery.request
    tokens = [chunk.num_tokens for chunk in request.chunks]
    parts = [count * weight for count, weight in zip(tokens, request.weights(), strict=True)]
    loaded = [(part, one.decoded) for part, one in zip(parts, delivery.known, strict=False)]
    return sum(part * request.expected_kld[n - 1] for part, n in loaded if n) / sum(parts)
