"""The plan that a delivery follows, and when it is made anew.

After everything that changes, but not all the time; and not at all on a link so fast that what was
asked for is here before another plan could make a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kdn.delivery.decode import Decoder
from kdn.delivery.estimate import Gauge
from kdn.delivery.front import Front
from kdn.delivery.lookup import Incoming
from kdn.delivery.plan import Offer, Plan, Policy, Progress, Reading, Situation
from kdn.delivery.request import Request
from kdn.delivery.transfer import Transfer
from kdn.tracing import span

PLAN_S = 0.005
"""Not more often, nor more than a fifth of the time, is spent on planning."""
REPLAN_S = 0.25
TRACED_PLANS = 8
"""Of a delivery. A slow one makes thousands, each hardly other than the last."""
BREAK = 0.25
"""An estimate that has moved by this much makes a new plan."""


class Course:
    def __init__(
        self,
        request: Request,
        known: Sequence[Incoming],
        transfer: Transfer,
        decoder: Decoder,
        front: Front,
        gauge: Gauge,
        policy: Policy,
        now_s: Callable[[], float],
    ) -> None:
        self.plan = Plan((), 0, 0.0, 0.0)
        self.first: Plan | None = None
        self.plans = 0
        """How many were made."""
        self.is_stale = True
        """Something has changed since the last plan."""
        self.wanted_s = 0.0
        """Since then every plan has wanted the model."""
        self._request, self._known, self._transfer = request, known, transfer
        self._decoder, self._front, self._gauge = decoder, front, gauge
        self._policy, self._now_s = policy, now_s
        self._weights = request.weights()
        self._planned_s = -REPLAN_S
        self._planning_s = 0.0
        self._planned_rate = 0.0
        self._planned_troubles = 0
        self._offers: tuple[Offer, ...] = ()
        self._offered: tuple[tuple[bytes, int], ...] = ()

    @property
    def wants_model(self) -> bool:
        return self._request.compute is not None and self._front.num_read < self.plan.recompute

    def is_due(self) -> bool:
        """Whether it is time for another plan."""
        since_s = self._now_s() - self._planned_s
        if since_s < max(PLAN_S, 5 * self._planning_s) or self._is_soon_done():
            return False
        rate = self._transfer.link().rate
        broken = abs(rate - self._planned_rate) > BREAK * max(self._planned_rate, 1.0)
        return self.is_stale or broken or since_s >= REPLAN_S

    def surely_s(self, limit_s: float) -> float | None:
        """When all that is asked for is surely here, of which nothing is left to the model; None
        if that is not within the limit, or not long before the deadline."""
        plan, request = self.plan, self._request
        if not plan.fetches or plan.recompute or plan.kld > request.enough_kld:
            return None
        latest_s = min(self._now_s() + limit_s, request.deadline_s / 2)
        return plan.done_s if plan.done_s < latest_s else None

    def _is_soon_done(self) -> bool:
        """Whether all that is asked for is about to be here, long before the deadline, and nothing
        went wrong: no plan could be a better one."""
        plan, request = self.plan, self._request
        if not plan.fetches or plan.recompute or plan.kld > request.enough_kld:
            return False
        soon_s = min(self._planned_s + REPLAN_S, request.deadline_s / 2)
        in_time = plan.done_s < soon_s and self._now_s() < soon_s
        return in_time and self._num_troubles() == self._planned_troubles

    def _num_troubles(self) -> int:
        return len(self._transfer.troubles) + len(self._decoder.troubles)

    def plan_anew(self) -> None:
        self._planned_s = self._now_s()
        situation = self._situation()
        self.plans += 1
        if self.plans <= TRACED_PLANS:
            with span("kdn.plan", number=self.plans):
                self.plan = self._policy(situation)
        else:
            self.plan = self._policy(situation)
        self.first = self.first or self.plan
        if not self.wants_model:
            self.wanted_s = self._now_s()
        self._planned_rate = situation.link.rate
        self._planned_troubles = self._num_troubles()
        self._planning_s = self._now_s() - self._planned_s
        self.is_stale = False

    def _situation(self) -> Situation:
        return Situation(
            now_s=self._now_s(),
            deadline_s=self._request.deadline_s,
            enough_kld=self._request.enough_kld,
            offers=self._current_offers(),
            progress=tuple(map(_progress, self._known)),
            link=self._transfer.link(),
            speeds=self._gauge.speeds,
            reading=self._reading(),
            shared=self._request.shared,
        )

    def _reading(self) -> Reading | None:
        """Of what the model has in hand, the part that could be loaded as well."""
        reading = self._front.reading
        if reading is None or self._front.num_read >= len(self._known):
            return None
        return Reading(min(reading.end, len(self._known)), reading.began_s)

    def _current_offers(self) -> tuple[Offer, ...]:
        """The same object as long as nothing has changed: planners keep what they derive of it."""
        streams = tuple((one.assembly.stream_id, one.assembly.stored) for one in self._known)
        if streams != self._offered:
            kld = tuple(self._request.expected_kld)
            self._offered = streams
            self._offers = tuple(
                Offer(
                    one.chunk.num_tokens,
                    one.assembly.wanted_ends,
                    kld[: one.assembly.stored],
                    self._weights[one.number],
                )
                for one in self._known
            )
        return self._offers


def _progress(one: Incoming) -> Progress:
    if one.lost:  # nothing more will come: for a planner it is as good as done
        return Progress(one.assembly.wanted_ends[-1], len(one.assembly.wanted_ends))
    return Progress(one.assembly.wanted_arrived, one.decoded, one.computed)
