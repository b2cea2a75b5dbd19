"""What every codec does: one chunk of a KV cache to one layered bitstream, and back.

Levels are ordered from coarse to fine. A stream that holds only its first levels decodes to a
coarser cache; a codec never needs the model, only the stream, its profile and the chunk's tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import TokenRows, check_whole
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream, CodecId, StreamInfo
from kdn.codec.header import MAX_START
from kdn.codec.threads import parallel_map
from kdn.errors import KdnError, MismatchError, UnsupportedError

if TYPE_CHECKING:
    from kdn.codec.repair import Repair


class Coded(NamedTuple):
    """The first `levels` levels of a chunk, to be decoded into an engine's memory."""

    stream: Bitstream
    chunk: Chunk
    levels: int
    slots: npt.NDArray[np.int64]
    """Of each of the chunk's tokens, -1 for one that is not wanted."""
    at: int | None = None
    """Position of the chunk's first token, where it is not the one it was learned at."""


class Codec(ABC):
    """Encodes and decodes chunks of one model."""

    name: ClassVar[str]
    codec_id: ClassVar[CodecId]
    """What headers call it."""
    is_lossless: ClassVar[bool] = False
    """Whether every bit comes back."""
    shares_profile: ClassVar[bool] = False
    """Whether it needs a profile that may have been made here alone, and that others must get."""
    spec: ModelSpec
    num_levels: int
    profile_id: bytes
    """Content address of the codec's parameters: part of every key and header."""
    windowed_from: int | None = None
    """First group of the second part of its streams, which holds the layers with a window; None:
    its streams are in one part."""

    @property
    def expected_kld(self) -> tuple[float, ...]:
        """By levels - 1: how far off a model's answers are expected to be, which a delivery plans
        with. Measured on held-out text when the profile was made; zeros where nothing is lost."""
        if self.is_lossless:
            return (0.0,) * self.num_levels
        raise UnsupportedError(
            f"the profile of the codec {self.name!r} does not say what its levels are worth"
        )

    def decodes_to(self, info: StreamInfo, dtype: torch.dtype) -> bool:
        """Whether such a stream decodes to values of `dtype`."""
        return True

    def decodes_on(self, device: torch.device) -> bool:
        """Whether it decodes on such a device itself, so that streams are all it needs there."""
        return False

    @abstractmethod
    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        """The whole bitstream of one chunk. `cache` holds exactly the chunk's tokens."""

    @abstractmethod
    def decode(
        self,
        stream: Bitstream,
        chunk: Chunk,
        *,
        levels: int | None = None,
        out: KVCache | None = None,
        dtype: torch.dtype = torch.float32,
        at: int | None = None,
    ) -> KVCache:
        """The chunk's cache from the first `levels` levels at hand (all that the stream holds if
        None), written into `out` if given, else into a new cache of `dtype`. With `at` its first
        token stands there, where `out` must begin too, and not where it was learned: keys are
        turned for their new positions."""

    def decode_heads(
        self,
        stream: Bitstream,
        chunk: Chunk,
        heads: range,
        *,
        levels: int,
        dtype: torch.dtype,
        at: int | None = None,
    ) -> KVCache:
        """The same bits as those of these KV heads in `decode`, in a new cache that holds no
        others."""
        return self.decode(stream, chunk, levels=levels, dtype=dtype, at=at).of_heads(heads)

    def repaired(self, repair: Repair) -> Codec:
        """A codec that decodes the same streams and applies a repair to their values. It encodes
        nothing: what it decodes is not what was learned."""
        from kdn.codec.repair import Repaired

        return Repaired(self, repair)

    def encode_all(self, chunks: Sequence[Chunk], cache: KVCache) -> list[bytes]:
        """Many chunks of one context at once: each core takes one, which is faster than sharing."""
        return parallel_map(
            lambda chunk: self.encode(chunk, cache.slice(chunk.start, chunk.end)), chunks
        )

    def encode_batch(self, items: Sequence[tuple[Chunk, KVCache]]) -> list[bytes | KdnError]:
        """Any chunks, each with its own cache, together: streams, or why there is none. Values on a
        GPU are copied to main memory for it, unless the codec encodes there."""

        def encode(item: tuple[Chunk, KVCache]) -> bytes | KdnError:
            try:
                return self.encode(item[0], _on_host(item[1]))
            except KdnError as error:
                return error

        return parallel_map(encode, items)

    def decode_all(
        self,
        streams: Sequence[Bitstream],
        chunks: Sequence[Chunk],
        out: KVCache,
        *,
        levels: int | None = None,
    ) -> None:
        """The same back, each chunk into its place in `out`."""

        def decode(job: tuple[Bitstream, Chunk]) -> None:
            stream, chunk = job
            self.decode(stream, chunk, levels=levels, out=out.slice(chunk.start, chunk.end))

        parallel_map(decode, zip(streams, chunks, strict=True))

    def decode_rows(
        self,
        batch: Sequence[Coded],
        rows: TokenRows,
        *,
        after: torch.cuda.Event | None = None,
    ) -> list[KdnError | None]:
        """Many chunks straight into an engine's memory. Each is written as a whole or not at all;
        then the result says why. Writing begins after the event `after`, and when this returns
        it is done: whatever the engine launches then sees it."""

        def decode(one: Coded) -> KdnError | None:
            return self._decode_row(one, rows, after)

        return parallel_map(decode, batch)

    def gpu_memory_bytes(self) -> tuple[int, int]:
        """What this codec takes by now: on GPUs, and pinned in main memory for them."""
        return 0, 0

    def _decode_row(
        self, one: Coded, rows: TokenRows, after: torch.cuda.Event | None
    ) -> KdnError | None:
        """One chunk in main memory, then where it belongs."""
        try:
            rows.check_slots(one.slots, one.chunk.num_tokens)
            check_whole(info_at_hand(one.stream, self.spec).valid_from, one.chunk.start, one.slots)
            dtype = self._dtype_for(one.stream.info, rows)
            cache = self.decode(one.stream, one.chunk, levels=one.levels, dtype=dtype, at=one.at)
            with rows.writing(after):
                rows.write(cache, one.slots)
        except KdnError as error:
            return error
        return None

    def _dtype_for(self, info: StreamInfo, rows: TokenRows) -> torch.dtype:
        """Scales come between a stream and memory of 8 bit, so it is not decoded to that."""
        if rows.dtype.itemsize > 1:
            return rows.dtype
        known = (torch.float32, torch.bfloat16, torch.float16)
        return next((one for one in known if self.decodes_to(info, one)), torch.float32)


def check_input(spec: ModelSpec, chunk: Chunk, cache: KVCache) -> None:
    """That this cache holds exactly this chunk of this model."""
    expected = (spec.num_layers, chunk.num_tokens, spec.num_kv_heads, spec.head_dim)
    if tuple(cache.keys.shape) != expected:
        raise MismatchError(f"expected a cache of {expected}, found {tuple(cache.keys.shape)}")
    if cache.start != chunk.start:
        raise MismatchError(f"expected a cache from {chunk.start}, found from {cache.start}")


def _on_host(cache: KVCache) -> KVCache:
    if not cache.keys.is_cuda:
        return cache
    if cache.ready is not None:
        cache.ready.synchronize()
    return KVCache(cache.keys.cpu(), cache.values.cpu(), cache.start, cache.valid_from)


def output_cache(
    info: StreamInfo, out: KVCache | None, dtype: torch.dtype, at: int | None = None
) -> KVCache:
    """Where to decode to: `out`'s tensors if given, else new ones of `dtype`. Says what is absent
    as the stream does; absent tokens are zero, the others are for the decoder to write. With `at`
    it begins there."""
    info = info if at is None else moved(info, at)
    if out is None:
        keys = torch.empty(info.shape, dtype=dtype)
        cache = KVCache(keys, torch.empty_like(keys), info.start, info.valid_from)
    else:
        if tuple(out.keys.shape) != info.shape or out.start != info.start:
            raise MismatchError(
                f"expected to decode {info.shape} from {info.start}, "
                f"found a cache of {tuple(out.keys.shape)} from {out.start}"
            )
        cache = KVCache(out.keys, out.values, info.start, info.valid_from)
    clear_absent(cache)
    return cache


def info_at_hand(stream: Bitstream, spec: ModelSpec) -> StreamInfo:
    """What a stream holds: nothing of the layers with a window where their part is not at hand."""
    info = stream.info
    if stream.has_windowed:
        return info
    both = zip(info.valid_from, spec.windows, strict=True)
    end = info.start + info.num_tokens
    return replace(info, valid_from=tuple(p if window is None else end for p, window in both))


def moved(info: StreamInfo, at: int) -> StreamInfo:
    """The same tokens, the first of them at another position."""
    if not 0 <= at <= MAX_START:
        raise MismatchError(f"expected a position from 0 to {MAX_START}, found {at}")
    valid_from = tuple(at + absent for absent in info.absences)
    return replace(info, start=at, valid_from=valid_from)


def clear_absent(cache: KVCache) -> None:
    """Zero what layers do not hold."""
    for layer, position in enumerate(cache.valid_from):
        if position > cache.start:
            cache.keys[layer, : position - cache.start] = 0
            cache.values[layer, : position - cache.start] = 0
