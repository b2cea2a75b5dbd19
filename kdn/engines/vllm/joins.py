"""Joins, on the scheduler's side: which requests have pieces, and that nobody else gets their
blocks.

**Isolation.** vLLM's prefix cache knows a block by a hash over its tokens and the request's cache
salt. Before anything is loaded for a join, its request gets a salt that only the same join has: the
same pieces, seams, quality and salt of its own, in this engine. So a request without a join never
finds a joined block, nor what was computed on top of one, and none can guess its name. Where the
hashes do not change as they should, nothing is joined.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

from kdn.engines.vllm.join_lookup import KnownJoin
from kdn.engines.vllm.piece_ranges import Range, checked_ranges, separated
from kdn.engines.vllm.request_state import RequestState
from kdn.engines.vllm.settings import PIECES_KEY, REQUEST_KEY, Settings
from kdn.errors import UnsupportedError

logger = logging.getLogger(__name__)

SALT_PREFIX = "kdn-join-"


class Joins:
    """Those of one engine."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts
        self._key = token_bytes(32)

    def arrived(self, state: RequestState) -> None:
        """Finds out where its pieces are, if they are to be joined."""
        if state.namespace is None:
            return
        try:
            state.pieces = self._pieces(state.request, state.settings)
        except Exception as error:  # whatever a request is like, the engine goes on
            self.refuse(state, error)

    def _pieces(self, request: Any, settings: Settings) -> tuple[Range, ...] | None:
        given = ((request.kv_transfer_params or {}).get(REQUEST_KEY) or {}).get(PIECES_KEY)
        if given is not None:
            ranges = checked_ranges(given, request.num_prompt_tokens)
            if why := _unjoinable(request, settings):
                raise UnsupportedError(why)
            return ranges if settings.load else ()
        if settings.blend in ("off", "ranges") or not settings.load:
            return ()
        if _unjoinable(request, settings):
            return ()  # it did not ask for it
        if settings.blend == "auto":
            return None
        assert not isinstance(settings.separator, str), "a text is made tokens at the start"
        return separated(request.prompt_token_ids, settings.separator)

    def refuse(self, state: RequestState, why: object) -> None:
        """Its pieces are not joined: it is served like any other."""
        state.pieces = ()
        logger.warning("request %s is not joined: %.300s", state.request.request_id, why)
        self._counts["refused_joins"] += 1

    def isolate(self, state: RequestState, known: KnownJoin) -> bool:
        """From now on its blocks are the join's alone, and nothing of it is published. After a
        preemption the join may be another."""
        try:
            is_done = renamed(state.request, self._salt(state, known))
        except Exception as error:
            logger.warning("a request of another kind than kdn knows: %r", error)
            is_done = False
        if not is_done:
            self.refuse(state, "its blocks cannot be kept from others in vLLM's prefix cache")
            return False
        state.begin_join()
        return True

    def is_isolated(self, state: RequestState, known: KnownJoin) -> bool:
        return state.is_join and state.request.cache_salt == self._salt(state, known)

    def _salt(self, state: RequestState, known: KnownJoin) -> str:
        assert known.join is not None
        about = (
            state.salt, known.join.pieces[0].head, known.join.starts, known.join.num_tokens,
            known.seams.hex(), state.settings.quality,
        )  # fmt: skip
        digest = blake2b(repr(about).encode(), key=self._key, digest_size=24)
        return SALT_PREFIX + digest.hexdigest()


def _unjoinable(request: Any, settings: Settings) -> str:
    """Why the pieces of such a request are not joined; empty if they are."""
    reasons = {
        'this engine joins nothing ("blend" is "off")': settings.blend == "off",
        "pieces under a LoRA adapter: seams are the model's own": request.lora_request is not None,
        "pieces in a prompt whose input is streamed": getattr(request, "resumable", False),
        "pieces in a request for pooling": getattr(request, "pooling_params", None) is not None,
    }
    return next((why for why, is_so in reasons.items() if is_so), "")


def renamed(request: Any, salt: str) -> bool:
    """Whether all its blocks have other hashes now, under this salt. If not, all is as before.

    vLLM has hashed the prompt when the request was made. Its hashes are a list, which the request
    itself makes longer as it grows; emptied, it is made from the beginning."""
    own, before = request.cache_salt, list(request.block_hashes)
    if not before or request.num_computed_tokens:
        return False
    try:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
        after = list(request.block_hashes)
        if len(after) == len(before) and set(after).isdisjoint(before):
            return True
    except Exception:
        _restore(request, own, before)
        raise
    _restore(request, own, before)
    return False


def _restore(request: Any, salt: str | None, hashes: list[Any]) -> None:
    request.cache_salt = salt
    request.block_hashes[:] = hashes
