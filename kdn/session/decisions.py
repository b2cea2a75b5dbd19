"""What a session decided for a request, told to the request log (`kdn/request_log.py`).

For each request: what was known, what was planned, what arrived from where, what the model has to
read and why, and what was published. Chunks are told by their numbers and by the beginnings of
their keys; of texts, tokens and names nothing is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from kdn.cache.keys import Chunk
from kdn.delivery.known import Known
from kdn.delivery.publish import Admission
from kdn.delivery.request import FAR_S, Result
from kdn.request_log import RequestLog
from kdn.session.delivered import Delivered
from kdn.tracing import request_id

MAX_RUNS = 200
MAX_TROUBLES = 8
MAX_TROUBLE_CHARS = 200
KEY_CHARS = 12
"""Of a chunk's key, in hex: enough to find it among others, and not to ask a node for it."""


class Decisions:
    """Without a log nothing is done. Every method returns at once and never fails."""

    def __init__(self, log: RequestLog | None) -> None:
        self._log = log

    def knew(self, num_tokens: int, known: Known, seconds: float) -> None:
        if self._log is None:
            return
        looked_up = len(known.streams)
        self._add(
            "know",
            tokens=num_tokens,
            known_tokens=sum(chunk.num_tokens for chunk in known.chunks),
            chunks=len(known.chunks),
            held=len(known.chunks) - looked_up,
            late=known.is_late,
            seconds=round(seconds, 6),
        )

    def delivered(
        self, got: Delivered, deadline_s: float, enough_kld: float, seconds: float
    ) -> None:
        if self._log is None:
            return
        chunks, result = got.chunks, got.result
        told: dict[str, Any] = {
            "start": chunks[0].start,
            "end": chunks[-1].end,
            "first": short(chunks[0].key),
            "last": short(chunks[-1].key),
            "chunks": len(chunks),
            "held": len(got.held),
            "deadline_s": None if deadline_s >= FAR_S else round(deadline_s, 3),
            "enough_kld": enough_kld,
            "levels": runs(got.levels),
            "seconds": round(seconds, 6),
        }
        if result is not None:
            told |= _of_result(result)
        elif len(got.held) < len(chunks):
            told["why"] = runs([None] * len(got.held) + ["no time"] * (len(chunks) - len(got.held)))
        self._add("deliver", **told)

    def published(self, chunk: Chunk, said: Admission) -> None:
        if self._log is not None and said is not Admission.FULL:  # which is tried again
            self._add(
                "publish", chunk=short(chunk.key), start=chunk.start, end=chunk.end, said=said.value
            )

    def accepted(self, key: bytes) -> None:
        self._add("accepted", chunk=short(key))

    def refused(self, key: bytes, why: str) -> None:
        self._add("refused", chunk=short(key), why=why[:MAX_TROUBLE_CHARS])

    def _add(self, event: str, **told: Any) -> None:
        if self._log is not None and (own := request_id()):
            self._log.add({"request": own, "event": event, **told})


def _of_result(result: Result) -> dict[str, Any]:
    account = result.account
    return {
        "planned": runs(account.planned),
        "plans": account.plans,
        "why": runs(account.why),
        "sources": [
            {"name": one.name, "bytes": one.num_bytes, "tokens": one.num_tokens}
            for one in account.sources
        ],
        "bytes": result.fetched_bytes,
        "level_bytes": list(account.level_bytes),
        "kld": result.kld,
        "lookup_s": round(result.lookup_s, 6),
        "first_byte_s": None if result.first_byte_s is None else round(result.first_byte_s, 6),
        "failures": result.failures,
        "troubles": [one[:MAX_TROUBLE_CHARS] for one in result.troubles[:MAX_TROUBLES]],
    }


def runs(values: Iterable[Any]) -> list[list[Any]]:
    """Equal neighbours once, with how many there are: [[3, 14], [4, 1]]."""
    every = [[value, len(list(same))] for value, same in groupby(values)]
    if len(every) <= MAX_RUNS:
        return every
    left = sum(count for _, count in every[MAX_RUNS:])
    return [*every[:MAX_RUNS], ["...", left]]


def short(key: bytes) -> str:
    return key.hex()[:KEY_CHARS]


def unrolled(told: Sequence[Sequence[Any]]) -> list[Any]:
    """What `runs` made shorter."""
    return [value for value, count in told for _ in range(count)]
