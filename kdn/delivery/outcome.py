"""From a delivery that has ended to its result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kdn.cache.tensors import KVCache
from kdn.delivery.refine import Refinement
from kdn.delivery.request import Result

if TYPE_CHECKING:
    from kdn.delivery.client import Delivery


def result_of(delivery: Delivery) -> Result:
    known, transfer = delivery.known, delivery.transfer
    rest = len(delivery.request.chunks) - len(known)
    first_s = transfer.first_byte_s
    starts = [chunk.start for chunk in delivery.request.chunks]
    read = delivery.front.valid_from
    valid_from = read + [one.valid_from for one in known[len(read) :]]

    def refine() -> Refinement:
        return Refinement(
            known, delivery.question, delivery.endpoints, delivery.estimator, delivery.limits,
            delivery.cache, delivery.gauge,
        )  # fmt: skip

    return Result(
        cache=with_absences(delivery.cache, zip(starts, valid_from, strict=False)),
        num_levels=delivery.request.codec.num_levels,
        levels=tuple(one.decoded for one in known) + (0,) * rest,
        computed=tuple(i < delivery.front.num_read for i in range(len(known) + rest)),
        stream_ids=tuple(one.decoded_id for one in known) + (b"",) * rest,
        known=len(known),
        fetched_bytes=transfer.fetched_bytes,
        lookup_s=delivery.lookup_s,
        first_byte_s=None if first_s is None else first_s - delivery.began_s,
        done_s=delivery.now_s(),
        failures=transfer.failures,
        troubles=(*transfer.troubles, *delivery.decoder.troubles),
        _refine=refine,
    )


def with_absences(cache: KVCache, parts: Iterable[tuple[int, Sequence[int]]]) -> KVCache:
    """Says of each layer from where on it holds all tokens: layers with a sliding window lack the
    oldest ones, be it in one chunk or in several. `parts`: where each chunk starts, and from where
    on each layer holds it."""
    valid_from = [cache.start] * cache.num_layers
    for start, positions in parts:
        for layer, position in enumerate(positions):
            if position > start:
                valid_from[layer] = position
    return KVCache(cache.keys, cache.values, cache.start, tuple(valid_from))
