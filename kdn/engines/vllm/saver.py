"""Copies out of vLLM's memory on a GPU, for publishing: without vLLM's thread waiting for any.

Within a step, behind what the model computes: all its chunks are gathered into staging memory with
one launch, and the weights are compared with those at start. Another thread waits for both, and
hands the chunks to the publisher if the weights were the right ones; with several ranks, this
rank's heads of them to where they are gathered.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk
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
Gather = Callable[[Sequence[Slots], Sequence[torch.Tensor]], None]
HandOver = Callable[[Chunk, KVCache, int | None, float], bool]
"""See `Ranks.offer`."""


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
    hand_over: HandOver | None = None
    """Where several ranks have a part of each chunk: it takes values, and has copied them from a
    GPU when it returns."""
    has_other_weights: bool = False
    """Than at start: found by the thread that waits."""
    _began: Any = None
    _gather: Gather = field(init=False)
    _handing: threading.Lock = field(default_factory=threading.Lock)  # one thread at a time

    def __post_init__(self) -> None:
        assert self.paged.rows is not None
        self._gather = gatherer(self.paged.rows, self.paged.dtype)
        self._warm_up()

    def _warm_up(self) -> None:
        """What is compiled on first use is compiled now, while vLLM starts."""
        if (loan := self.staging.borrow(0, CHUNK_TOKENS)) is not None:
            self._gather([np.zeros(CHUNK_TOKENS, dtype=np.int64)], [loan.place])
            loan.give_back()
            self.look()

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
                has_room = self.shared.has_room()
                loan = self.staging.borrow(chunk.start, chunk.num_tokens) if has_room else None
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
                piece.order.origin,
            )
            for piece in pieces
        ]
        if self.hand_over is None:
            self.counts["published_chunks"] += len(offers)
            return offers
        with self._handing:
            for piece, offer in zip(pieces, offers, strict=True):
                self._hand_over(self.hand_over, piece.loan, offer)
        return []

    def _hand_over(self, to: HandOver, loan: Loan, offer: Offer) -> None:
        try:
            values = loan.read(offer.chunk)
            if not values.keys.is_cuda:  # from there it is copied anyway
                values = KVCache(values.keys.clone(), values.values.clone(), values.start)
            if not to(offer.chunk, values, offer.exact_until, offer.saved_s):
                self.counts["unpublished_chunks"] += 1
        finally:
            loan.give_back()

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
