"""Chunks to put into a store and to read from it, each known by a number."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from kdn.codec.header import Header
from kdn.store.base import Hints, Store
from tests.node.harness import chunk_stream, key_of


async def put(store: Store, number: int, parent: bytes | None = None) -> bytes:
    data = chunk_stream(key_of(number), seed=number)
    etag = Header.parse(data).stream_id
    await store.put(
        key_of(number), data, etag=etag, checksum=xxh3_64_intdigest(data), hints=Hints(parent, 2.0)
    )
    return data


async def read(store: Store, number: int) -> bytes | None:
    span = await store.get(key_of(number))
    return None if span is None else bytes(span.data)
