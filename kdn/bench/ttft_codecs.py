"""What `kdn bench ttft` sends beside klt: values as they are, in 16 or 8 bits, and CacheGen at one
level. Each chunk's bytes are the only section of an ordinary stream, so that node, client and
checks are the same for all."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch

from kdn.bench.rivals.base import ExactContext
from kdn.bench.rivals.cachegen import CacheGenCodec
from kdn.bench.rivals.plain import Half, Int8
from kdn.cache.keys import Chunk
from kdn.cache.spec import FINGERPRINT_BYTES, ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.base import Codec, check_input, output_cache
from kdn.codec.format import (
    KIND_KEYS,
    Bitstream,
    CodecId,
    DType,
    Header,
    Section,
    StreamInfo,
    write,
)

Pack = Callable[[Chunk, KVCache], bytes]
Unpack = Callable[[bytes, Chunk], KVCache]


class PackedCodec(Codec):
    """One level of whatever `pack` makes of a chunk."""

    name, codec_id = "exact", CodecId.EXACT  # the only codec without a profile in the format

    def __init__(self, label: str, spec: ModelSpec, pack: Pack, unpack: Unpack) -> None:
        self.label = label
        self.spec = spec
        self.num_levels = 1
        self.profile_id = blake2b(label.encode(), digest_size=FINGERPRINT_BYTES).digest()
        self._pack, self._unpack = pack, unpack

    def encode(self, chunk: Chunk, cache: KVCache) -> bytes:
        check_input(self.spec, chunk, cache)
        info = StreamInfo.for_chunk(
            chunk, self.spec, codec=CodecId.EXACT, dtype=DType.FLOAT16, num_levels=1,
            profile=self.profile_id,
        )  # fmt: skip
        section = Section(0, KIND_KEYS, 0, self._pack(chunk, cache))
        return write(info, [section], chunk.seal_key)

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
        place = output_cache(stream.info, out, dtype, at)
        found = self._unpack(bytes(stream.section(0, 0, KIND_KEYS)), chunk)
        place.keys.copy_(found.keys)
        place.values.copy_(found.values)
        rope.move(place.keys, self.spec, place.start - chunk.start)
        return place


def plain(rival: Half | Int8) -> PackedCodec:
    """Values as they are, or as 8-bit integers."""
    return PackedCodec(
        rival.name,
        rival.spec,
        lambda chunk, cache: rival.encode(ExactContext(chunk.tokens, cache), 0),
        lambda data, chunk: rival.decode(data, chunk.tokens, 0),
    )


def cachegen_at(codec: CacheGenCodec, level: int) -> PackedCodec:
    """The paper's codec with one delta level: anchors and those deltas, nothing else."""

    def pack(chunk: Chunk, cache: KVCache) -> bytes:
        data = codec.encode(chunk, cache)
        header = Bitstream.parse(data).header
        wanted = [entry for entry in header.entries if entry.level in (0, level)]
        parts = [data[entry.offset : entry.end] for entry in wanted]
        return b"".join([data[: header.size_bytes], *parts])

    def unpack(data: bytes, chunk: Chunk) -> KVCache:
        return codec.decode(_rejoined(data, level), chunk)

    return PackedCodec(f"cachegen-{level}", codec.spec, pack, unpack)


def _rejoined(data: bytes, level: int) -> Bitstream:
    """The levels are where the header says, but for those that were left out."""
    header = Header.parse(data)
    levels, at = {}, header.size_bytes
    for one in sorted({0, level}):
        size = header.level_end(one) - header.level_start(one)
        levels[one] = data[at : at + size]
        at += size
    return Bitstream.from_levels(data[: header.size_bytes], levels)
