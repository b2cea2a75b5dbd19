"""The host of `test_two_hosts.py` that has a context delivered, and what fills a node for it.

python -m tests.delivery.peer URL CHUNKS
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import torch

from kdn.bench.delivery.policies import fixed
from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.exact import ExactCodec
from kdn.delivery.client import deliver
from kdn.delivery.request import Request
from kdn.delivery.sink import HostSink
from kdn.places.places import open_places
from kdn.store.http import HttpStore
from tests.codec.conftest import seeded_bytes
from tests.delivery.world import put_stream

LAYERS = 16
SPEC = ModelSpec(LAYERS, 1, 64, 1000, (None,) * LAYERS, (None,) * LAYERS, bytes(16))


def context(num_chunks: int) -> tuple[Codec, list[Chunk]]:
    codec = ExactCodec(SPEC)
    tokens = np.frombuffer(seeded_bytes("two hosts", 256 * num_chunks), np.uint8)
    return codec, cut(tokens, Namespace(SPEC.fingerprint, codec.profile_id))


def values(chunk: Chunk) -> KVCache:
    """Random bits that make finite numbers: about 1 MB that cannot be made smaller."""
    rng = np.random.default_rng(chunk.start)
    shape = (LAYERS, chunk.num_tokens, 1, 64)
    both = [torch.from_numpy(rng.integers(0, 0x7C00, shape, np.uint16)) for _ in "kv"]
    return KVCache(*(one.view(torch.float16) for one in both), chunk.start)


async def fill(folder: Path, num_chunks: int) -> list[int]:
    """A node's data folder: how many bytes each chunk takes."""
    codec, chunks = context(num_chunks)
    async with open_places(folder) as places:
        store = places.publish_to.store
        entries = [await put_stream(store, codec.encode(one, values(one))) for one in chunks]
    return [entry.size_bytes for entry in entries]


async def fetch(url: str, num_chunks: int) -> dict[str, object]:
    codec, chunks = context(num_chunks)
    store = HttpStore(url, collection="chunks")
    sink = HostSink.of(codec, chunks, torch.float16)
    request = Request(chunks, codec, (0.0,), sink, deadline_s=90.0)
    result = await deliver(request, [store], policy=fixed)
    await store.close()
    right = all(
        torch.equal(sink.cache.slice(chunk.start, chunk.end).keys, values(chunk).keys)
        for chunk in chunks
    )
    return {
        "right": right, "recompute": len(result.recompute), "done_s": result.done_s,
        "lookup_s": result.lookup_s, "first_byte_s": result.first_byte_s,
        "fetched_bytes": result.fetched_bytes, "troubles": result.troubles,
    }  # fmt: skip


def main(url: str, num_chunks: str) -> None:
    print(json.dumps(asyncio.run(fetch(url, int(num_chunks)))))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
