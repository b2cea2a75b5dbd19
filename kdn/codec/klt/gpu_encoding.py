"""Caches on GPUs to sections on the host: encoders, one for each device, and what surrounds them.

A batch runs in a stream of its own, after the values that it reads are there; no other stream waits
for it. The host waits twice: for how long sections are, and for their bytes. Both times other
threads run. CUDA knows no priority below that of ordinary streams: an engine whose own work should
always go first must run it in a stream of higher priority.
"""

from __future__ import annotations

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
from kdn.codec.format import Section
from kdn.codec.klt import symbols
from kdn.codec.klt.gpu_input import token_rows
from kdn.codec.klt.gpu_tables import MAX_SINKS
from kdn.codec.klt.profile import Profile
from kdn.codec.klt.streams import own_stream
from kdn.errors import KdnError, UnsupportedError

if TYPE_CHECKING:
    from kdn.codec.klt.encoder_triton import Encoded, GpuEncoder

BATCH_BYTES = 1200 << 20
"""Memory that a batch may take on the device, beside an engine that runs there."""
CONTEXT_BYTES = 8 << 30
"""The same where a whole context is encoded at once, and fast."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Item = tuple[Chunk, KVCache]
Sections = list[Section]


class GpuEncoding:
    """A codec's encoders, made when first used."""

    def __init__(self, spec: ModelSpec, profile: Profile) -> None:
        self._spec, self._profile = spec, profile
        self._lock = threading.Lock()  # guards what follows, and the encoders' streams
        self._encoders: dict[torch.device, GpuEncoder] = {}
        self._streams: dict[torch.device, Any] = {}

    def suits(self, chunk: Chunk, cache: KVCache) -> bool:
        """Whether kernels can encode it."""
        if not cache.keys.is_cuda or find_spec("triton") is None:
            return False
        few = self._profile.num_sinks <= MAX_SINKS and chunk.num_tokens <= CHUNK_TOKENS
        return few and cache.dtype in _DTYPES and self._spec.head_dim % 2 == 0

    def encode(
        self, items: Sequence[Item], memory_bytes: int = BATCH_BYTES
    ) -> list[Sections | KdnError]:
        """Each chunk's sections, or why there are none; of caches on one device that suit."""
        found: list[Sections | KdnError | None] = [self._refused(*item) for item in items]
        todo = [index for index, refusal in enumerate(found) if refusal is None]
        with self._lock:
            if todo:
                encoder = self._encoder(items[todo[0]][1].keys.device)
                size = max(1, memory_bytes // encoder.memory_bytes(1))
                for first in range(0, len(todo), size):
                    part = todo[first : first + size]
                    done = self._run(encoder, [items[index] for index in part])
                    for index, sections in zip(part, done, strict=True):
                        found[index] = sections
        return [one for one in found if one is not None]

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

    def _run(self, encoder: GpuEncoder, items: Sequence[Item]) -> list[Sections | KdnError]:
        with self._after(encoder.device, [cache for _, cache in items]):
            encoded = encoder.encode(items)
            begins, refusals = _lengths(encoded, len(items))
            filled = encoded.sheet.filled(begins, [one is None for one in refusals])
            data = _to_host(encoded.gathered(filled))
        sections = filled.sections(data.data.cast("B"), len(items))
        return [own if one is None else one for own, one in zip(sections, refusals, strict=True)]

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


def _lengths(encoded: Encoded, count: int) -> tuple[npt.NDArray[np.int32], list[KdnError | None]]:
    """Where sections begin, and what is wrong with each chunk; waits for all of it."""
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
