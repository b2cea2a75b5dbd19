"""From a delivery that has ended to its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdn.cache.tensors import KVCache
from kdn.delivery.lookup import Incoming
from kdn.delivery.refine import Refinement
from kdn.delivery.request import Result

if TYPE_CHECKING:
    from kdn.delivery.client import Delivery


def result_of(delivery: Delivery) -> Result:
    known, transfer = delivery.known, delivery.transfer
    rest = len(delivery.request.chunks) - len(known)
    first_s = transfer.first_byte_s

    def refine() -> Refinement:
        return Refinement(
            known, delivery.question, delivery.endpoints, delivery.estimator, delivery.limits,
            delivery.cache, delivery.gauge,
        )  # fmt: skip

    return Result(
        cache=with_absences(delivery.cache, known),
        num_levels=delivery.request.codec.num_levels,
        levels=tuple(one.decoded for one in known) + (0,) * rest,
        computed=tuple(one.computed for one in known) + (False,) * rest,
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


def with_absences(cache: KVCache, known: Sequence[Incoming]) -> KVCache:
    """Says of each layer from where on it holds all tokens: layers with a sliding window lack the
    oldest ones, be it in one chunk or in several."""
    valid_from = [cache.start] * cache.num_layers
    for one in known:
        for layer, position in enumerate(one.valid_from):
            if position > one.chunk.start:
                valid_from[layer] = position
    return KVCache(cache.keys, cache.values, cache.start, tuple(valid_from))
