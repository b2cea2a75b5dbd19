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

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.threads import num_cores, parallel_map
from kdn.delivery.sink import Arrival
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
    future: Future[None] | None = None
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


class PagedSink:
    """The tokens [start, end) of a load; those of its chunks around them are left out."""

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
            values = self._codec.decode(
                one.stream, one.chunk, levels=one.levels, dtype=self._paged.dtype
            )
            self.write(one.chunk, values)
        except KdnError as error:
            return error
        if one.chunk.key in self.decoded or len(self.decoded) < self._max_kept:
            self.decoded[one.chunk.key] = values
        return None

    def write(self, chunk: Chunk, values: KVCache) -> None:
        order = self._job.order
        start, end = max(chunk.start, order.start), min(chunk.end, order.end)
        if not values.slice(start, end).is_complete:
            raise UnsupportedError("a layer lacks tokens, and vLLM's blocks cannot say so")
        with self._job.writing():
            self._paged.write(values, start, end, order.block_ids)
