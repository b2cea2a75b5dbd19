"""A delivery with a virtual clock: the real policies and estimators against a recorded link.

Three machines work at once: the link, which brings what was asked for in that order, a round trip
after it was asked; the decoder, one chunk at a time; the model, reading from the front. After every
event there is a new plan, and also when nothing happens for a while. Nothing is stepped through:
when a request will be answered is a look-up in the trace, so a run costs its plans and little else.

Requests that are on their way cannot be taken back, so as the client does (`transfer`), the
simulator keeps just enough of them under way to fill the link at the estimated rate.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from kdn.bench.delivery.trace import LinkTrace
from kdn.delivery.plan import (
    Fetch,
    Offer,
    Plan,
    Policy,
    Progress,
    Reading,
    Situation,
    Speeds,
    shares,
)

if TYPE_CHECKING:
    from kdn.delivery.flight import ThroughputEstimator

MIN_WINDOW_BYTES = 48 << 10
MAX_WINDOW_BYTES = 32 << 20
FIRST_WINDOW_BYTES = (256 << 10, 8 << 20)
"""Asked for at once while the rate is unknown: the less time there is for a second round trip, the
more."""
MIN_WINDOW_S = 0.1
WINDOW_ROUND_TRIPS = 2.0
CHECKS_PER_DEADLINE = 50
"""So often at least is looked at the clock and planned again."""
_MAX_EVENTS = 100_000
_NO_PLAN = Plan((), 0, 0.0, 0.0)


@dataclass(frozen=True)
class Scenario:
    """A request. `decode_slow` and `prefill_slow` are per chunk, how many times longer than
    `speeds` says it really takes: known to the simulator and to an oracle, not to a policy."""

    offers: tuple[Offer, ...]
    speeds: Speeds
    trace: LinkTrace
    latency_s: float
    deadline_s: float
    enough_kld: float = 0.0
    decode_slow: tuple[float, ...] = ()
    prefill_slow: tuple[float, ...] = ()

    def decode_s(self, chunk: int, levels: int) -> float:
        slow = self.decode_slow[chunk] if self.decode_slow else 1.0
        return slow * self.speeds.decode_s(self.offers[chunk].num_tokens, levels)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((offer.num_tokens for offer in self.offers), initial=0))

    def prefill_s(self, chunk: int) -> float:
        start = self._starts[chunk]
        slow = self.prefill_slow[chunk] if self.prefill_slow else 1.0
        return slow * self.speeds.prefill_s(start, start + self.offers[chunk].num_tokens)

    def arrived_s(self, num_bytes: float) -> float:
        """When so many bytes are here at best: asked for at once, the link never idle."""
        return self.trace.time_of(self.trace.bytes_by(self.latency_s) + num_bytes)

    def bytes_by(self, t_s: float) -> float:
        if t_s <= self.latency_s:
            return 0.0
        return self.trace.bytes_by(t_s) - self.trace.bytes_by(self.latency_s)


@dataclass(frozen=True)
class Event:
    """For a timeline: `what` is "load", "decode" or "compute"."""

    what: str
    chunk: int
    levels: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedResult:
    """`levels` of each chunk when the first token could be computed, 0 where the model read it."""

    met: bool
    ttft_s: float
    kld: float
    num_bytes: int
    levels: tuple[int, ...]
    plans: int
    events: tuple[Event, ...] = ()


@dataclass
class _Request:
    fetch: Fetch
    begin_s: float
    end_s: float
    first_byte: int
    end_byte: int


@dataclass
class _Run:
    """The state of a run; see the module for its rules."""

    scenario: Scenario
    policy: Policy
    meter: ThroughputEstimator
    progress: list[Progress]
    now_s: float = 0.0
    plan: Plan = _NO_PLAN
    plans: int = 0
    requests: deque[_Request] = field(default_factory=deque)
    asked: list[int] = field(default_factory=list)  # bytes of each stream asked for
    link_free_s: float = 0.0
    fed_bytes: int = 0  # of the first request, told to the meter
    decoding: tuple[Fetch, float, float] | None = None  # what, from, until
    computing: tuple[int, float, float] | None = None
    events: list[Event] = field(default_factory=list)


def simulate(scenario: Scenario, policy: Policy, meter: ThroughputEstimator) -> SimulatedResult:
    run = _Run(scenario, policy, meter, [Progress() for _ in scenario.offers])
    run.asked = [0] * len(scenario.offers)
    check_s = scenario.deadline_s / CHECKS_PER_DEADLINE
    for _ in range(_MAX_EVENTS):
        _plan(run)
        _start_work(run)
        if _finished(run):
            return _outcome(run)
        run.now_s = _next_s(run, check_s)
        _arrive(run)
        _complete(run)
    raise AssertionError("expected a delivery to end")


def _plan(run: _Run) -> None:
    scenario = run.scenario
    run.plans += 1
    run.plan = run.policy(
        Situation(
            now_s=run.now_s,
            deadline_s=scenario.deadline_s,
            enough_kld=scenario.enough_kld,
            offers=scenario.offers,
            progress=tuple(run.progress),
            link=run.meter.link(),
            speeds=scenario.speeds,
            reading=Reading(run.computing[0] + 1, run.computing[1]) if run.computing else None,
        )
    )


def _start_work(run: _Run) -> None:
    _ask(run)
    progress = run.progress
    if run.decoding is None:
        for fetch in run.plan.fetches:
            one = progress[fetch.chunk]
            end = run.scenario.offers[fetch.chunk].level_ends[fetch.levels - 1]
            if one.decoded < fetch.levels and one.arrived_bytes >= end:
                until_s = run.now_s + run.scenario.decode_s(fetch.chunk, fetch.levels)
                run.decoding = (fetch, run.now_s, until_s)
                break
    if run.computing is None:
        chunk = _front(run)
        if chunk < run.plan.recompute:
            until_s = run.now_s + run.scenario.prefill_s(chunk)
            run.computing = (chunk, run.now_s, until_s)


def _ask(run: _Run) -> None:
    """Send requests in the order of the plan, as many as keep the link busy."""
    link = run.meter.link()
    window_s = max(MIN_WINDOW_S, WINDOW_ROUND_TRIPS * run.scenario.latency_s)
    window = min(MAX_WINDOW_BYTES, max(MIN_WINDOW_BYTES, link.rate * window_s))
    if run.link_free_s == 0:
        least, most = FIRST_WINDOW_BYTES
        part = WINDOW_ROUND_TRIPS * run.scenario.latency_s / run.scenario.deadline_s
        window = max(least, min(1.0, part) * most)
    outstanding = sum(one.end_byte - one.first_byte for one in run.requests) - run.fed_bytes
    for fetch in run.plan.fetches:
        end = run.scenario.offers[fetch.chunk].level_ends[fetch.levels - 1]
        if end <= run.asked[fetch.chunk]:
            continue
        if outstanding >= window:
            break
        outstanding += _send(run, fetch, end)


def _send(run: _Run, fetch: Fetch, end: int) -> int:
    trace = run.scenario.trace
    if not run.requests:
        run.meter.started(run.now_s)
    first = run.asked[fetch.chunk]
    begin_s = max(run.link_free_s, run.now_s + run.scenario.latency_s)
    end_s = trace.time_of(trace.bytes_by(begin_s) + end - first)
    run.requests.append(_Request(fetch, begin_s, max(begin_s, end_s), first, end))
    run.link_free_s = max(begin_s, end_s)
    run.asked[fetch.chunk] = end
    return end - first


def _next_s(run: _Run, check_s: float) -> float:
    deadline_s = run.scenario.deadline_s
    times = [run.now_s + check_s]
    if run.requests:
        times.append(run.requests[0].end_s)
    if run.decoding:
        times.append(run.decoding[2])
    if run.computing:
        times.append(run.computing[2])
    if run.now_s < deadline_s:
        times.append(deadline_s)
    return min(times)


def _arrive(run: _Run) -> None:
    """Everything the link has brought by now."""
    trace = run.scenario.trace
    while run.requests and run.requests[0].begin_s <= run.now_s:
        one = run.requests[0]
        size = one.end_byte - one.first_byte
        if run.fed_bytes == 0:
            run.meter.add(0, one.begin_s)
        done = one.end_s <= run.now_s
        here = size
        if not done:
            here = min(size, int(trace.bytes_by(run.now_s) - trace.bytes_by(one.begin_s)))
        run.meter.add(here - run.fed_bytes, min(one.end_s, run.now_s))
        run.fed_bytes = here
        chunk = one.fetch.chunk
        run.progress[chunk] = replace(run.progress[chunk], arrived_bytes=one.first_byte + here)
        if not done:
            return
        run.events.append(Event("load", chunk, one.fetch.levels, one.begin_s, one.end_s))
        run.requests.popleft()
        run.fed_bytes = 0
        if not run.requests:
            run.meter.idle(one.end_s)


def _complete(run: _Run) -> None:
    if run.decoding and run.decoding[2] <= run.now_s:
        fetch, start_s, end_s = run.decoding
        run.progress[fetch.chunk] = replace(run.progress[fetch.chunk], decoded=fetch.levels)
        run.events.append(Event("decode", fetch.chunk, fetch.levels, start_s, end_s))
        run.decoding = None
    if run.computing and run.computing[2] <= run.now_s:
        chunk, start_s, end_s = run.computing
        run.progress[chunk] = replace(run.progress[chunk], computed=True)
        run.events.append(Event("compute", chunk, 0, start_s, end_s))
        run.computing = None


def _front(run: _Run) -> int:
    """How many chunks the model has read."""
    first = (i for i, one in enumerate(run.progress) if not one.computed)
    return next(first, len(run.progress))


def _finished(run: _Run) -> bool:
    """All that was planned is done; or the time is over and every chunk is there somehow."""
    if not all(one.computed or one.decoded for one in run.progress):
        return False
    if run.now_s >= run.scenario.deadline_s:
        return True
    computed = _front(run)
    return not run.plan.fetches and run.decoding is None and computed >= run.plan.recompute


def _outcome(run: _Run) -> SimulatedResult:
    scenario, progress = run.scenario, run.progress
    parts = zip(scenario.offers, shares(scenario.offers), progress, strict=True)
    kld = math.fsum(
        share * offer.expected_kld[one.decoded - 1]
        for offer, share, one in parts
        if not one.computed
    )
    return SimulatedResult(
        met=run.now_s <= scenario.deadline_s,
        ttft_s=run.now_s,
        kld=kld,
        num_bytes=sum(one.arrived_bytes for one in progress),
        levels=tuple(0 if one.computed else one.decoded for one in progress),
        plans=run.plans,
        events=tuple(run.events),
    )
