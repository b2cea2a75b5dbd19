"""Chunks on their way to the host's shared memory: copied there by a thread of its own, so that no
engine waits for it, and bounded, so that values do not pile up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from kdn.background import watched
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.session.host_memory import HostMemory

MAX_CHUNKS = 64
"""On their way; more are not kept."""


class Keeper:
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
