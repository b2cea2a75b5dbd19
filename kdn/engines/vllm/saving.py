"""Which chunks of a request to publish: those that a step completes, that nobody is known to have,
and that were not computed on top of losses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from kdn.cache.keys import CHUNK_TOKENS, Chunk, Namespace, cut
from kdn.engines.vllm.messages import SaveOrder
from kdn.engines.vllm.request_state import RequestState
from kdn.session.delivered import may_be_published

MAX_REMEMBERED = 1 << 16


class Saving:
    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts
        self._saved_keys: OrderedDict[bytes, None] = OrderedDict()

    def is_due(self, state: RequestState, covered: int) -> bool:
        """Whether a request has a new chunk, now that so many tokens of it are computed."""
        return _full(covered) > state.saved_until or _ends_prompt(state, covered)

    def order(self, state: RequestState, covered: int) -> SaveOrder | None:
        request, namespace = state.request, state.namespace
        assert namespace is not None
        end, start = _full(covered), max(state.saved_until, _full(state.known_end))
        chunks = cut(request.all_token_ids[:end], namespace) if end > start else []
        if _ends_prompt(state, covered):
            state.tail_saved = True
            chunks += _tails(state, namespace)
        state.saved_until, state.unsaved = end, 0
        wanted = [chunk for chunk in chunks if chunk.start >= start and self._is_new(state, chunk)]
        if not wanted:
            return None
        return SaveOrder(
            request.request_id, tuple(wanted), tuple(state.block_ids), state.exact_until,
            state.origin.traceparent,
        )  # fmt: skip

    def forget(self, chunks: Iterable[Chunk]) -> None:
        """They may be saved again."""
        for chunk in chunks:
            self._saved_keys.pop(chunk.key, None)

    def again(self, state: RequestState, chunks: Mapping[bytes, int]) -> None:
        """These, by their keys and where they start, found no room: a later step saves them, if the
        request lives so long."""
        for key in chunks:
            self._saved_keys.pop(key, None)
        first, last = min(chunks.values()), max(chunks.values())
        state.saved_until = min(state.saved_until, first)
        state.tail_saved &= last < _full(state.request.num_prompt_tokens)
        state.unsaved += len(chunks)

    def _is_new(self, state: RequestState, chunk: Chunk) -> bool:
        if not may_be_published(chunk, state.exact_until):
            self._counts["lossy"] += 1
            return False
        is_new = chunk.key not in self._saved_keys
        self._saved_keys[chunk.key] = None
        self._saved_keys.move_to_end(chunk.key)
        if len(self._saved_keys) > MAX_REMEMBERED:
            self._saved_keys.popitem(last=False)
        return is_new


def _tails(state: RequestState, namespace: Namespace) -> list[Chunk]:
    """The end of its prompt, as others look for it who read on; of a piece, also all of it, for
    those who know where it ends."""
    prompt = state.request.all_token_ids[: state.request.num_prompt_tokens]
    ends = [cut(prompt, namespace)[-1:]]
    if state.settings.learn:
        ends.append(cut(prompt, namespace, whole=True)[-1:])
    tails = {one.key: one for end in ends for one in end if one.num_tokens < CHUNK_TOKENS}
    return list(tails.values())


def _full(num_tokens: int) -> int:
    """As many of them as are in full chunks."""
    return num_tokens // CHUNK_TOKENS * CHUNK_TOKENS


def _ends_prompt(state: RequestState, covered: int) -> bool:
    return covered >= state.request.num_prompt_tokens and not state.tail_saved
