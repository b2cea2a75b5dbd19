"""Copies out of vLLM's memory on a GPU, for publishing: without vLLM's thread waiting for any.

Within a step, behind what the model computes: all its chunks are gathered into staging memory with
one launch, and the weights are compared with those at start. Another thread waits for both, and
hands the chunks to the publisher if the weights were the right ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import Slots, TokenRows
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.gather import gather
from kdn.engines.vllm.layout import PagedCache
from kdn.engines.vllm.messages import SaveOrder, Step
from kdn.engines.vllm.shared import Offer, SharedSession
from kdn.engines.vllm.staging import Loan, Staging

logger = logging.getLogger(__name__)

Look = Callable[[], Callable[[], bool]]
"""See `Weights.look`."""
Give = Callable[[Chunk, KVCache, int | None, float], bool]
"""Whether somebody takes a part, copied when it returns: see `Ranks.offer`."""
Gather = Callable[[Sequence[Slots], Sequence[torch.Tensor]], None]


@dataclass
class _Piece:
    order: SaveOrder
    chunk: Chunk
    loan: Loan


@dataclass
class Saver:
    """Its methods are vLLM's thread's."""

    shared: SharedSession
    paged: PagedCache
    staging: Staging
    look: Look
    counts: Counter[str]
    give: Give | None = None
    """Of several ranks: their parts go to the first, not to the publisher."""
    has_other_weights: bool = False
    """Than at start: found by the thread that waits."""
    _began: Any = None
    _gather: Gather = field(init=False)

    def __post_init__(self) -> None:
        assert self.paged.rows is not None
        self._gather = gatherer(self.paged.rows, self.paged.dtype)

    def begin(self) -> None:
        """A step after which something is to be saved."""
        self._began = self._mark()

    def save(self, step: Step) -> dict[str, dict[bytes, int]]:
        """What the step has completed. Returns what found no place, by requests: keys of chunks,
        and where they start."""
        pieces: list[_Piece] = []
        left: dict[str, dict[bytes, int]] = {}
        if not len(self.staging):
            self.counts["unpublished_chunks"] += sum(len(order.chunks) for order in step.saves)
            return left
        for order in step.saves:
            for chunk in order.chunks:
                loan = self.staging.borrow(chunk) if self.shared.has_room() else None
                if loan is None:
                    left.setdefault(order.request_id, {})[chunk.key] = chunk.start
                else:
                    pieces.append(_Piece(order, chunk, loan))
        if pieces:
            self._copy(pieces, step)
        return left

    def _copy(self, pieces: Sequence[_Piece], step: Step) -> None:
        try:
            self._gather(
                [self._slots(piece) for piece in pieces], [piece.loan.place for piece in pieces]
            )
            ready, changed = self._mark(), self.look()
        except Exception:
            for piece in pieces:
                piece.loan.give_back()
            self.counts["unpublished_chunks"] += len(pieces)
            raise
        began = self._began
        for piece in pieces:
            piece.loan.ready = ready
        self.shared.publish_later(
            lambda: self._offers(pieces, changed(), _seconds(began, ready), step.num_tokens)
        )

    def _slots(self, piece: _Piece) -> Slots:
        return self.paged.slots(piece.chunk.start, piece.chunk.end, piece.order.block_ids)

    def _offers(
        self, pieces: Sequence[_Piece], changed: bool, took_s: float, num_tokens: int
    ) -> list[Offer]:
        """In a thread that has waited for all of them."""
        if changed:
            self.has_other_weights = True
            for piece in pieces:
                piece.loan.give_back()
            return []
        offers = [
            Offer(
                piece.chunk,
                piece.loan,
                piece.order.exact_until,
                took_s * piece.chunk.num_tokens / max(num_tokens, piece.chunk.num_tokens),
            )
            for piece in pieces
        ]
        if self.give is None:
            self.counts["published_chunks"] += len(pieces)
            return offers
        self._give(self.give, pieces, offers)
        return []

    def _give(self, give: Give, pieces: Sequence[_Piece], offers: Sequence[Offer]) -> None:
        for piece, (chunk, source, exact_until, saved_s) in zip(pieces, offers, strict=True):
            try:
                if not give(chunk, source.read(chunk), exact_until, saved_s):
                    self.counts["unpublished_chunks"] += 1
            finally:
                piece.loan.give_back()

    def _mark(self) -> Any:
        """This place in vLLM's stream, with the time when it passes it."""
        if self.paged.device.type != "cuda":
            return None
        make: Any = torch.cuda.Event
        event = make(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self.paged.device))
        return event


def gatherer(rows: TokenRows, dtype: torch.dtype) -> Gather:
    """One kernel, where there is Triton; else a few launches a layer."""
    if rows.device.type == "cuda" and find_spec("triton") is not None:
        from kdn.engines.vllm.gather_triton import Gatherer

        return Gatherer(rows, dtype).gather

    def plainly(slots: Sequence[Slots], out: Sequence[torch.Tensor]) -> None:
        for one, place in zip(slots, out, strict=True):
            place[0], place[1] = gather(rows, one, dtype)

    return plainly


def _seconds(began: Any, ready: Any) -> float:
    """How long a GPU took from one place in a stream to another that it has passed."""
    if began is None or ready is None:
        return 0.0
    ready.synchronize()
    return float(began.elapsed_time(ready)) / 1000
