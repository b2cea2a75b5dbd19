"""Memory on a GPU for chunks between the step that computed them and their encoder.

vLLM gives blocks to others as soon as a request has ended, so what is to be published is copied out
of them within the step. It waits here, in places for one chunk each that were taken when vLLM
started: asking a GPU for memory makes it wait for all its streams. What finds no place is saved by
a later step, or not at all.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.layout import PagedCache

logger = logging.getLogger("vllm.kdn")

MAX_PLACES = 64
"""16,384 tokens: as many as vLLM computes in a step, and the encoder is faster than the model."""
RESERVE_BYTES = 1 << 30
"""Left free: vLLM captures its graphs after this, and takes memory of its own while it runs."""
SHARE = 0.5
"""Of what is free beyond that."""


def free_bytes(device: torch.device) -> int | None:
    """Of a GPU's memory, whoever uses the rest; None: of no GPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


class Staging:
    """Used by any thread."""

    def __init__(
        self,
        paged: PagedCache,
        num_layers: int,
        max_bytes: int,
        free: Callable[[torch.device], int | None] = free_bytes,
    ) -> None:
        rows = paged.rows
        assert rows is not None
        self._shape = (2, num_layers, CHUNK_TOKENS, len(rows.heads), rows.head_dim)
        self.place_bytes = math.prod(self._shape) * paged.dtype.itemsize
        wanted = min(max_bytes // self.place_bytes, MAX_PLACES)
        count = _affordable(wanted, self.place_bytes, free(paged.device))
        self._memory = _taken(count, self._shape, paged)
        self._lock = threading.Lock()  # guards _free
        self._free = list(range(len(self._memory)))

    def __len__(self) -> int:
        """Places in all."""
        return len(self._memory)

    @property
    def size_bytes(self) -> int:
        return len(self) * self.place_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def borrow(self, start: int, num_tokens: int) -> Loan | None:
        """A place for a chunk of so many tokens; None if all are taken."""
        with self._lock:
            if not self._free:
                return None
            number = self._free.pop()
        sides, layers, _, heads, channels = self._shape
        shape = (sides, layers, num_tokens, heads, channels)
        place = self._memory[number].view(-1)[: math.prod(shape)].view(shape)
        return Loan(self, number, place, start)

    def take_back(self, number: int) -> None:
        with self._lock:
            self._free.append(number)


@dataclass
class Loan:
    """A source of one chunk's values (`kdn/delivery/publish.py`)."""

    _staging: Staging
    _number: int
    place: torch.Tensor
    """`[2, layers, tokens, heads, channels]`: keys, then values."""
    _start: int
    ready: torch.cuda.Event | None = None
    _is_back: bool = False

    def read(self, chunk: Chunk) -> KVCache:
        return KVCache(self.place[0], self.place[1], self._start, ready=self.ready)

    def give_back(self) -> None:
        """Once; whoever gives it back has read it."""
        if not self._is_back:
            self._is_back = True
            self._staging.take_back(self._number)


def _affordable(wanted: int, place_bytes: int, free: int | None) -> int:
    """How many places leave enough of what is free to vLLM itself."""
    if free is None:
        return wanted
    count = min(wanted, int(SHARE * max(free - RESERVE_BYTES, 0)) // place_bytes)
    if count < wanted:
        logger.log(
            logging.INFO if count else logging.WARNING,
            "kdn: GPU memory for %d of %d chunks to be published%s: %.2f GiB are free, of which "
            "%.2f GiB stay free for vLLM, and %.2f GiB are wanted; lower --gpu-memory-utilization "
            "or staging_bytes",
            count, wanted, "" if count else ", so nothing is published", free / 2**30,
            RESERVE_BYTES / 2**30, wanted * place_bytes / 2**30,
        )  # fmt: skip
    return count


def _taken(count: int, shape: tuple[int, ...], paged: PagedCache) -> torch.Tensor:
    """As much as there is, up to so many places."""
    while count > 0:
        try:
            return torch.empty((count, *shape), dtype=paged.dtype, device=paged.device)
        except torch.OutOfMemoryError:
            logger.warning("kdn: no GPU memory for %d chunks to be published: trying half", count)
            count //= 2
    return torch.empty((0, *shape), dtype=paged.dtype, device=paged.device)
