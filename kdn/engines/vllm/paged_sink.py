"""Chunks of one load on their way into vLLM's blocks, each as soon as it is decoded.

Blocks are written only while their request waits for them: who writes and who gives a load up agree
on that under a lock. Once given up, they may be anybody's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import NOWHERE, Slots
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.threads import num_cores, parallel_map
from kdn.delivery.sink import GPU_BATCH_CHUNKS, Arrival, RowsSink, Sink
from kdn.engines.vllm.layout import PagedCache
from kdn.engines.vllm.messages import LoadOrder
from kdn.errors import KdnError, UnsupportedError


class GivenUpError(KdnError):
    """A load took too long: its blocks are not its own any more."""


@dataclass
class LoadJob:
    """A load under way."""

    order: LoadOrder
    until_s: float
    after: torch.cuda.Event | None = None
    """Before it has passed, steps of vLLM that began earlier may still write to these blocks."""
    future: Future[None] | None = None
    ended_s: float | None = None
    """When it was done, and vLLM might have known."""
    _is_given_up: bool = False
    _writers: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards these two

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Its blocks are its own meanwhile; GivenUpError if they are not any more."""
        with self._lock:
            if self._is_given_up:
                raise GivenUpError(f"the load of request {self.order.request_id} was given up")
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1

    def give_up(self) -> bool:
        """Unless its blocks are being written."""
        with self._lock:
            self._is_given_up = not self._writers
        if self._is_given_up and self.future is not None:
            self.future.cancel()  # another load may have its turn
        return self._is_given_up


def sink_of(codec: Codec, paged: PagedCache, job: LoadJob, max_kept: int = 0) -> Sink:
    """Where a load goes: slots wherever places are slots, else blocks."""
    if paged.rows is None:
        return PagedSink(codec, paged, job, max_kept)
    return SlotSink(codec, paged, job)


def batch_chunks_of(paged: PagedCache) -> int:
    """Of these sinks."""
    on_gpu = paged.rows is not None and paged.device.type == "cuda"
    return GPU_BATCH_CHUNKS if on_gpu else num_cores()


class SlotSink:
    """The tokens [start, end) of a load, decoded straight to where they belong: on a GPU, by the
    GPU. Those of its chunks around them are left out."""

    def __init__(self, codec: Codec, paged: PagedCache, job: LoadJob) -> None:
        assert paged.rows is not None
        order = job.order
        self._job, self._first = job, order.chunks[0].start
        last = max(order.chunks[-1].end, order.end)
        self._slots: Slots = np.full(last - self._first, NOWHERE, dtype=np.int64)
        own = slice(order.start - self._first, order.end - self._first)
        self._slots[own] = paged.slots(order.start, order.end, order.block_ids)
        self._sink = RowsSink(codec, paged.rows, self._slots_of, job.after)

    @property
    def batch_chunks(self) -> int:
        return self._sink.batch_chunks

    @property
    def batches_at_once(self) -> int:
        return self._sink.batches_at_once

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        try:
            with self._job.writing():
                return self._sink.decode(batch)
        except GivenUpError as error:
            return [error] * len(batch)

    def write(self, chunk: Chunk, values: KVCache) -> None:
        with self._job.writing():
            self._sink.write(chunk, values)

    def _slots_of(self, chunk: Chunk) -> Slots:
        return self._slots[chunk.start - self._first : chunk.end - self._first]


class PagedSink:
    """The same, each chunk decoded in main memory first."""

    def __init__(self, codec: Codec, paged: PagedCache, job: LoadJob, max_kept: int = 0) -> None:
        """`max_kept`: so many decoded chunks are kept for others."""
        self.decoded: dict[bytes, KVCache] = {}
        """By the keys of chunks: the last values that were written."""
        self._codec, self._paged, self._job, self._max_kept = codec, paged, job, max_kept

    @property
    def batch_chunks(self) -> int:
        return num_cores()

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        """On all cores, each chunk into memory of its own: what fails leaves blocks alone."""
        return parallel_map(self._decode, batch)

    def _decode(self, one: Arrival) -> KdnError | None:
        try:
            values = self._values(one)
            self.write(one.chunk, values)
        except KdnError as error:
            return error
        if one.chunk.key in self.decoded or len(self.decoded) < self._max_kept:
            self.decoded[one.chunk.key] = values
        return None

    def _values(self, one: Arrival) -> KVCache:
        """Of the heads that are held here."""
        paged, codec = self._paged, self._codec
        if paged.has_all_heads:
            return codec.decode(one.stream, one.chunk, levels=one.levels, dtype=paged.dtype)
        heads = paged.heads.range
        return codec.decode_heads(
            one.stream, one.chunk, heads, levels=one.levels, dtype=paged.dtype
        )

    def write(self, chunk: Chunk, values: KVCache) -> None:
        order = self._job.order
        start, end = max(chunk.start, order.start), min(chunk.end, order.end)
        if not values.slice(start, end).is_complete:
            raise UnsupportedError("a layer lacks tokens, and vLLM's blocks cannot say so")
        with self._job.writing():
            if self._job.after is not None:
                torch.cuda.current_stream(self._paged.device).wait_event(self._job.after)
            self._paged.write(values, start, end, order.block_ids)
