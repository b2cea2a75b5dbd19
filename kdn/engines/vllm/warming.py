"""While vLLM starts: kdn takes what it needs of a GPU, and compiles what is compiled on first use.
A load has a deadline, the start of vLLM has none."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from kdn.cache.keys import CHUNK_TOKENS, TAIL_MULTIPLE, Chunk, Namespace, cut
from kdn.cache.rows import NOWHERE, TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec, Coded
from kdn.codec.format import Bitstream
from kdn.errors import KdnError

logger = logging.getLogger(__name__)
T = TypeVar("T")

SWITCH_S = 0.0005
"""A load needs the interpreter some dozen times, for a moment each. Python lets another thread,
vLLM's among them, keep it for 5 ms meanwhile. With this, a load of 8,192 tokens of an 8B model from
an H200 host's memory took 28 to 30 ms instead of 31, one of 32,768 tokens 60 to 65 instead of 73,
and requests that decode beside loads lost a quarter less of their speed."""


class _Sharing:
    """While anybody shares, threads take turns more often than Python lets them by itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the others
        self._count = 0
        self._before_s = 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, SWITCH_S))
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._before_s)


_sharing = _Sharing()


@contextmanager
def sharing_interpreter(device: torch.device) -> Iterator[None]:
    """Beside an engine on a GPU, for as long as this is not left."""
    if device.type != "cuda":
        yield
        return
    _sharing.begin()
    try:
        yield
    finally:
        _sharing.end()


def in_own_thread(device: torch.device, work: Callable[[], T]) -> T:
    """Do it in a thread of its own, and wait for it. While vLLM makes its cache, GPU memory for its
    thread may come from a pool that it empties when it sleeps."""
    if device.type != "cuda":
        return work()

    def on_device() -> T:
        with torch.cuda.device(device):
            done = work()
            torch.cuda.synchronize()
            return done

    with ThreadPoolExecutor(1, "kdn-start") as thread:
        return thread.submit(on_device).result()


def warm_up(codec: Codec) -> None:
    """What decodes and encodes in main memory."""
    chunk = _chunks(codec, 1)[0]
    codec.decode(Bitstream.parse(codec.encode(chunk, _values(codec, chunk))), chunk)


def warm_up_gpu(
    codec: Codec, rows: TokenRows, dtype: torch.dtype, repaired: Codec | None = None
) -> None:
    """Compiled and recorded is what decodes into this memory, at every number of levels, and what
    encodes values of `dtype` on its device, if the codec does that there. Else the first dozen
    loads from a node take up to half as long again: each brings batches of other sizes. Of all
    that, one token is written, to the first slot: no request has any yet. What does not work says
    so when it is needed, too. `repaired`: what decodes joins of the same streams."""
    if not codec.decodes_on(rows.device):
        return
    # Not where this is imported: see `weights.py`.
    from kdn.codec.klt.gpu_launch import SLAB_SIZES
    from kdn.codec.klt.replays import RECORDED_TIME

    began_s = time.monotonic()
    # The first tokens of a context are coded in another way, and last chunks are shorter.
    chunks = _chunks(codec, 2, TAIL_MULTIPLE)
    try:
        caches = [_values(codec, chunk, rows.device, dtype) for chunk in chunks]
        streams = codec.encode_batch(list(zip(chunks, caches, strict=True)))
        for levels in range(1, codec.num_levels + 1):
            first, full, last = (
                _coded(chunk, data, levels) for chunk, data in zip(chunks, streams, strict=True)
            )
            is_recorded = levels < codec.num_levels
            for size in (1, *SLAB_SIZES) if is_recorded else (1, SLAB_SIZES[-1]):
                others = [full] * (size - 1)
                later = [[full, *others], [*others, last]]
                for _ in range(2 * RECORDED_TIME if is_recorded else 1):  # in each of two buffers
                    for batch in ([first, *others], *later):
                        codec.decode_rows(batch, rows)
                    if repaired is not None:  # no kernel repairs sinks
                        for batch in later:
                            repaired.decode_rows(batch, rows)
    except Exception as error:  # also Triton's, of a kernel that it cannot compile
        logger.warning("kdn: the codec %s did not warm up: %r", codec.name, error)
    logger.info("kdn: compiled for %s in %.1f s", rows.device, time.monotonic() - began_s)


def _coded(chunk: Chunk, data: bytes | KdnError, levels: int) -> Coded:
    """For nowhere, but for a context's first token: sinks that nobody wants are not decoded."""
    if isinstance(data, KdnError):
        raise data
    slots = np.full(chunk.num_tokens, NOWHERE, dtype=np.int64)
    if chunk.start == 0:
        slots[0] = 0
    return Coded(Bitstream.parse(data), chunk, levels, slots)


def _chunks(codec: Codec, count: int, more: int = 0) -> list[Chunk]:
    tokens = [token % codec.spec.vocab_size for token in range(count * CHUNK_TOKENS + more)]
    return cut(tokens, Namespace(b"", b""))


def _values(
    codec: Codec,
    chunk: Chunk,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> KVCache:
    spec = codec.spec
    shape = (spec.num_layers, chunk.num_tokens, spec.num_kv_heads, spec.head_dim)
    values = torch.linspace(-1.0, 1.0, math.prod(shape), device=device).view(shape).to(dtype)
    return KVCache(values, values, chunk.start)
