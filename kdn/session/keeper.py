"""Chunks on their way to the host's shared memory: copied there by a thread of its own, so that no
engine waits for it, and bounded, so that they do not pile up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kdn.background import watched
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.format import Buffer
from kdn.session.host_memory import HostMemory
from kdn.session.host_streams import HostStreams

MAX_CHUNKS = 64
"""Decoded chunks on their way; more are not kept."""
MAX_BYTES = 512 << 20
"""Of streams on their way."""
KEEP_AFTER_S = 1.0
"""Streams are kept so much later: first the request that they came for gets its first token."""


class Keeper:
    """Of decoded chunks."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._thread = ThreadPoolExecutor(1, "kdn-host")
        self._room = threading.Semaphore(MAX_CHUNKS)

    def keep(self, chunk: Chunk, values: KVCache, kld: float, is_exact: bool) -> None:
        """From any thread. `values` must not change any more."""
        if not self._room.acquire(blocking=False):
            return
        try:
            kept = self._thread.submit(self._host.put, chunk, values, kld, exact=is_exact)
        except RuntimeError:  # it is closed
            self._room.release()
            return
        kept.add_done_callback(lambda _: self._room.release())
        kept.add_done_callback(watched("keeping a decoded chunk"))

    def close(self) -> None:
        """What is not there yet is not kept."""
        self._thread.shutdown(cancel_futures=True)


class StreamKeeper:
    """Of streams."""

    def __init__(
        self,
        streams: HostStreams,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams, self._clock = streams, clock
        self._thread = ThreadPoolExecutor(1, "kdn-host")
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards _room_bytes
        self._room_bytes = max_bytes

    def keep(self, chunk: Chunk, data: Buffer, levels: int) -> bool:
        """The first levels of a stream, verified. From any thread; False if too much is waiting
        already. `data` must not change any more."""
        with self._lock:
            has_room = len(data) <= self._room_bytes
            self._room_bytes -= len(data) if has_room else 0
        if not has_room:
            self._streams.note_unkept("too many are on their way")
            return False
        self._submit(len(data), self._put, self._clock() + KEEP_AFTER_S, chunk, data, levels)
        return True

    def used(self, chunks: Sequence[Chunk]) -> None:
        """These were of use just now. From any thread."""
        if chunks:
            self._submit(0, self._used, self._clock() + KEEP_AFTER_S, chunks)

    def _submit(self, size_bytes: int, work: Callable[..., object], *given: object) -> None:
        def done(_: object) -> None:
            with self._lock:
                self._room_bytes += size_bytes

        try:
            future = self._thread.submit(work, *given)
        except RuntimeError:  # it is closed
            done(None)
            return
        future.add_done_callback(done)
        future.add_done_callback(watched("keeping a stream"))

    def _put(self, due_s: float, chunk: Chunk, data: Buffer, levels: int) -> None:
        if not self._closed.wait(max(0.0, due_s - self._clock())):
            self._streams.put(chunk, data, levels)

    def _used(self, due_s: float, chunks: Sequence[Chunk]) -> None:
        if not self._closed.wait(max(0.0, due_s - self._clock())):
            self._streams.used(chunks)

    def close(self) -> None:
        """What is not there yet is not kept."""
        self._closed.set()
        self._thread.shutdown(cancel_futures=True)
