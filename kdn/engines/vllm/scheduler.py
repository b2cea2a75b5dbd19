"""The scheduler's side: which tokens of a request to load, and which chunks to publish.

It never waits. A lookup begins when a request arrives; as long as it is under way vLLM is told to
ask again, and after its time a request counts as unknown. After a lookup without any answer nodes
are not asked for a while: one that is away costs one request its `lookup_s`, not all.

Everything here runs on the one thread of vLLM's scheduler.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from typing import Any

from kdn.cache.keys import Namespace
from kdn.delivery.known import Known
from kdn.engines.vllm.early import Prospect
from kdn.engines.vllm.events import Events
from kdn.engines.vllm.identity import Identity
from kdn.engines.vllm.join_lookup import KnownJoin, Wanted
from kdn.engines.vllm.joins import Joins
from kdn.engines.vllm.lossy_blocks import LossyBlocks
from kdn.engines.vllm.messages import LoadOrder, LoadReport, SaveOrder, Step
from kdn.engines.vllm.request_state import RequestState, must_compute, origin_of, turn
from kdn.engines.vllm.saving import Saving
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.telling import Telling

logger = logging.getLogger(__name__)

AWAY_S = 5.0
"""Nobody is asked for so long after a lookup that nobody answered."""
PATIENCE = 2
"""A lookup ends by itself; one that does not, on a busy machine, is given up after so many times
its own limit."""
NO_ROOM_S = 0.05
"""So long after chunks found no room they are not tried again."""
SHORT_S = 0.003
"""An engine that computes nothing waits so long for a lookup, which may be about to end: to be
asked again costs a step, and vLLM sleeps for a millisecond then."""

LEAST_GAIN = 0.1
"""Of a join: so much of it must be new. For less, values as the model computes them are not given
up."""

LookUp = Callable[[Sequence[int], Namespace, float, Prospect], "Future[Known]"]
"""Tokens, whose, the seconds for places to answer, and what is going to be loaded. With no time,
places are not asked, and only what this host holds is known."""
LookUpJoin = Callable[[Sequence[int], Namespace, Wanted], "Future[Known]"]
"""The same for a prompt with pieces: it is looked up as it is, and as their join."""


class SchedulerSide:
    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        look_up: LookUp,
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        ranks: int = 1,
        events: Events | None = None,
        look_up_join: LookUpJoin | None = None,
    ) -> None:
        """`ranks`: so many workers report each load, not all at once. `events`: for routers.
        `look_up_join`: None if nothing is ever joined."""
        self._settings, self._identity, self._look_up = settings, identity, look_up
        self._block_tokens, self._clock = block_tokens, clock
        self.counts = dict.fromkeys(
            (
                "asked",
                "asked_tokens",
                "hits",
                "hit_tokens",
                "late",
                "refused",
                "lossy",
                "stopped",
                "unpublished_chunks",
                "joins",
                "refused_joins",
            ),
            0,
        )
        self._look_up_join = look_up_join
        self._joins = Joins(self.counts)
        self.states: dict[str, RequestState] = {}
        self.loading: dict[str, LoadOrder] = {}
        self.lossy = LossyBlocks(block_tokens)
        self._saving = Saving(self.counts)
        self._orders: list[LoadOrder] = []
        self._away_until_s = 0.0
        self._computing: set[str] = set()
        """Requests that the last step computed."""
        self._patience_s = SHORT_S
        """What is left of it in this step."""
        self._ranks, self._reported = ranks, LoadReport()
        self._num_loads = 0
        self._telling = None if events is None else Telling(events)

    def stop(self) -> None:
        """For good: the names of chunks may not fit the model's weights any more."""
        self.counts["stopped"] += 1
        self._settings = replace(self._settings, load=False, publish=False)
        for state in self.states.values():
            state.settings = replace(state.settings, load=False, publish=False)
            state.forget_lookup()
        if self._telling is not None:
            self._telling.events.clear()

    # requests

    def arrived(self, request: Any) -> RequestState:
        has_salt = bool(request.cache_salt)
        try:
            settings = self._settings.for_request(request.kv_transfer_params, has_salt=has_salt)
            namespace = self._identity.of(request)
        except Exception as error:  # whatever a request is like, the engine goes on
            self._refuse(request, error)
            settings, namespace = self._settings, None
        state = RequestState(
            request, settings, namespace, salt=request.cache_salt, origin=origin_of(request)
        )
        self.states[request.request_id] = state
        self._joins.arrived(state)
        self._begin_lookup(state)
        return state

    def finished(self, request_id: str) -> None:
        """Loads that are under way go on: the worker reports them."""
        state = self.states.pop(request_id, None)
        if state is not None:
            state.origin.end()
            self.counts["unpublished_chunks"] += state.unsaved
        if state is not None and state.lookup is not None:
            state.lookup.cancel()

    def _refuse(self, request: Any, why: object) -> None:
        logger.warning("no cache is used for request %s: %.300s", request.request_id, why)
        self.counts["refused"] += 1

    def _is_named(self, state: RequestState) -> bool:
        """Whether its chunks have the names still that they had when it arrived. A session whose
        input is streamed may have got media since then, an adapter other files."""
        if state.namespace is None:
            return False
        try:
            salt = state.salt if state.is_join else state.request.cache_salt
            if self._identity.under(state.request, salt) == state.namespace:
                return True
            self._refuse(state.request, "its salt or its adapter has changed")
        except Exception as error:
            self._refuse(state.request, error)
        state.namespace = None
        state.forget_lookup()
        return False

    # lookups

    def _begin_lookup(self, state: RequestState) -> None:
        """Unless there is not even one block, nobody to ask, or no use for an answer."""
        state.asked = turn(state.request)
        state.failed_from = None
        state.forget_lookup()
        settings = state.settings
        if state.namespace is None or not settings.load or must_compute(state.request):
            return
        tokens = list(state.request.all_token_ids)
        if len(tokens) <= self._block_tokens:
            return
        limit_s = settings.lookup_s if self._clock() >= self._away_until_s else 0.0
        if self._telling is not None:
            self._telling.asking(state, asks_places=limit_s > 0)
        self.counts["asked"] += 1
        self.counts["asked_tokens"] += len(tokens)
        state.until_s = math.inf
        with state.origin.resumed():
            if state.pieces == () or self._look_up_join is None:
                state.prospect = prospect = Prospect(
                    state.request.request_id, self._in_blocks(state.request.num_tokens - 1),
                    self._block_tokens, settings.quality, settings.deadline_s,
                )  # fmt: skip
                state.lookup = self._look_up(tokens, state.namespace, limit_s, prospect)
            else:
                wanted = Wanted.of(state.pieces, settings, limit_s)
                state.lookup = self._look_up_join(tokens, state.namespace, wanted)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the local ones can be loaded; None: ask again."""
        state = self.states.get(request.request_id) or self.arrived(request)
        state.local_tokens = state.own_until = local_tokens
        if state.asked != turn(request):
            self._begin_lookup(state)  # what it had may have been published meanwhile
        if state.lookup is None or state.tried == request.num_preemptions:
            return 0, False
        if must_compute(request):  # whether or not this vLLM drops the hit by itself
            return 0, False
        if self._in_blocks(request.num_tokens - 1) <= local_tokens:
            return 0, False  # vLLM has all that could be loaded: nothing to wait for
        if state.prospect is not None:
            state.prospect.start = local_tokens
        # It may wait in its queue as long as the request waits in vLLM's.
        now_s = self._clock()
        state.until_s = min(state.until_s, now_s + PATIENCE * state.settings.lookup_s)
        if self._still_waits(state) and now_s < state.until_s:
            return None, False
        end, join = self._reach(state)
        if end <= local_tokens or not self._is_named(state):
            return 0, False
        if join is not None and not self._joins.is_isolated(state, join):
            if self._joins.isolate(state, join):
                return None, False  # vLLM has other blocks for it now: it looks again
            return self.matched(request, local_tokens)
        return end - local_tokens, True

    def _reach(self, state: RequestState) -> tuple[int, KnownJoin | None]:
        """Up to where a request can be loaded, and the join if it takes one for that."""
        known, most = self._settled(state), state.request.num_tokens - 1
        end = self._in_blocks(min(known.end, most))
        if isinstance(known, KnownJoin) and known.join is not None and state.pieces != ():
            join_end = self._in_blocks(min(known.join.num_tokens, most))
            exact_end = end if state.is_join else max(end, state.local_tokens)
            if join_end - exact_end >= LEAST_GAIN * join_end:
                return join_end, known
        return end, None

    def _in_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._block_tokens * self._block_tokens

    def _still_waits(self, state: RequestState) -> bool:
        """For its lookup; for a moment it is waited for here, if nothing else has to be done."""
        lookup = state.lookup
        if lookup is None or lookup.done():
            return False
        if self._patience_s > 0 and self._computing.isdisjoint(self.states):
            began_s = self._clock()
            wait([lookup], self._patience_s)
            self._patience_s -= self._clock() - began_s
        return state.is_waiting

    def _settled(self, state: RequestState) -> Known:
        """What came of its lookup, which is given up if it has not ended."""
        if state.known is None:
            state.known = known = Known() if state.lookup is None else self._outcome(state.lookup)
            if isinstance(known, KnownJoin) and known.refusal:
                self._joins.refuse(state, known.refusal)
            if self._telling is not None and state.lookup is not None and not state.is_join:
                is_usual = state.settings.quality >= self._settings.quality
                self._telling.found(state, is_usual=is_usual)
        return state.known

    def _outcome(self, lookup: Future[Known]) -> Known:
        if lookup.cancel():
            self.counts["late"] += 1
            return Known(is_late=True)
        try:
            known = lookup.result()
        except (Exception, CancelledError):
            logger.exception("a lookup failed")
            return Known(is_late=True)
        if known.is_late:
            self.counts["late"] += 1
            self._away_until_s = self._clock() + AWAY_S
        return known

    # loads

    def allocated(self, request: Any, block_ids: Sequence[int], num_tokens: int) -> None:
        """vLLM has made room for what `matched` promised."""
        if num_tokens <= 0:
            return
        state = self.states[request.request_id]
        start, end = state.local_tokens, state.local_tokens + num_tokens
        known, settings = self._settled(state), state.settings
        self._num_loads += 1
        _, join = self._reach(state)
        if join is not None:
            chunks, heads = join.parts.chunks, join.parts.heads(join.parts.chunks)
            self.counts["joins"] += 1
        else:
            chunks = tuple(c for c in known.chunks if c.start < end and c.end > start)
            heads = known.heads(chunks)
        order = LoadOrder(
            request.request_id, chunks, heads, start, end, tuple(block_ids),
            settings.deadline_s, settings.quality, self._is_strict(state), self._num_loads,
            None if join is None else join.order(), state.origin.traceparent,
        )  # fmt: skip
        state.tried, state.own_until = request.num_preemptions, end
        self._orders.append(order)
        self.loading[request.request_id] = order
        self.counts["hits"] += 1
        self.counts["hit_tokens"] += num_tokens

    def host_tokens(self, request_id: str) -> int:
        """How many tokens of a load that is under way this host held when it was looked up."""
        order = self.loading.get(request_id)
        if order is None or order.join is not None:
            return 0
        held = [c for c, head in zip(order.chunks, order.heads, strict=True) if not head]
        return sum(min(c.end, order.end) - max(c.start, order.start) for c in held)

    def _is_strict(self, state: RequestState) -> bool:
        """The operator's deadline may cost quality. A shorter one of a request's own may not, or
        its coarse blocks would serve others from vLLM's prefix cache."""
        is_alone = self._settings.allow_coarser and state.salt
        return not is_alone and state.settings.deadline_s < self._settings.deadline_s

    def loaded(self, report: LoadReport) -> None:
        """What became of loads. One that has not ended on all ranks is still under way."""
        if report.weights_changed:
            self.stop()
        if self._telling is not None and not self.counts["stopped"]:
            self._telling.events.changed(report.changes)
        for request_id, chunks in report.unsaved.items():
            self._unsaved(self.states.get(request_id), chunks)
        self._reported = self._reported.joined(replace(report, unsaved={}, changes=()))
        report = self._reported.take(self._ranks)
        for request_id, exact_until in report.exact_until.items():
            order = self.loading.pop(request_id, None)
            if order is None:
                continue
            self.lossy.loaded(order, order.start if order.join is not None else exact_until)
            if request_id in report.failed_from and order.join is None:
                self._failed(order, report.failed_from[request_id])

    def _failed(self, order: LoadOrder, start: int) -> None:
        """What did not load may be a stream that nobody can use: what is computed in its place is
        offered again, and whoever publishes it knows whether it is wanted."""
        failed = [chunk for chunk in order.chunks if chunk.end > start]
        self._saving.forget(failed)
        if self._telling is not None:
            self._telling.lost(failed)
        if (state := self.states.get(order.request_id)) is not None:
            state.failed_from = start

    def _unsaved(self, state: RequestState | None, chunks: Mapping[bytes, int]) -> None:
        if state is None:  # its blocks are gone
            self.counts["unpublished_chunks"] += len(chunks)
            return
        self._saving.again(state, chunks)
        state.save_after_s = self._clock() + NO_ROOM_S

    # steps

    def step(self, output: Any) -> Step:
        """What the worker is to do beside the step that vLLM has just planned."""
        placed = [(one.req_id, one.block_ids, one.num_computed_tokens)
                  for one in output.scheduled_new_reqs]  # fmt: skip
        cached = output.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            state, blocks = self.states.get(request_id), cached.new_block_ids[number]
            if state is None or blocks is None:
                continue
            if request_id in cached.resumed_req_ids:
                placed.append((request_id, blocks, cached.num_computed_tokens[number]))
            else:
                self.lossy.extended(state, blocks[0])
        for note in (self.lossy.brought, self.lossy.placed):
            for request_id, blocks, num_computed in placed:
                if (state := self.states.get(request_id)) is not None:
                    note(state, blocks[0], num_computed)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if (state := self.states.get(request_id)) is not None:
                computed = state.request.num_computed_tokens + num_tokens
                state.own_until = max(state.own_until, computed)
        saves = [self._save(*item) for item in output.num_scheduled_tokens.items()]
        orders, self._orders = tuple(self._orders), []
        self._computing, self._patience_s = set(output.num_scheduled_tokens), SHORT_S
        return Step(
            orders,
            tuple(save for save in saves if save is not None),
            output.total_num_scheduled_tokens,
            any(state.is_waiting for state in self.states.values()),
            self.counts["stopped"] > 0,
        )

    def _save(self, request_id: str, num_tokens: int) -> SaveOrder | None:
        state = self.states.get(request_id)
        if state is None or state.namespace is None or not state.settings.publish:
            return None
        if self._clock() < state.save_after_s:
            return None
        request = state.request
        # Tokens that are sampled in steps still under way have no ids yet.
        covered = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        if not self._saving.is_due(state, covered) or not self._is_named(state):
            return None
        if state.is_waiting:
            return None  # what is known already shows then: a later step saves what is new
        self._settled(state)
        order = self._saving.order(state, covered)
        if order is not None and self._telling is not None:
            self._telling.events.follow(request, order.chunks)
        return order
