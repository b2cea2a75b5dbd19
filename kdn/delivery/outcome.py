"""From a delivery that has ended to its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
            delivery.request.sink, delivery.gauge,
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
        _refine=refine,
    )
