"""What lookups and loads of requests mean for routers: which chunks are where, or no longer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kdn.cache.keys import CHUNK_TOKENS, TAIL_MULTIPLE, Chunk, cut
from kdn.engines.vllm.events import Events
from kdn.engines.vllm.request_state import RequestState
from kdn.session.changes import Change, Medium


@dataclass
class Telling:
    """On the thread of vLLM's scheduler."""

    events: Events

    def asking(self, state: RequestState, *, asks_places: bool) -> None:
        """Its lookup begins."""
        state.asked_at, state.asked_places = self.events.num_changes, asks_places

    def found(self, state: RequestState, *, is_usual: bool) -> None:
        """Its lookup has ended. `is_usual`: it asked for no better quality than most, so what this
        host does not hold well enough for it counts as not held."""
        known, request, namespace = state.known, state.request, state.namespace
        if known is None or namespace is None:
            return
        # The whole tail of a piece is found only by those who know where it ends.
        chunks = [one for one in known.chunks if one.num_tokens % TAIL_MULTIPLE == 0]
        self.events.follow(request, chunks)
        changes: list[Change] = []
        for chunk, head in zip(chunks, known.heads(chunks), strict=True):
            changes.append(Change(chunk.key, Medium.PLACE if head else Medium.HOST, True))
            if head and is_usual:
                changes.append(Change(chunk.key, Medium.HOST, False))
        if state.asked_places and not known.is_late and known.end < request.num_tokens:
            every = cut(request.all_token_ids[: request.num_tokens], namespace)
            changes += _nowhere(one for one in every if _is_unknown(one, known.end))
        self.events.changed(changes, state.asked_at)

    def lost(self, chunks: Iterable[Chunk]) -> None:
        """They did not load: perhaps nobody can use them."""
        self.events.changed(_nowhere(chunks))


def _is_unknown(chunk: Chunk, known_end: int) -> bool:
    """Whether somebody would have had it. A tail is not always asked for."""
    return chunk.start > known_end or (chunk.end > known_end and chunk.num_tokens == CHUNK_TOKENS)


def _nowhere(chunks: Iterable[Chunk]) -> list[Change]:
    return [Change(chunk.key, medium, False) for chunk in chunks for medium in Medium]
