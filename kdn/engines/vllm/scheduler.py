"""The scheduler's side: which tokens of a request to load, and which chunks to publish.

It never waits. A lookup begins when a request arrives; as long as it is under way vLLM is told to
ask again, and after its time a request counts as unknown. After a lookup without any answer nodes
are not asked for a while: one that is away costs one request its `lookup_s`, not all.

**No generation loss.** Blocks that were loaded with losses, or computed on top of such, are known
by their ids: vLLM's prefix cache may hand them to any request. Nothing behind the first of them is
published. A block counts as the model's own again when it is given out anew.

Everything here runs on the one thread of vLLM's scheduler.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any

from kdn.cache.keys import CHUNK_TOKENS, TAIL_MULTIPLE, Chunk, Namespace, cut
from kdn.engines.vllm.identity import Identity
from kdn.engines.vllm.known import Known
from kdn.engines.vllm.messages import Load, Loaded, Save, Step
from kdn.engines.vllm.settings import Settings

logger = logging.getLogger(__name__)

AWAY_S = 5.0
"""Nobody is asked for so long after a lookup that nobody answered."""
PATIENCE = 2
"""A lookup ends by itself; one that does not, on a busy machine, is given up after so many times
its own limit."""
MAX_REMEMBERED = 1 << 16
NOTHING = Known()

LookUp = Callable[[Sequence[int], Namespace, float, float], "Future[Known]"]
"""Tokens, whose, the divergence that is good enough, and the seconds for places to answer; with
none, they are not asked, and only what this host holds is known."""


@dataclass
class Context:
    """A request, as far as kdn is concerned."""

    request: Any
    settings: Settings
    namespace: Namespace | None
    """None: no cache is used for it."""
    lookup: Future[Known] | None = None
    asked: tuple[int, int] | None = None
    """What `_turn` gave when it was looked up."""
    until_s: float = math.inf
    """The lookup is waited for until then, from when vLLM first asks."""
    local_tokens: int = 0
    """In vLLM's own prefix cache, as of the last question."""
    tried: int = -1
    """The same, when its load began: one load for each time."""
    load: Load | None = None
    block_ids: list[int] = field(default_factory=list)
    exact_until: int | None = None
    """Tokens from here on were computed on top of losses. None: there are none."""
    failed_from: int | None = None
    """Tokens from here on were known, and did not load. None: all that was tried did."""
    saved_until: int = 0
    tail_saved: bool = False


class SchedulerSide:
    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        look_up: LookUp,
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._identity, self._look_up = settings, identity, look_up
        self._block_tokens, self._clock = block_tokens, clock
        self._contexts: dict[str, Context] = {}
        self._loads: list[Load] = []
        self._loading: dict[str, Load] = {}
        self._lossy_blocks: set[int] = set()
        self._saved_keys: OrderedDict[bytes, None] = OrderedDict()
        self._away_until_s = 0.0
        self.counts = dict.fromkeys(
            ("asked", "hits", "hit_tokens", "late", "refused", "lossy", "stopped"), 0
        )

    def stop(self) -> None:
        """For good: the names of chunks may not fit the model's weights any more."""
        self.counts["stopped"] += 1
        self._settings = replace(self._settings, load=False, publish=False)
        for context in self._contexts.values():
            context.settings = replace(context.settings, load=False, publish=False)
            context.lookup = None

    # requests

    def arrived(self, request: Any) -> Context:
        has_salt = bool(request.cache_salt)
        try:
            settings = self._settings.for_request(request.kv_transfer_params, has_salt=has_salt)
            namespace = self._identity.of(request)
        except Exception as error:  # whatever a request is like, the engine goes on
            self._refuse(request, error)
            settings, namespace = self._settings, None
        context = Context(request, settings, namespace)
        self._contexts[request.request_id] = context
        self._begin_lookup(context)
        return context

    def _refuse(self, request: Any, why: object) -> None:
        logger.warning("no cache is used for request %s: %.300s", request.request_id, why)
        self.counts["refused"] += 1

    def _is_named(self, context: Context) -> bool:
        """Whether its chunks have the names still that they had when it arrived. A session whose
        input is streamed may have got media since then, an adapter other files."""
        if context.namespace is None:
            return False
        try:
            if self._identity.of(context.request) == context.namespace:
                return True
            self._refuse(context.request, "its salt or its adapter has changed")
        except Exception as error:
            self._refuse(context.request, error)
        context.namespace = context.lookup = None
        return False

    def _begin_lookup(self, context: Context) -> None:
        """Unless there is not even one block, nobody to ask, or no use for an answer."""
        context.asked = _turn(context.request)
        context.lookup = context.failed_from = None
        if context.namespace is None or not context.settings.load or must_compute(context.request):
            return
        tokens = list(context.request.all_token_ids)
        if len(tokens) <= self._block_tokens:
            return
        settings = context.settings
        limit_s = settings.lookup_s if self._clock() >= self._away_until_s else 0.0
        self.counts["asked"] += 1
        context.until_s = math.inf
        context.lookup = self._look_up(tokens, context.namespace, settings.quality, limit_s)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the local ones can be loaded; None: ask again."""
        context = self._contexts.get(request.request_id) or self.arrived(request)
        context.local_tokens = local_tokens
        if context.asked != _turn(request):
            self._begin_lookup(context)  # what it had may have been published meanwhile
        if context.lookup is None or context.tried == request.num_preemptions:
            return 0, False
        if must_compute(request):  # whether or not this vLLM drops the hit by itself
            return 0, False
        # It may wait in its queue as long as the request waits in vLLM's.
        now_s = self._clock()
        context.until_s = min(context.until_s, now_s + PATIENCE * context.settings.lookup_s)
        if not context.lookup.done() and now_s < context.until_s:
            return None, False
        known = self._outcome(context)
        end = min(known.end, request.num_tokens - 1) // self._block_tokens * self._block_tokens
        if end <= local_tokens or not self._is_named(context):
            return 0, False
        return end - local_tokens, True

    def _outcome(self, context: Context) -> Known:
        lookup = context.lookup
        assert lookup is not None
        known = NOTHING
        if not lookup.done():
            lookup.cancel()
            context.lookup = None
            self.counts["late"] += 1
            return known
        try:
            known = lookup.result()
        except (Exception, CancelledError):
            logger.exception("a lookup failed")
            context.lookup = None
        if known.late:  # nobody answered
            self.counts["late"] += 1
            self._away_until_s = self._clock() + AWAY_S
            known = replace(known, late=False)  # told once
            context.lookup = Future()
            context.lookup.set_result(known)
        return known

    def allocated(self, request: Any, block_ids: Sequence[int], num_tokens: int) -> None:
        """vLLM has made room for what `matched` promised."""
        if num_tokens <= 0:
            return
        context = self._contexts[request.request_id]
        start, end = context.local_tokens, context.local_tokens + num_tokens
        chunks = [c for c in self._outcome(context).chunks if c.start < end and c.end > start]
        context.tried = request.num_preemptions
        settings = context.settings
        load = Load(
            request.request_id, tuple(chunks), start, end, tuple(block_ids), settings.deadline_s,
            settings.quality, self._is_strict(context),
        )  # fmt: skip
        self._loads.append(load)
        self._loading[request.request_id] = load
        self.counts["hits"] += 1
        self.counts["hit_tokens"] += num_tokens

    def _is_strict(self, context: Context) -> bool:
        """The operator's deadline may cost quality. A shorter one of a request's own may not, or
        its coarse blocks would serve others from vLLM's prefix cache."""
        is_alone = self._settings.allow_coarser and context.request.cache_salt
        return not is_alone and context.settings.deadline_s < self._settings.deadline_s

    def loaded(self, report: Loaded) -> None:
        """What became of loads: remember the blocks that hold losses."""
        if report.weights_changed:
            self.stop()
        for request_id, exact_until in report.exact_until.items():
            load = self._loading.pop(request_id, None)
            if load is None:
                continue
            first, last = load.start // self._block_tokens, load.end // self._block_tokens
            for number in range(first, last):
                is_exact = (number + 1) * self._block_tokens <= exact_until
                self._mark(load.block_ids[number], lossy=not is_exact)
            if request_id in report.failed_from:
                self._is_unknown_from(load, report.failed_from[request_id])

    def _is_unknown_from(self, load: Load, start: int) -> None:
        """What did not load may be a stream that nobody can use: what is computed in its place is
        offered again, and whoever publishes it knows whether it is wanted."""
        for chunk in load.chunks:
            if chunk.end > start:
                self._saved_keys.pop(chunk.key, None)
        if (context := self._contexts.get(load.request_id)) is not None:
            context.failed_from = start

    def finished(self, request_id: str) -> None:
        """Loads that are under way go on: the worker reports them."""
        context = self._contexts.pop(request_id, None)
        if context is not None and context.lookup is not None:
            context.lookup.cancel()

    # steps

    def step(self, output: Any) -> Step:
        """What the worker is to do beside the step that vLLM has just planned."""
        for new in output.scheduled_new_reqs:
            self._place(new.req_id, new.block_ids[0], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[number]
            if request_id in cached.resumed_req_ids and blocks is not None:
                self._place(request_id, blocks[0], cached.num_computed_tokens[number])
            elif blocks is not None:
                self._extend(request_id, blocks[0])
        saves = [self._save(*item) for item in output.num_scheduled_tokens.items()]
        loads, self._loads = tuple(self._loads), []
        return Step(
            loads,
            tuple(save for save in saves if save is not None),
            output.total_num_scheduled_tokens,
            any(c.lookup is not None and not c.lookup.done() for c in self._contexts.values()),
            self.counts["stopped"] > 0,
        )

    def _place(self, request_id: str, block_ids: Sequence[int], num_computed: int) -> None:
        """A request begins, or begins again: its first `num_computed` tokens are there already."""
        context = self._contexts.get(request_id)
        if context is None:
            return
        context.block_ids = []
        context.exact_until = None
        held = -(-num_computed // self._block_tokens)
        for number, block_id in enumerate(block_ids[:held]):
            if block_id in self._lossy_blocks:
                context.exact_until = number * self._block_tokens
                break
        context.block_ids += block_ids[:held]
        self._extend(request_id, block_ids[held:])

    def _extend(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Blocks whose values the model computes from now on."""
        context = self._contexts.get(request_id)
        if context is None:
            return
        context.block_ids += block_ids
        for block_id in block_ids:
            self._mark(block_id, lossy=context.exact_until is not None)

    def _mark(self, block_id: int, *, lossy: bool) -> None:
        if lossy:
            self._lossy_blocks.add(block_id)
        else:
            self._lossy_blocks.discard(block_id)

    def _save(self, request_id: str, num_tokens: int) -> Save | None:
        """The chunks that this step completes and nobody is known to have."""
        context = self._contexts.get(request_id)
        if context is None or context.namespace is None or not context.settings.publish:
            return None
        request = context.request
        # Tokens that are sampled in steps still under way have no ids yet.
        covered = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        end = covered // CHUNK_TOKENS * CHUNK_TOKENS
        tail_end = request.num_prompt_tokens // TAIL_MULTIPLE * TAIL_MULTIPLE
        with_tail = covered >= request.num_prompt_tokens and not context.tail_saved
        if end <= context.saved_until and not with_tail:
            return None
        if not self._is_named(context):
            return None
        start = max(context.saved_until, self._known_end(context))
        chunks = cut(request.all_token_ids[:end], context.namespace) if end > start else []
        if with_tail:
            context.tail_saved = True
            if tail_end % CHUNK_TOKENS:
                chunks += cut(request.all_token_ids[:tail_end], context.namespace)[-1:]
        context.saved_until = end
        wanted = [
            chunk for chunk in chunks if chunk.start >= start and self._is_new(context, chunk)
        ]
        return Save(request_id, tuple(wanted), tuple(context.block_ids)) if wanted else None

    def _known_end(self, context: Context) -> int:
        """Full chunks up to here need not be published."""
        lookup = context.lookup
        if lookup is None or not lookup.done() or lookup.cancelled() or lookup.exception():
            return 0
        end = lookup.result().end if context.failed_from is None else context.failed_from
        return end // CHUNK_TOKENS * CHUNK_TOKENS

    def _is_new(self, context: Context, chunk: Chunk) -> bool:
        if context.exact_until is not None and chunk.end > context.exact_until:
            self.counts["lossy"] += 1
            return False
        if chunk.key in self._saved_keys:
            self._saved_keys.move_to_end(chunk.key)
            return False
        self._saved_keys[chunk.key] = None
        if len(self._saved_keys) > MAX_REMEMBERED:
            self._saved_keys.popitem(last=False)
        return True


def _turn(request: Any) -> tuple[int, int]:
    """Another one after a preemption, and when streamed input goes on: it is looked up again."""
    return request.num_preemptions, request.num_prompt_tokens


def must_compute(request: Any) -> bool:
    """Whether every token of its prompt has to be computed, as for the prompt's log probabilities
    and for some pooling: then the values of a cache are of no use.

    vLLM decides that when a request arrives; the parameters of a session may change later. Where
    nothing says so (before vLLM had this setting), asking for log probabilities does. A request
    that says itself that it may read a cache gets none of those for what was read, as with vLLM's
    own prefix cache.
    """
    sampling = getattr(request, "sampling_params", None)
    asked = (request, sampling, getattr(request, "pooling_params", None))
    told = [getattr(one, "skip_reading_prefix_cache", None) for one in asked]
    if any(one is not None for one in told):
        return any(told)
    wished = ("prompt_logprobs", "prompt_logprob_token_ids")
    return any(getattr(sampling, name, None) is not None for name in wished)
