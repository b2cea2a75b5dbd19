"""A request of vLLM's, as far as kdn is concerned."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from kdn.cache.keys import Namespace
from kdn.delivery.known import Known
from kdn.engines.vllm.early import Prospect
from kdn.engines.vllm.piece_ranges import Range
from kdn.engines.vllm.settings import Settings
from kdn.tracing import TRACE_HEADER, Request


@dataclass
class RequestState:
    request: Any
    settings: Settings
    namespace: Namespace | None
    """None: no cache is used for it."""
    pieces: tuple[Range, ...] | None = ()
    """Where they are, if they are to be joined; None: that is to be found out."""
    is_join: bool = False
    """Its blocks are a join's: they serve nobody else, and nothing of it is published."""
    salt: str | None = None
    """The cache salt that it came with: a join has another."""
    lookup: Future[Known] | None = None
    known: Known | None = None
    """What came of the lookup; None: nothing yet."""
    prospect: Prospect | None = None
    """What it will load if it is found."""
    asked: tuple[int, int] | None = None
    """What `turn` gave when it was looked up."""
    asked_at: int = 0
    """`Events.num_changes` then."""
    asked_places: bool = False
    """Whether others than this host were asked."""
    until_s: float = math.inf
    """The lookup is waited for until then, from when vLLM first asks."""
    local_tokens: int = 0
    """In vLLM's own prefix cache, as of the last question."""
    own_until: int = 0
    """Up to here, values are those of that cache, of kdn, or computed by the model since."""
    tried: int = -1
    """How often it had been preempted when its load began: one load for each time."""
    block_ids: list[int] = field(default_factory=list)
    exact_until: int | None = None
    """Tokens from here on were computed on top of losses. None: there are none."""
    failed_from: int | None = None
    """Tokens from here on were known, and did not load. None: all that was tried did."""
    saved_until: int = 0
    tail_saved: bool = False
    unsaved: int = 0
    """Chunks that found no room when they were to be saved."""
    save_after_s: float = 0.0
    """Nothing is saved before: there was no room."""
    origin: Request = field(default_factory=lambda: Request(""), repr=False)
    """Its id, and the span that all that is done for it is under."""

    @property
    def is_waiting(self) -> bool:
        return self.lookup is not None and not self.lookup.done()

    @property
    def known_end(self) -> int:
        """Tokens before this one need not be published."""
        end = self.known.end if self.known is not None else 0
        return end if self.failed_from is None else min(end, self.failed_from)

    def begin_join(self) -> None:
        """For good."""
        self.is_join = True
        self.settings = replace(self.settings, publish=False)

    def forget_lookup(self) -> None:
        self.lookup = self.known = self.prospect = None


def origin_of(request: Any) -> Request:
    """By vLLM's own id, under the span that its caller told vLLM of."""
    headers = getattr(request, "trace_headers", None) or {}
    parent = headers.get(TRACE_HEADER, "")
    told = parent if isinstance(parent, str) else ""
    return Request.begin("kdn.request", str(request.request_id), told)


def turn(request: Any) -> tuple[int, int]:
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
