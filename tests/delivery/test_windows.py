"""Layers with a window: their part of a stream is fetched where a continuation reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.cache.windows import needed_from
from kdn.codec import open_codec
from kdn.codec.base import Codec
from kdn.codec.header import Header
from kdn.delivery.assemble import Assembly
from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoints
from kdn.delivery.request import Request, Result
from kdn.delivery.sink import HostSink
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.codec.targets import klt_in_parts
from tests.delivery.world import put_stream, run

CONTEXT = 8192
GEMMA = ModelSpec(6, 1, 8, 1000, (None,) * 6, (1024,) * 5 + (None,), bytes(16))
"""Its shape, five of six layers with a window, with one small head."""


def numbers(spec: ModelSpec, num_tokens: int) -> KVCache:
    generator = torch.Generator().manual_seed(3)
    shape = (2, spec.num_layers, num_tokens, spec.num_kv_heads, spec.head_dim)
    keys, values = torch.randn(shape, generator=generator).half()
    return KVCache(keys, values)


def named(codec: Codec, num_tokens: int) -> list[Chunk]:
    tokens = [17 * i % 1000 for i in range(num_tokens)]
    return cut(tokens, Namespace(codec.spec.fingerprint, codec.profile_id))


async def stored(codec: Codec, chunks: Sequence[Chunk], cache: KVCache) -> MemoryStore:
    store = MemoryStore(2**28, open_policy("lru"))
    for stream in codec.encode_all(chunks, cache):
        await put_stream(store, stream)
    return store


async def delivered(
    codec: Codec, chunks: Sequence[Chunk], store: MemoryStore, *, skip: bool = True
) -> tuple[Result, KVCache]:
    sink = HostSink.of(codec, chunks, torch.float16)
    kld = tuple(0.1 / 4**level for level in range(codec.num_levels))
    request = Request(chunks, codec, kld, sink, deadline_s=60.0, skips_windows=skip)
    result = await deliver(request, Endpoints([store]))
    assert result.levels == (codec.num_levels,) * len(chunks)
    return result, sink.cache


def test_a_third_of_the_bytes_at_8k_tokens() -> None:
    """Five of six layers with windows of 1,024 tokens; headers are counted."""
    codec = open_codec("exact", GEMMA)
    cache, chunks = numbers(GEMMA, CONTEXT), named(codec, CONTEXT)

    async def test() -> None:
        store = await stored(codec, chunks, cache)
        found = await store.lookup([chunk.key for chunk in chunks], head_bytes=2048)
        heads = sum(Header.parse(entry.head).size_bytes for entry in found if entry)
        every, _ = await delivered(codec, chunks, store, skip=False)
        few, got = await delivered(codec, chunks, store)
        stored_bytes = sum(entry.size_bytes for entry in found if entry)
        assert every.fetched_bytes > 0.9 * stored_bytes  # lookups bring first bytes, too
        assert few.fetched_bytes + heads <= stored_bytes / 3
        assert few.fetched_bytes <= every.fetched_bytes / 3
        # The last four of 32 chunks have all layers.
        assert got.valid_from == (7168,) * 5 + (0,)
        assert torch.equal(got.keys[5], cache.keys[5])
        assert torch.equal(got.values[:, 7168:], cache.values[:, 7168:])
        assert not got.keys[:5, :7168].any()

    run(test())


@pytest.mark.parametrize(
    ("window", "end", "whole_from"),
    [
        (257, 768, 512),  # exactly a chunk
        (258, 768, 256),  # and one token more
        (300, 800, 256),
        (300, 1024, 512),
        (40, 800, 512),
        (2, 1024, 768),
        (1, 1024, 1024),
        (1025, 1024, 0),
        (5000, 1024, 0),
    ],
)
def test_chunks_are_shared_by_contexts_of_any_length(
    window: int, end: int, whole_from: int
) -> None:
    """What a context does not read of a chunk is there for another that ends in it."""
    spec = replace(GEMMA, windows=(window, None) * 3)
    codec = open_codec("exact", spec)
    cache, chunks = numbers(spec, end), named(codec, end)

    async def test() -> None:
        store = await stored(codec, chunks, cache)
        for length in (len(chunks), *range(1, len(chunks))):
            _, got = await delivered(codec, chunks[:length], store)
            stop = chunks[length - 1].end
            needed = needed_from(spec.windows, stop)
            for layer in (0, 3):
                first = needed if spec.windows[layer] else 0
                assert got.valid_from[layer] <= first
                assert torch.equal(got.keys[layer, first:], cache.keys[layer, first:stop])
            if length == len(chunks):
                assert got.valid_from == (whole_from, 0) * 3

    run(test())


def test_levels_of_first_parts() -> None:
    codec = klt_in_parts(replace(GEMMA, windows=(None, 300) * 3))
    cache, chunks = numbers(codec.spec, 1024), named(codec, 1024)

    async def test() -> None:
        store = await stored(codec, chunks, cache)
        every, whole = await delivered(codec, chunks, store, skip=False)
        few, part = await delivered(codec, chunks, store)
        assert few.fetched_bytes < 0.8 * every.fetched_bytes
        assert part.valid_from == (0, 512) * 3
        assert torch.equal(part.keys[::2], whole.keys[::2])
        assert torch.equal(part.values[:, 512:], whole.values[:, 512:])
        # Nothing with holes is kept for others.
        assert [one.chunk.start for one in few.arrived] == [512, 768]

    run(test())


def test_an_assembly_of_first_parts() -> None:
    codec = klt_in_parts(replace(GEMMA, windows=(None, 300) * 3))
    [chunk] = named(codec, 256)
    stream = codec.encode(chunk, numbers(codec.spec, 256))
    header = Header.parse(stream)
    assembly = Assembly(header, stream[: header.size_bytes]).without_windowed()
    wanted = header.size_bytes
    for level, (border, end) in enumerate(zip(header.part_ends, header.level_ends, strict=True)):
        wanted += border - header.level_start(level)
        assert assembly.wanted_ends[level] == wanted
        assert assembly.missing(border) == [(header.level_start(level), border)]
        damaged = bytearray(stream[header.level_start(level) : border])
        damaged[0] ^= 1
        assembly.add(header.level_start(level), damaged)
        asyncio.run(assembly.verify())
        assert (assembly.levels, assembly.damages) == (level, level + 1)
        assembly.add(header.level_start(level), stream[header.level_start(level) : border])
        asyncio.run(assembly.verify())
        assert (assembly.levels, assembly.arrived_bytes) == (level + 1, end)
        assert assembly.wanted_arrived == wanted
    assert not assembly.missing(len(stream))
    assert not assembly.stream(codec.num_levels).has_windowed
