"""**No generation loss.** Blocks that were loaded with losses, or computed on top of such, are
known by their ids: vLLM's prefix cache may hand them to any request. Nothing behind the first of
them is published. A block counts as the model's own again when it is given out anew. Values that
another connector has brought (`MultiConnector`) may be anything, so they count as lossy.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdn.engines.vllm.messages import LoadOrder
from kdn.engines.vllm.request_state import RequestState


class LossyBlocks:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ids: set[int] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def loaded(self, order: LoadOrder, exact_until: int) -> None:
        first, last = order.start // self._block_tokens, order.end // self._block_tokens
        for number in range(first, last):
            is_exact = (number + 1) * self._block_tokens <= exact_until
            self._mark(order.block_ids[number], is_lossy=not is_exact)

    def brought(self, state: RequestState, block_ids: Sequence[int], num_computed: int) -> None:
        """Of a request that begins, or begins again: what nobody here has loaded or computed. This
        comes before any is `placed`: others of the same step may share its blocks."""
        held = -(-num_computed // self._block_tokens)
        if num_computed > state.own_until:
            for block_id in block_ids[state.own_until // self._block_tokens : held]:
                self._mark(block_id, is_lossy=True)

    def placed(self, state: RequestState, block_ids: Sequence[int], num_computed: int) -> None:
        """A request begins, or begins again: its first `num_computed` tokens are there already."""
        held = -(-num_computed // self._block_tokens)
        lossy = (number for number, one in enumerate(block_ids[:held]) if one in self._ids)
        first = next(lossy, None)
        state.exact_until = None if first is None else first * self._block_tokens
        state.block_ids = list(block_ids[:held])
        self.extended(state, block_ids[held:])

    def extended(self, state: RequestState, block_ids: Sequence[int]) -> None:
        """Blocks whose values the model computes from now on."""
        state.block_ids += block_ids
        for block_id in block_ids:
            self._mark(block_id, is_lossy=state.exact_until is not None)

    def _mark(self, block_id: int, *, is_lossy: bool) -> None:
        if is_lossy:
            self._ids.add(block_id)
        else:
            self._ids.discard(block_id)
