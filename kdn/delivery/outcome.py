"""From a delivery that has ended to its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdn.delivery.refine import Refinement
from kdn.delivery.request import Result, enough_levels

if TYPE_CHECKING:
    from kdn.delivery.client import Delivery


def result_of(delivery: Delivery) -> Result:
    known, transfer = delivery.known, delivery.transfer
    rest = len(delivery.request.chunks) - len(known)
    first_s = transfer.first_byte_s

    def refine(enough_kld: float) -> Refinement:
        levels = enough_levels(delivery.request.expected_kld, enough_kld)
        return Refinement(
            known, levels, delivery.question, delivery.endpoints, delivery.estimator,
            delivery.limits, delivery.request.sink, delivery.gauge,
        )  # fmt: skip

    return Result(
        sink=delivery.request.sink,
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
        kld=_expected_kld(delivery),
        _refine=refine,
    )


def _expected_kld(delivery: Delivery) -> float:
    request = delivery.request
    tokens = [chunk.num_tokens for chunk in request.chunks]
    parts = [count * weight for count, weight in zip(tokens, request.weights(), strict=True)]
    loaded = [(part, one.decoded) for part, one in zip(parts, delivery.known, strict=False)]
    return sum(part * request.expected_kld[n - 1] for part, n in loaded if n) / sum(parts)
