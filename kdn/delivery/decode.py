"""Decoding beside the transfer, batch of chunks by batch of chunks, into a sink.

The plan says what is worth decoding: the first of its fetches that are here and not decoded yet.
Only when time runs short are chunks without any value decoded with what there is, whatever was
planned. None is begun that is not expected to be done in time: a thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kdn.background import outwait
from kdn.delivery.assemble import Assembly
from kdn.delivery.estimate import Gauge
from kdn.delivery.lookup import Incoming
from kdn.delivery.plan import Fetch
from kdn.delivery.sink import Arrival, LateSink, Sink, batches_at_once
from kdn.errors import FormatError, KdnError
from kdn.tracing import span

HASTE = 1.25
MARGIN_S = 0.005


class _Job(NamedTuple):
    one: Incoming
    assembly: Assembly
    levels: int


class Decoder:
    def __init__(
        self,
        sink: Sink,
        gauge: Gauge,
        changed: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        self.troubles: list[str] = []
        self._sink = sink
        if isinstance(sink, LateSink):
            sink.on_given = changed.set
        self._gauge = gauge
        self._changed = changed
        self._clock = clock
        self._under_way: dict[asyncio.Task[None], Sequence[_Job]] = {}
        self._crashed: asyncio.Task[None] | None = None

    @property
    def busy(self) -> list[Incoming]:
        """What is being decoded."""
        return [job.one for job in self._jobs()]

    @property
    def is_full(self) -> bool:
        """Whether another batch has to wait."""
        return len(self._under_way) >= batches_at_once(self._sink)

    def pick(
        self, known: Sequence[Incoming], fetches: Sequence[Fetch], left_s: float, idle: bool
    ) -> list[Fetch]:
        """What to decode next, as many chunks as the sink likes at a time. `idle`: there is nothing
        to wait for."""
        busy = {job.one.number for job in self._jobs()}
        left_s -= sum(self._cost_s(job.one, job.levels) for job in self._jobs())
        empty = [
            Fetch(one.number, one.assembly.levels)
            for one in known
            if _is_empty(one) and one.number not in busy
        ]
        work_s = sum(self._cost_s(known[one.chunk], one.levels) for one in empty)
        order = [*fetches, *empty] if idle else fetches
        if left_s <= HASTE * work_s + MARGIN_S:
            order = [*empty, *fetches]
        picked: dict[int, Fetch] = {}
        for fetch in order:
            one = known[fetch.chunk]
            is_here = one.decoded < fetch.levels <= one.assembly.levels and is_waiting(one)
            if not is_here or fetch.chunk in busy:
                continue
            cost_s = self._cost_s(one, fetch.levels)
            if fetch.chunk not in picked and cost_s < left_s:
                picked[fetch.chunk] = fetch
                left_s -= cost_s
                if len(picked) == self._sink.batch_chunks:
                    break
        return list(picked.values())

    def _jobs(self) -> list[_Job]:
        """Under way."""
        return [job for jobs in self._under_way.values() for job in jobs]

    def start(self, known: Sequence[Incoming], fetches: Sequence[Fetch]) -> None:
        assert not self.is_full
        jobs = [_Job(known[one.chunk], known[one.chunk].assembly, one.levels) for one in fetches]
        task = asyncio.create_task(self._decode(jobs))
        self._under_way[task] = jobs
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        if task.cancelled() or task.exception() is not None:
            self._crashed = task
        self._changed.set()

    async def finish(self) -> None:
        """Wait for all in hand, even if cancelled: their memory is not the caller's before."""
        if self._under_way:
            await outwait(asyncio.ensure_future(asyncio.wait(list(self._under_way))))

    def raise_crash(self) -> None:
        if self._crashed is not None:
            self._crashed.result()

    def _cost_s(self, one: Incoming, levels: int) -> float:
        return self._gauge.speeds.decode_s(one.chunk.num_tokens, levels)

    async def _decode(self, jobs: Sequence[_Job]) -> None:
        began_s = self._clock()
        with span("kdn.decode", chunks=len(jobs), levels=max(job.levels for job in jobs)):
            failures = await asyncio.to_thread(self._write, jobs)
        # Side by side, each takes about as long as all of them one after the other.
        took_s = (self._clock() - began_s) / len(self._under_way)
        for job, failure in zip(jobs, failures, strict=True):
            self._note(job, failure, took_s / len(jobs))

    def _write(self, jobs: Sequence[_Job]) -> list[KdnError | None]:
        return self._sink.decode(
            [
                Arrival(one.chunk, assembly.stream(levels), levels, one.decoded > 0)
                for one, assembly, levels in jobs
            ]
        )

    def _note(self, job: _Job, failure: KdnError | None, took_s: float) -> None:
        one = job.one
        if failure is not None:
            # What was decoded before still is. Nothing is said of a stream that was begun since.
            if job.assembly is one.assembly:
                one.lost = one.undecodable = True
                # Intact, and yet no stream of this codec; or right, but not for this reader.
                one.spoilt = isinstance(failure, FormatError)
            self.troubles.append(f"chunk {one.number}: {failure}")
            return
        one.decoded, one.decoded_id = job.levels, job.assembly.stream_id
        self._gauge.decoded(one.chunk.num_tokens, job.levels, took_s)


def is_waiting(one: Incoming) -> bool:
    """Whether there is more of it than is decoded."""
    return not one.undecodable and not one.computed and one.assembly.levels > one.decoded


def _is_empty(one: Incoming) -> bool:
    return is_waiting(one) and not one.decoded
