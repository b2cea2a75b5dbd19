"""From chunks to launches: slab after slab goes to a GPU, and the host waits once, at the end.

While a slab is launched and decoded, the next one's streams are already read. Slabs run in the
decoder's main stream, for which no stream of an engine waits; who has launched them waits on an
event, without the GIL. A decoder belongs to one thread at a time until its slabs are launched (see
`device.py`); waiting for them needs no turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import TokenRows
from kdn.codec.format import Bitstream
from kdn.codec.klt.gpu_input import Filling, Job, Slab, SlabMaker, split_slabs
from kdn.codec.klt.gpu_memory import InputBuffer, InputRing, Scratch, StatusPool, size_of
from kdn.codec.klt.gpu_tables import Tensor
from kdn.codec.klt.gpu_target import Target
from kdn.codec.klt.replays import Replays
from kdn.codec.klt.streams import CudaStreams, Event
from kdn.errors import KdnError, UnsupportedError

MAX_TARGETS = 8
SLAB_SIZES = (4, 8, 16, 24, 32)
"""Chunks: slabs are filled up to one of these, so that few kinds of them have to be recorded."""


@dataclass(frozen=True)
class Batching:
    """How many chunks are decoded at a time, and how many groups; where their integers are."""

    num_chunks: int
    num_groups: int
    planes: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Launched:
    """A slab of some of the jobs under way; `unread` are those whose streams could not be read."""

    jobs: range
    status: Tensor
    done: Event
    unread: Sequence[int]
    statuses: StatusPool

    def failed(self) -> list[int]:
        """Waits until it is decoded, while others run; says which jobs are not written. Once."""
        if self.done is not None:
            self.done.synchronize()
        status = self.status[: len(self.jobs)].numpy()
        found = {*np.flatnonzero(status).tolist(), *self.unread}
        self.statuses.give_back(self.status)
        return [self.jobs[i] for i in sorted(found)]


class DecoderMemory(NamedTuple):
    """Bytes that a decoder takes: tables made from the profile, scratch and buffers on the device;
    pinned in main memory."""

    tables: int
    scratch: int
    buffers: int
    pinned: int


class Launcher(ABC):
    """What a decoder does around its kernels."""

    recorded_levels = 0
    """Decoding up to so many takes no memory of its own, and may be recorded."""

    def __init__(
        self,
        device: torch.device,
        maker: SlabMaker,
        streams: CudaStreams,
        beside: Launcher | None = None,
    ) -> None:
        """Decoding waits for what is in the current stream by now: the decoder's tables. It takes
        turns with a decoder `beside` it, for chunks of the same shape, in that one's streams and
        memory."""
        with streams.main(streams.mark()):
            pass
        self.device, self._maker, self._streams = device, maker, streams
        self._owns_memory = beside is None
        self._scratch: Scratch = Scratch(device) if beside is None else beside._scratch
        self._ring: InputRing = InputRing(device) if beside is None else beside._ring
        self._statuses = StatusPool(device)
        self._targets: dict[tuple[object, ...], Target] = {}
        self._replays = Replays(device)
        self._recorded_in = 0  # where scratch was then: `times_moved`

    @abstractmethod
    def plan(self, num_chunks: int, target: Target) -> Batching:
        """The most at a time that the memory allows."""

    @abstractmethod
    def run(
        self,
        slab: Slab,
        target: Target,
        levels: int,
        plan: Batching,
        stage: Callable[[str], None] = lambda _: None,
    ) -> Tensor:
        """Decodes a slab in the current stream; the result says of each chunk whether it failed."""

    def lent_tables(self, target: Target) -> tuple[Tensor, ...]:
        """Which `run` reads, and which are not this decoder's for good."""
        return ()

    def memory(self) -> DecoderMemory:
        """What it takes by now: scratch and buffers are taken when they are first needed."""
        own = {"_scratch", "_ring", "_replays"}
        tables = [value for name, value in vars(self).items() if name not in own]
        if not self._owns_memory:
            return DecoderMemory(size_of(*tables), 0, 0, 0)
        return DecoderMemory(size_of(*tables), self._scratch.size_bytes, *self._ring.memory_bytes())

    def target(self, rows: TokenRows) -> Target:
        """An engine's memory as kernels see it. Its table goes to the device in the main stream, so
        that nobody waits for the engine's own."""
        sides = (rows.keys, rows.values)
        pointers = tuple(one.data_ptr() for side in sides for one in side)
        strides = tuple(side[0].stride() for side in sides)
        key = (pointers, strides, rows.dtype, tuple(rows.key_scales), tuple(rows.value_scales))
        if key not in self._targets:
            if len(self._targets) == MAX_TARGETS:
                self._targets.clear()
            with self._streams.main():
                self._targets[key] = Target.of_rows(rows)
        return self._targets[key]

    def job(
        self,
        stream: Bitstream,
        chunk: Chunk,
        levels: int,
        slots: npt.NDArray[np.int64],
        at: int | None = None,
    ) -> Job:
        """A chunk to be decoded, each token into its slot (-1: nowhere), the first for position
        `at` (None: where it was learned); KdnError where its stream is not as the profile says, or
        is too large for a buffer: these would grow for good, and by as much as whoever made the
        stream likes."""
        job = self._maker.job(stream, chunk, levels, slots, at)
        if job.size_bytes > self._most_bytes_of_chunk:
            raise UnsupportedError(f"sections of {job.size_bytes} bytes, too many for a buffer")
        return job

    @cached_property
    def _most_bytes_of_chunk(self) -> int:
        return self._ring.size_bytes - self._maker.overhead_bytes(1)

    def decode(
        self,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        levels: int,
        target: Target,
        slots: Sequence[npt.NDArray[np.int64]],
        shift: int = 0,
    ) -> list[int]:
        """Decodes chunks into a target, after all that is in the current stream, for positions
        `shift` further than they were learned at; returns which of them could not be done here."""
        jobs, left = {}, []
        for index, (stream, chunk, own) in enumerate(zip(streams, chunks, slots, strict=True)):
            try:
                jobs[index] = self.job(stream, chunk, levels, own, chunk.start + shift)
            except KdnError:
                left.append(index)
        launched = self.launch(list(jobs.values()), levels, target, self._streams.mark())
        failed = [list(jobs)[i] for one in launched for i in one.failed()]
        return sorted(left + failed)

    def launch(
        self, jobs: Sequence[Job], levels: int, target: Target, after: Event = None
    ) -> list[Launched]:
        """Decoding of all jobs, after an event, to be waited for."""
        if not jobs:
            return []
        plan, found = self.plan(len(jobs), target), []
        room = self._ring.size_bytes - self._maker.overhead_bytes(plan.num_chunks)
        runs = split_slabs(jobs, plan.num_chunks, room)
        if len(runs) > 1 and plan.planes is not None:
            return self.launch(jobs, levels, replace(target, whole=None), after)
        with self._streams.main(after):
            filling = self._fill(jobs, runs[0], levels, target, plan)
            try:
                for run, following in zip_longest(runs, runs[1:]):
                    slab, unread = filling.finish(self._streams)
                    used = filling.buffer
                    if following is not None:  # is read while this one is launched
                        filling = self._fill(jobs, following, levels, target, plan)
                    status = self._run(slab, used, target, levels, plan)
                    found.append(self._launched(run, status, used, unread))
            except BaseException:
                with suppress(Exception):
                    filling.wait()
                # The caller's memory is the caller's again, and so are scratch and buffers the next
                # load's, whatever was launched by now.
                self._streams.join_all()
                if (event := self._streams.mark()) is not None:
                    event.synchronize()
                raise
        return found

    def _fill(
        self, jobs: Sequence[Job], run: range, levels: int, target: Target, plan: Batching
    ) -> Filling:
        def take(host_bytes: int, device_bytes: int) -> InputBuffer:
            return self._ring.take(host_bytes, device_bytes, self._streams)

        own, count = jobs[run.start : run.stop], len(run)
        is_first_alone = count == 1 and own[0].chunk.start == 0  # a kind of its own
        if self._can_record(levels, plan) and not is_first_alone:
            size = next((size for size in SLAB_SIZES if size >= count), count)
            fits = self.plan(size, target).num_chunks == size and self._has_room(own, size)
            count = size if fits else count
        return self._maker.begin(own, levels, take, count)

    def _has_room(self, jobs: Sequence[Job], count: int) -> bool:
        """Whether a buffer has, for a slab of so many chunks: it would grow for good."""
        total = sum(job.size_bytes for job in jobs) + self._maker.overhead_bytes(count)
        return total <= self._ring.size_bytes

    def _can_record(self, levels: int, plan: Batching) -> bool:
        return self._replays.is_real and levels <= self.recorded_levels and plan.planes is None

    def _run(
        self, slab: Slab, buffer: InputBuffer, target: Target, levels: int, plan: Batching
    ) -> Tensor:
        """`run`, in as few launches as can be."""
        if not self._can_record(levels, plan):
            return self.run(slab, target, levels, plan)
        own = self.plan(slab.num_chunks, target)
        key = (slab.num_chunks, slab.num_sinks, slab.is_full, levels)
        if self._recorded_in != self._scratch.times_moved:
            self._replays.forget()
            self._recorded_in = self._scratch.times_moved
        memory = (buffer, target, *self.lent_tables(target))
        self._replays.run(key, memory, lambda: self.run(slab, target, levels, own))
        return slab.status

    def _launched(
        self, run: range, status: Tensor, buffer: InputBuffer, unread: Sequence[int]
    ) -> Launched:
        found = self._statuses.take(len(status))
        found[: len(status)].copy_(status, non_blocking=True)
        buffer.used = self._streams.mark()
        return Launched(run, found, buffer.used, unread, self._statuses)

    def slab(
        self,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        levels: int,
        slots: Sequence[npt.NDArray[np.int64]],
    ) -> Slab:
        """Chunks on the device, in memory of their own: see `gpu_input.py`."""
        every = zip(streams, chunks, slots, strict=True)
        jobs = [self.job(stream, chunk, levels, own) for stream, chunk, own in every]

        def take(host_bytes: int, device_bytes: int) -> InputBuffer:
            return InputBuffer.of(self.device, host_bytes, device_bytes, self._streams)

        filling = self._maker.begin(jobs, levels, take)
        slab, _ = filling.finish(self._streams)
        if filling.buffer.copied is not None:
            filling.buffer.copied.synchronize()  # before its host half is let go
        return slab
