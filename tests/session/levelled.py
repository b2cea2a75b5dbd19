"""Streams of four levels that take one, two, three and seven pages of memory, and a codec that
knows how many of their levels it was given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec, output_cache
from kdn.codec.format import Bitstream, CodecId, DType, Section, StreamInfo, write

SPEC = ModelSpec(2, 2, 8, 1000, (None,) * 2, (None,) * 2, b"m" * 16)
PROFILE = b"p" * 16
SPACE = Namespace(SPEC.fingerprint, PROFILE)
SIZES = (3000, 4096, 4096, 4 * 4096)
PAGES = (1, 2, 3, 7)
"""That the first levels take, with header and front."""
KLDS = (0.1, 0.02, 0.003, 0.0003)


class Levelled(Codec):
    name, codec_id, num_levels = "levelled", CodecId.KLT, 4
    spec, profile_id = SPEC, PROFILE

    @property
    def expected_kld(self) -> tuple[float, ...]:
        return KLDS

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        return stream_of(chunk)

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
        """All values are how many levels there were, if those are this chunk's."""
        stream.check_for(chunk, SPEC, PROFILE, CodecId.KLT)
        count = stream.levels_available if levels is None else levels
        for level in range(count):
            assert stream.section(level, 0, 0) == section_of(chunk, level)
        cache = output_cache(stream.info, out, dtype, at)
        cache.keys.fill_(count)
        cache.values.fill_(count)
        return cache


def section_of(chunk: Chunk, level: int) -> bytes:
    return (chunk.key * SIZES[level])[level : level + SIZES[level]]


def stream_of(chunk: Chunk, dtype: DType = DType.FLOAT16, absent: int = 0) -> bytes:
    info = StreamInfo.for_chunk(
        chunk, SPEC, codec=CodecId.KLT, dtype=dtype, num_levels=4, profile=PROFILE,
        valid_from=(chunk.start + absent, chunk.start),
    )  # fmt: skip
    sections = [Section(level, 0, 0, section_of(chunk, level)) for level in range(4)]
    return write(info, sections, chunk.seal_key)


def prompt(num_chunks: int, first: int = 0) -> list[Chunk]:
    return cut([first, *range(1, 256 * num_chunks)], SPACE)


def first_chunks(number: int) -> list[Chunk]:
    """Of as many prompts."""
    return [prompt(1, first)[0] for first in range(number)]


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**18

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 10**9)


def pages_of(levels: Sequence[int]) -> int:
    """Of files with so many levels each."""
    return sum(PAGES[count - 1] for count in levels if count)
