"""kdn's own codecs in the benchmark: a context cut into chunks, each a stream of real bytes.

A context is encoded once, all levels together; its encoding time is therefore the same at every
level. A level's bytes are what a client would fetch to decode at it, headers included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kdn.bench.rivals.base import CodedLevel, ExactContext, Rival, timed
from kdn.cache.keys import Chunk, Namespace, TokenIds, cut
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream

TAIL_TOKENS = 256

LevelFetch = Callable[[bytes, int], tuple[Bitstream, int]]
"""What a client fetches of a whole stream to decode at a level, and how many bytes that is."""


def prefix(data: bytes, level: int) -> tuple[Bitstream, int]:
    """The levels up to this one: they build on each other and are the stream's first bytes."""
    end = Bitstream.parse(data).level_end(level)
    return Bitstream.parse(data[:end]), end


def anchors_and_deltas(data: bytes, level: int) -> tuple[Bitstream, int]:
    """Level 0 and this one alone: CacheGen's delta levels are alternatives."""
    header = Bitstream.parse(data).header
    levels = {one: data[header.level_start(one) : header.level_end(one)] for one in (0, level)}
    stream = Bitstream.from_levels(data[: header.size_bytes], levels)
    return stream, header.size_bytes + sum(map(len, levels.values()))


class Layered(Rival):
    """Any codec of kdn. `dtype` is that of the cache it is given and gives back.

    With `tail_levels`, the last TAIL_TOKENS of the context are fetched so many levels finer than
    the rest: the reader of a layered stream knows where its context ends, and what is near is read
    most. All their bytes are counted. What this does to recall is in the same row.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        name: str | None = None,
        fetch: LevelFetch = prefix,
        dtype: torch.dtype = torch.float32,
        tail_levels: int = 0,
    ) -> None:
        self.name = name or codec.name
        self.tail_levels = tail_levels
        self.labels = tuple(str(level) for level in range(codec.num_levels))
        self.codec = codec
        self.fetch = fetch
        self.dtype = dtype

    def run(self, context: ExactContext) -> Iterator[CodedLevel]:
        chunks = self.chunks(context.tokens)
        cache = _as_dtype(context.cache, self.dtype)
        data, encode_s = timed(partial(self.codec.encode_all, chunks, cache))
        for level in range(self.codec.num_levels):
            levels = [self._level_of(chunk, chunks[-1].end, level) for chunk in chunks]
            streams, size_bytes = self.fetched(data, levels)
            decoded, decode_s = timed(partial(self.decode, chunks, streams, cache))
            yield CodedLevel(level, size_bytes, decoded, encode_s, decode_s)

    def chunks(self, tokens: TokenIds) -> list[Chunk]:
        return cut(tokens, Namespace(self.codec.spec.fingerprint, self.codec.profile_id))

    def encode(self, tokens: TokenIds, cache: KVCache) -> tuple[list[Chunk], list[bytes]]:
        """A context's chunks, and the whole stream of each."""
        chunks = self.chunks(tokens)
        return chunks, self.codec.encode_all(chunks, _as_dtype(cache, self.dtype))

    def fetched(self, data: Sequence[bytes], levels: Sequence[int]) -> tuple[list[Bitstream], int]:
        """Of whole streams, what a client fetches to decode each at its level, and the bytes."""
        found = [self.fetch(part, level) for part, level in zip(data, levels, strict=True)]
        return [stream for stream, _ in found], sum(size for _, size in found)

    def _level_of(self, chunk: Chunk, end: int, level: int) -> int:
        if end - chunk.end >= TAIL_TOKENS:
            return level
        return min(level + self.tail_levels, self.codec.num_levels - 1)

    def decode(
        self, chunks: Sequence[Chunk], streams: Sequence[Bitstream], like: KVCache
    ) -> KVCache:
        """A cache of the same shape and place as `like`."""
        keys = torch.empty_like(like.keys)
        out = KVCache(keys, torch.empty_like(keys), like.start, like.valid_from)
        self.codec.decode_all(streams, chunks, out)
        return out


def cachegen(codec: Codec) -> Layered:
    """CacheGen as in the paper. Level 0 is its anchors alone."""
    return Layered(codec, fetch=anchors_and_deltas)


def exact(codec: ExactCodec) -> Layered:
    """The lossless codec, given what an engine would deliver: half precision."""
    return Layered(codec, dtype=torch.float16)


def _as_dtype(cache: KVCache, dtype: torch.dtype) -> KVCache:
    keys, values = cache.keys.to("cpu", dtype), cache.values.to("cpu", dtype)
    return KVCache(keys, values, cache.start, cache.valid_from)
