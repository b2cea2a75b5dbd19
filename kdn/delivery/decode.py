"""Decoding beside the transfer, on all cores: a chunk for each of them, or all for one chunk.

The plan says what is worth decoding: the first of its fetches that are here and not decoded yet.
Only when time runs short are chunks without any value decoded with what there is, whatever was
planned. None is begun that is not expected to be done in time: a thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.threads import num_cores, parallel_map
from kdn.delivery.assemble import Assembly
from kdn.delivery.lookup import Incoming
from kdn.delivery.plan import Fetch
from kdn.delivery.speeds import Gauge
from kdn.errors import FormatError, KdnError

HASTE = 1.25
MARGIN_S = 0.005


class _Job(NamedTuple):
    one: Incoming
    assembly: Assembly
    levels: int


class Decoder:
    def __init__(
        self,
        codec: Codec,
        cache: KVCache,
        gauge: Gauge,
        changed: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        self.busy: tuple[Incoming, ...] = ()
        self.troubles: list[str] = []
        self._codec = codec
        self._cache = cache
        self._gauge = gauge
        self._changed = changed
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def pick(
        self, known: Sequence[Incoming], fetches: Sequence[Fetch], left_s: float, idle: bool
    ) -> list[Fetch]:
        """What to decode next, a chunk for each core. `idle`: there is nothing to wait for."""
        empty = [Fetch(one.number, one.assembly.levels) for one in known if _is_empty(one)]
        work_s = sum(self._cost_s(known, fetch) for fetch in empty)
        order = [*fetches, *empty] if idle else fetches
        if left_s <= HASTE * work_s + MARGIN_S:
            order = [*empty, *fetches]
        picked: dict[int, Fetch] = {}
        for fetch in order:
            one, cost_s = known[fetch.chunk], self._cost_s(known, fetch)
            here = is_waiting(one) and one.decoded < fetch.levels <= one.assembly.levels
            if here and fetch.chunk not in picked and cost_s < left_s:
                picked[fetch.chunk] = fetch
                left_s -= cost_s
                if len(picked) == num_cores():
                    break
        return list(picked.values())

    def start(self, known: Sequence[Incoming], fetches: Sequence[Fetch]) -> None:
        assert not self.busy
        jobs = [_Job(known[one.chunk], known[one.chunk].assembly, one.levels) for one in fetches]
        self.busy = tuple(job.one for job in jobs)
        self._task = asyncio.create_task(self._decode(jobs))

    async def finish(self) -> None:
        """Wait for the chunk in hand, even if cancelled: its memory is not the caller's before."""
        if self._task is None:
            return
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            await asyncio.wait([self._task])
            raise

    def raise_crash(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()

    def _cost_s(self, known: Sequence[Incoming], fetch: Fetch) -> float:
        return self._gauge.speeds.decode_s(known[fetch.chunk].chunk.num_tokens, fetch.levels)

    async def _decode(self, jobs: Sequence[_Job]) -> None:
        began_s = self._clock()
        try:
            found = await asyncio.to_thread(parallel_map, self._write, jobs)
            took_s = self._clock() - began_s
            for job, valid_from in zip(jobs, found, strict=True):
                self._note(job, valid_from, took_s / len(jobs))
        finally:
            self.busy = ()
            self._changed.set()

    def _note(self, job: _Job, valid_from: tuple[int, ...] | KdnError, took_s: float) -> None:
        one = job.one
        if isinstance(valid_from, KdnError):
            # What was decoded before still is. Nothing is said of a stream that was begun since.
            if job.assembly is one.assembly:
                one.lost = one.undecodable = True
                # Intact, and yet no stream of this codec; or right, but not for this reader.
                one.spoilt = isinstance(valid_from, FormatError)
            self.troubles.append(f"chunk {one.number}: {valid_from}")
            return
        one.decoded, one.decoded_id, one.valid_from = job.levels, job.assembly.stream_id, valid_from
        self._gauge.decoded(one.chunk.num_tokens, job.levels, took_s)

    def _write(self, job: _Job) -> tuple[int, ...] | KdnError:
        """Decode to the chunk's place; aside first if there is something to lose."""
        one, levels = job.one, job.levels
        place = self._cache.slice(one.chunk.start, one.chunk.end)
        try:
            stream = job.assembly.stream(levels)
            if not one.decoded:
                return self._codec.decode(stream, one.chunk, levels=levels, out=place).valid_from
            done = self._codec.decode(stream, one.chunk, levels=levels, dtype=place.dtype)
        except KdnError as error:
            return error
        place.keys.copy_(done.keys)
        place.values.copy_(done.values)
        return done.valid_from


def is_waiting(one: Incoming) -> bool:
    """Whether there is more of it than is decoded."""
    return not one.undecodable and not one.computed and one.assembly.levels > one.decoded


def _is_empty(one: Incoming) -> bool:
    return is_waiting(one) and not one.decoded
