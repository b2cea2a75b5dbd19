"""Publishing with several ranks: each computes its heads of a chunk, the first puts them together.

Every rank writes its part (`rank_parts.py`) to the host's shared memory. The first waits for all
parts of a chunk, joins them and publishes the whole, as an engine of one rank would have it. A
chunk of which a part does not come in time is dropped and counted. All of it happens beside vLLM's
thread, in memory that is bounded on each rank.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kdn.background import fault, watched
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.layout import Heads
from kdn.engines.vllm.rank_copies import Copies
from kdn.engines.vllm.rank_folder import RankFolder, part_name
from kdn.engines.vllm.rank_parts import HEADER_BYTES, Share, pack, unpack
from kdn.errors import FormatError

logger = logging.getLogger(__name__)

PART_S = 10.0
"""For the parts of a chunk to come, from when the first rank has its own."""
POLL_S = 0.005
CLOSE_S = 2.0

Publish = Callable[[Chunk, KVCache, int | None, float], None]
"""A whole chunk, up to where its request is exact, and the seconds that the model took for it."""
Clock = Callable[[], float]


@dataclass
class _Given:
    size: int
    since_s: float
    is_written: bool = False


class Giving:
    """Parts of a rank that is not the first. Used by any thread."""

    def __init__(
        self, folder: RankFolder, share: Share, max_bytes: int, clock: Clock = time.monotonic
    ) -> None:
        self._folder, self._share, self._clock = folder, share, clock
        self._room = max_bytes // share.ranks
        self._given: dict[str, _Given] = {}
        self._lock = threading.Lock()  # guards _given
        self._thread = ThreadPoolExecutor(1, "kdn-rank-parts")

    def offer(self, chunk: Chunk, cache: KVCache) -> bool:
        """False if there is no room for it, or nobody who would take it. `cache`, in main memory,
        must not change any more."""
        name = part_name(chunk.key, self._share.rank)
        given = _Given(HEADER_BYTES + cache.size_bytes, self._clock())
        with self._lock:
            self._forget_taken()
            if not self._folder.is_alive(0) or not self._has_room(given.size):
                return False
            self._given[name] = given
        self._thread.submit(self._write, name, given, chunk, cache).add_done_callback(
            watched("handing a part to the first rank", OSError)
        )
        return True

    def _has_room(self, size: int) -> bool:
        held = sum(one.size for one in self._given.values() if one.is_written)
        waiting = sum(one.size for one in self._given.values())
        return waiting + size <= self._folder.room_bytes(self._room, held, self._share.ranks)

    def _forget_taken(self) -> None:
        """What the first has taken is gone; what it has not by now, it does not want."""
        now_s = self._clock()
        for name, given in list(self._given.items()):
            is_old = now_s - given.since_s > PART_S
            if is_old or (given.is_written and not self._folder.has(name)):
                self._folder.remove([name])
                del self._given[name]

    def _write(self, name: str, given: _Given, chunk: Chunk, cache: KVCache) -> None:
        try:
            self._folder.write(name, pack(self._share, chunk, cache))
        finally:
            given.is_written = True

    def close(self) -> None:
        self._thread.shutdown()


@dataclass(frozen=True)
class _Waiting:
    chunk: Chunk
    own: KVCache
    exact_until: int | None
    saved_s: float
    until_s: float


class Gathering:
    """The first rank's side. `offer` is for any thread; another one waits and joins."""

    def __init__(
        self,
        folder: RankFolder,
        share: Share,
        publish: Publish,
        counts: Counter[str],
        max_bytes: int,
        copies: Copies,
        takes: Callable[[int], bool] = lambda size: True,
        clock: Clock = time.monotonic,
    ) -> None:
        """`takes`: whether there is room for so many bytes where chunks are encoded."""
        self._folder, self._share, self._publish, self._copies = folder, share, publish, copies
        self._counts, self._max_bytes, self._clock = counts, max_bytes, clock
        self._takes = takes
        self._others = share.writers[1:]
        self._waiting: dict[bytes, _Waiting] = {}  # by keys of chunks
        self._bytes = 0
        self._closes_s: float | None = None  # by when all is to be settled
        self._changed = threading.Condition()  # guards these three
        self._thread = threading.Thread(target=self._run, name="kdn-gathering", daemon=True)
        self._thread.start()

    def offer(self, chunk: Chunk, cache: KVCache, exact_until: int | None, saved_s: float) -> bool:
        """This rank's own part; False if too many wait. `cache`, in main memory, must not change
        any more."""
        until_s = self._clock() + PART_S
        with self._changed:
            if self._bytes + cache.size_bytes > self._max_bytes // self._share.ranks:
                return False
            if chunk.key not in self._waiting:
                self._bytes += cache.size_bytes
            self._waiting[chunk.key] = _Waiting(chunk, cache, exact_until, saved_s, until_s)
            self._changed.notify()
        return True

    def close(self) -> None:
        """What is not there soon is not published."""
        with self._changed:
            self._closes_s = self._clock() + CLOSE_S
            self._changed.notify()
        self._thread.join(2 * CLOSE_S)

    # in its thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and self._closes_s is None:
                    self._changed.wait()
                if not self._waiting:
                    return
                every = list(self._waiting.values())
            done = [one for one in every if self._is_settled(one)]
            with self._changed:
                for one in done:
                    del self._waiting[one.chunk.key]
                    self._bytes -= one.own.size_bytes
            if not done:
                time.sleep(POLL_S)

    def _is_settled(self, one: _Waiting) -> bool:
        """Published, or given up."""
        until_s = one.until_s if self._closes_s is None else min(one.until_s, self._closes_s)
        names = [part_name(one.chunk.key, rank) for rank in self._others]
        try:
            if all(map(self._folder.has, names)) and self._takes(self._whole_bytes(one)):
                self._publish(one.chunk, self._joined(one), one.exact_until, one.saved_s)
                return True
            if self._clock() < until_s:
                return False
            raise FormatError("not all ranks gave their part in time, or too many are waiting")
        except (FormatError, OSError) as error:
            self._drop(names, error)
        except Exception as error:
            fault("gathering a chunk", error)
            self._drop(names, error)
        return True

    def _whole_bytes(self, one: _Waiting) -> int:
        return one.own.size_bytes * self._share.spec.num_kv_heads // one.own.num_kv_heads

    def _drop(self, names: list[str], why: Exception) -> None:
        self._folder.remove(names)
        self._counts["incomplete_chunks"] += 1
        count = self._counts["incomplete_chunks"]
        if count.bit_count() == 1:  # every power of two, so that a log does not fill a disk
            logger.warning("%d chunks not published: %s", count, why)

    def _joined(self, one: _Waiting) -> KVCache:
        """All heads, on the first rank's GPU if it has one, which may encode them."""
        own, share = one.own, self._share
        keys = torch.empty(share.whole_shape(one.chunk), dtype=own.dtype)
        whole = KVCache(keys, torch.empty_like(keys), one.chunk.start)
        _place(whole, share.heads(share.rank), own.keys, own.values)
        for rank in self._others:
            data = self._read(part_name(one.chunk.key, rank))
            parts = unpack(share, one.chunk, rank, own.dtype, data)
            _place(whole, share.heads(rank), *parts)
        return self._copies.to_device(whole)

    def _read(self, name: str) -> mmap.mmap:
        fd = self._folder.fetch(name)
        if fd is None:
            raise FormatError("a part is gone again")
        try:
            return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise FormatError("a part without a byte") from error
        finally:
            os.close(fd)


def _place(whole: KVCache, heads: Heads, keys: torch.Tensor, values: torch.Tensor) -> None:
    part = whole.of_heads(heads.range)
    part.keys.copy_(keys)
    part.values.copy_(values)
