"""A load that is a join: its chunks on their way to all their places in vLLM's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from kdn.blend.pieces import Join, Piece
from kdn.blend.seams import Seams
from kdn.cache.keys import Chunk
from kdn.cache.rows import NOWHERE, Slots
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.threads import num_cores, parallel_map
from kdn.delivery.join_sink import JoinRowsSink, Placing, Spot
from kdn.delivery.request import BODY_KLD, TAIL_KLD, TAIL_TOKENS
from kdn.delivery.sink import Arrival, Sink
from kdn.engines.vllm.layout import PagedCache
from kdn.engines.vllm.messages import LoadOrder
from kdn.engines.vllm.paged_sink import GivenUpError, LoadJob
from kdn.errors import KdnError, UnsupportedError
from kdn.session.delivered import Delivered


def join_of(order: LoadOrder) -> Join:
    """The join that the scheduler's side has ordered."""
    assert order.join is not None
    pieces = []
    for numbers in order.join.pieces:
        chunks = tuple(order.chunks[number] for number in numbers)
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        pieces.append(Piece(tokens, order.join.head, chunks))
    return Join(tuple(pieces))


def needed(order: LoadOrder, join: Join) -> tuple[Chunk, ...]:
    """The chunks of a join that stand within the load somewhere."""
    return tuple(
        chunk
        for chunk in join.chunks
        if any(
            place.start(chunk) + place.skipped < order.end
            and place.start(chunk) + chunk.num_tokens > order.start
            for place in join.places[chunk.key]
        )
    )


def good_until(order: LoadOrder, join: Join, got: Delivered) -> int:
    """The first position of the load that lacks a token, or has one that is too coarse where that
    counts."""
    worst = _worst_klds(got.chunks, order.enough_kld)
    good = {
        chunk.key
        for chunk, grade, most in zip(got.chunks, got.grades, worst, strict=True)
        if grade is not None and not (order.strict and grade.kld > most)
    }
    lacking = [
        place.start(chunk) + place.skipped
        for chunk in got.chunks
        if chunk.key not in good
        for place in join.places[chunk.key]
        if place.start(chunk) + chunk.num_tokens > order.start
    ]
    return min([order.end, *lacking])


def _worst_klds(chunks: Sequence[Chunk], enough_kld: float) -> list[float]:
    """`worst_kld` of each, as the delivery weighs them: the chunks of a join are not consecutive,
    and one of a long piece is not at the end because the last piece is short."""
    ends = list(accumulate(chunk.num_tokens for chunk in chunks))
    is_tail = (end > ends[-1] - TAIL_TOKENS for end in ends)
    return [enough_kld * (TAIL_KLD if one else BODY_KLD) for one in is_tail]


def join_sink_of(
    codec: Codec, repaired: Codec | None, seams: Seams | None, paged: PagedCache, job: LoadJob,
    join: Join,
) -> Sink:  # fmt: skip
    """Where a join goes: slots wherever places are slots, else blocks."""
    if paged.rows is None:
        return PagedJoinSink(codec, repaired, seams, paged, job, join)
    return SlotJoinSink(codec, repaired, seams, paged, job, join)


def _within(spots: Iterator[Spot], order: LoadOrder) -> Iterator[Spot]:
    return (spot for spot in spots if spot.start < order.end and spot.end > order.start)


class SlotJoinSink(JoinRowsSink):
    """The tokens [start, end) of a join, decoded straight to their slots: on a GPU, by the GPU."""

    def __init__(
        self, codec: Codec, repaired: Codec | None, seams: Seams | None, paged: PagedCache,
        job: LoadJob, join: Join,
    ) -> None:  # fmt: skip
        assert paged.rows is not None
        order = job.order
        self._job, self._order = job, order
        self._slots: Slots = np.full(max(join.num_tokens, order.end), NOWHERE, dtype=np.int64)
        self._slots[order.start : order.end] = paged.slots(order.start, order.end, order.block_ids)
        super().__init__(
            codec, repaired, join, paged.rows, self._slots_between, job.after, seams=seams
        )

    def spots(self, chunk: Chunk) -> Iterator[Spot]:
        return _within(super().spots(chunk), self._order)

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        try:
            with self._job.writing():
                return super().decode(batch)
        except GivenUpError as error:
            return [error] * len(batch)

    def write(self, chunk: Chunk, values: KVCache) -> None:
        with self._job.writing():
            super().write(chunk, values)

    def _slots_between(self, start: int, end: int) -> Slots:
        return self._slots[start:end]


class PagedJoinSink(Placing):
    """The same, each chunk decoded in main memory first."""

    def __init__(
        self, codec: Codec, repaired: Codec | None, seams: Seams | None, paged: PagedCache,
        job: LoadJob, join: Join,
    ) -> None:  # fmt: skip
        super().__init__(codec, repaired, join, seams)
        self._paged, self._job, self._order = paged, job, job.order

    @property
    def batch_chunks(self) -> int:
        return num_cores()

    def spots(self, chunk: Chunk) -> Iterator[Spot]:
        return _within(super().spots(chunk), self._order)

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        """On all cores, each chunk into memory of its own: what fails leaves blocks alone."""
        return parallel_map(self._decode, batch)

    def _decode(self, one: Arrival) -> KdnError | None:
        try:
            every = [
                spot.codec.decode(
                    one.stream, one.chunk, levels=one.levels, dtype=self._paged.dtype, at=spot.at
                ).slice(spot.start, spot.end)
                for spot in self.spots(one.chunk)
            ]
            for values in every:
                self.write_at(values)
        except KdnError as error:
            return error
        return None

    def write_at(self, values: KVCache) -> None:
        order = self._order
        start, end = max(values.start, order.start), min(values.end, order.end)
        if not values.slice(start, end).is_complete:
            raise UnsupportedError("a layer lacks tokens, and vLLM's blocks cannot say so")
        with self._job.writing():
            if self._job.after is not None:
                torch.cuda.current_stream(self._paged.device).wait_event(self._job.after)
            self._paged.write(values, start, end, order.block_ids)
