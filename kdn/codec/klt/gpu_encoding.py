"""Caches on GPUs to sections on the host: encoders, one for each device, and what surrounds them.

A batch runs in a stream of its own, after the values that it reads are there; no other stream waits
for it. The host waits twice: for how long sections are, and for their bytes. Both times other
threads run. CUDA knows no priority below that of ordinary streams: an engine whose own work should
always go first must run it in a stream of higher priority.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import check_input
from kdn.codec.klt import symbols
from kdn.codec.klt.gpu_input import token_rows
from kdn.codec.klt.gpu_memory import size_of
from kdn.codec.klt.gpu_output import CodedLevels
from kdn.codec.klt.gpu_tables import MAX_SINKS
from kdn.codec.klt.profile import Profile
from kdn.codec.klt.streams import own_stream
from kdn.errors import KdnError, UnsupportedError

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from kdn.codec.klt.encoder_replay import Replay
    from kdn.codec.klt.encoder_triton import Encoded, GpuEncoder

BATCH_BYTES = 1200 << 20
"""Memory that a batch may take on the device, beside an engine that runs there."""
CONTEXT_BYTES = 8 << 30
"""The same where a whole context is encoded at once, and fast."""
REPLAYED_CHUNKS = 4
"""Recorded together: as many as are published at a time (`delivery/publish.py`)."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Item = tuple[Chunk, KVCache]


class GpuEncoding:
    """A codec's encoders, made when first used."""

    def __init__(self, spec: ModelSpec, profile: Profile) -> None:
        self._spec, self._profile = spec, profile
        self._lock = threading.Lock()  # guards what follows, and the encoders' streams
        self._encoders: dict[torch.device, GpuEncoder] = {}
        self._replays: dict[torch.device, Replay | None] = {}
        self._streams: dict[torch.device, Any] = {}

    def memory_bytes(self) -> int:
        """What it holds on devices by now, beside what a batch takes for a moment."""
        with self._lock:
            tables = size_of(*(one.tables for one in self._encoders.values()))
            replays = [one for one in self._replays.values() if one is not None]
        return tables + sum(one.memory_bytes for one in replays)

    def suits(self, chunk: Chunk, cache: KVCache) -> bool:
        """Whether kernels can encode it."""
        if not cache.keys.is_cuda or find_spec("triton") is None:
            return False
        if self._profile.has_two_stages or self._profile.run_rows:
            return False  # what is rounded between the stages, and runs, are the cores' alone
        if any(self._profile.num_uncoded):
            return False  # kernels take what all components leave for the last level's
        few = self._profile.num_sinks <= MAX_SINKS and chunk.num_tokens <= CHUNK_TOKENS
        return few and cache.dtype in _DTYPES and self._spec.head_dim % 2 == 0

    def encode(
        self, items: Sequence[Item], memory_bytes: int = BATCH_BYTES
    ) -> list[CodedLevels | KdnError]:
        """Each chunk's levels, or why there are none; of caches on one device that suit."""
        found: list[CodedLevels | KdnError | None] = [self._refused(*item) for item in items]
        todo = [index for index, refusal in enumerate(found) if refusal is None]
        with self._lock:
            if todo:
                encoder = self._encoder(items[todo[0]][1].keys.device)
                for part, replay in self._parts(encoder, items, todo, memory_bytes):
                    done = self._run(encoder, [items[index] for index in part], replay)
                    for index, coded in zip(part, done, strict=True):
                        found[index] = coded
        return [one for one in found if one is not None]

    def _parts(
        self, encoder: GpuEncoder, items: Sequence[Item], todo: Sequence[int], memory_bytes: int
    ) -> Iterator[tuple[Sequence[int], Replay | None]]:
        """What is encoded together, and how: as many as the memory allows."""
        size = max(1, memory_bytes // encoder.memory_bytes(1))
        # A whole context is faster in large batches, and nobody else is there then.
        is_beside = memory_bytes <= BATCH_BYTES
        replay = self._replay(encoder, items[todo[0]][1].dtype, size) if is_beside else None
        if replay is not None:
            ready = [index for index in todo if replay.suits(*items[index])]
            for first in range(0, len(ready), replay.count):
                yield ready[first : first + replay.count], replay
            todo = [index for index in todo if index not in ready]
        for first in range(0, len(todo), size):
            yield todo[first : first + size], None

    def _refused(self, chunk: Chunk, cache: KVCache) -> KdnError | None:
        try:
            check_input(self._spec, chunk, cache)
            token_rows(chunk, self._spec.vocab_size)
        except KdnError as error:
            return error
        return None

    def _encoder(self, device: torch.device) -> GpuEncoder:
        from kdn.codec.klt.encoder_triton import GpuEncoder

        if device not in self._encoders:
            with own_stream(device):
                self._encoders[device] = GpuEncoder(self._spec, self._profile, device)
                if device.type == "cuda":
                    _wait(device)  # its tables are there before any stream reads them
        return self._encoders[device]

    def _replay(self, encoder: GpuEncoder, dtype: torch.dtype, most: int) -> Replay | None:
        """Recorded when first needed; None where nothing can be, or memory is short."""
        from kdn.codec.klt.encoder_replay import Replay

        if encoder.device.type != "cuda":
            return None
        if encoder.device not in self._replays:
            replay = None
            try:
                with self._after(encoder.device, []):
                    made = Replay(encoder, min(REPLAYED_CHUNKS, most), dtype)
                    replay = made if made.works else None
            except torch.OutOfMemoryError:
                log.warning("too little memory on %s to encode without launches", encoder.device)
            self._replays[encoder.device] = replay
        return self._replays[encoder.device]

    def _run(
        self, encoder: GpuEncoder, items: Sequence[Item], replay: Replay | None
    ) -> list[CodedLevels | KdnError]:
        with self._after(encoder.device, [cache for _, cache in items]):
            if replay is None:
                encoded = encoder.encode(encoder.batch(items))
            else:
                encoded = replay.encode(items)
            begins, refusals = _lengths(encoded)
            wanted = [i < len(items) and one is None for i, one in enumerate(refusals)]
            filled = encoded.sheet.filled(begins, wanted)
            data = _to_host(encoded.gathered(filled))
        view = data.data.cast("B")[: 2 * filled.num_words]
        coded = filled.levels(view, len(items), self._profile.num_levels)
        return [own if one is None else one for own, one in zip(coded, refusals, strict=False)]

    @contextmanager
    def _after(self, device: torch.device, caches: Sequence[KVCache]) -> Iterator[None]:
        """A stream that waits for these values. When it ends all is done, whatever happened:
        their memory is their owner's again."""
        if device.type != "cuda":
            yield
            return
        cuda: Any = torch.cuda
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        stream = self._streams[device]
        for cache in caches:
            if cache.ready is None:
                stream.wait_stream(cuda.current_stream(device))
            else:
                stream.wait_event(cache.ready)
        with cuda.device(device), cuda.stream(stream):
            try:
                yield
            finally:
                _wait(device)


def _lengths(encoded: Encoded) -> tuple[npt.NDArray[np.int32], list[KdnError | None]]:
    """Where sections begin, and what is wrong with each chunk; waits for all of it."""
    count = len(encoded.totals)
    told = torch.cat([encoded.totals, encoded.largest]).float().view(torch.int32)
    host = _to_host(torch.cat([encoded.begins, told]))
    totals, largest = host[len(encoded.begins) :].view(np.float32).reshape(2, count)
    refusals: list[KdnError | None] = [None] * count
    for index in range(count):
        if not np.isfinite(totals[index]):
            refusals[index] = UnsupportedError(
                "klt codes finite values only; found NaN or infinity in the cache"
            )
        elif not largest[index] <= symbols.MAX_BASE:
            refusals[index] = UnsupportedError(
                "values too far from all that the profile was calibrated on"
            )
    return host[: len(encoded.begins)], refusals


def _to_host(values: torch.Tensor) -> npt.NDArray[Any]:
    """In pinned memory, which torch keeps and lends again."""
    if not values.is_cuda:
        return values.numpy()
    out = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    out.copy_(values, non_blocking=True)
    _wait(values.device)
    return out.numpy()


def _wait(device: torch.device) -> None:
    """For all that is in the current stream; other threads run meanwhile."""
    cuda: Any = torch.cuda
    cuda.current_stream(device).record_event(cuda.Event(blocking=True)).synchronize()
