"""A context of a model that never ran, its streams (and others under the same keys), stores that
hold them, and stores that go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from kdn.bench.rivals.cachegen import CacheGenCodec
from kdn.bench.rivals.cachegen_profile import CacheGenProfile
from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec
from kdn.delivery.plan import Fetch, Plan, Situation
from kdn.delivery.request import Request, Result
from kdn.delivery.sink import HostSink
from kdn.errors import StoreError
from kdn.store.base import Entry, Span, Stats, Store
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from kdn.store.streaming import Ask, Piece
from tests.codec.conftest import Tiny, seeded_bytes
from tests.codec.klt_profile import make_profile

T = TypeVar("T")
TINY = Tiny.with_layers(4)


def run(work: Coroutine[Any, Any, T], limit_s: float = 60.0) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await work

    return asyncio.run(bounded())


@dataclass(frozen=True)
class World:
    codec: Codec
    chunks: list[Chunk]
    caches: list[KVCache]
    streams: list[bytes]
    others: list[bytes]
    """What somebody else may have published under the same keys."""

    @property
    def expected_kld(self) -> tuple[float, ...]:
        return tuple(0.1 / 4**level for level in range(self.codec.num_levels))

    def request(
        self, *, cache: KVCache | None = None, dtype: torch.dtype = torch.float32, **options: Any
    ) -> Request:
        sink = HostSink.of(self.codec, self.chunks, dtype)
        if cache is not None:
            sink = HostSink(self.codec, cache)
        return Request(self.chunks, self.codec, self.expected_kld, sink, **options)

    async def store(self, streams: Sequence[bytes] | None = None) -> MemoryStore:
        """With these streams, or with all."""
        store = MemoryStore(2**28, open_policy("lru"))
        for stream in self.streams if streams is None else streams:
            await put_stream(store, stream)
        return store

    @property
    def all_levels(self) -> tuple[int, ...]:
        """Of a delivery that is complete."""
        return (self.codec.num_levels,) * len(self.chunks)

    def decoded(self, result: Result, number: int) -> KVCache:
        """What chunk `number` must be by what the result says of it."""
        by_id = {Bitstream.parse(data).stream_id: data for data in (*self.streams, *self.others)}
        stream = Bitstream.parse(by_id[result.stream_ids[number]])
        chunk, levels = self.chunks[number], result.levels[number]
        return self.codec.decode(stream, chunk, levels=levels, dtype=cache_of(result).dtype)

    def check(self, result: Result) -> None:
        """Every chunk is its stream at its level, or the model's, or is to be recomputed."""
        for number, chunk in enumerate(self.chunks):
            part = cache_of(result).slice(chunk.start, chunk.end)
            if result.computed[number]:
                assert same(part, self.caches[number])
            elif result.levels[number]:
                assert same(part, self.decoded(result, number)), f"chunk {number} is wrong"
            else:
                assert number in result.recompute


def cache_of(result: Result) -> KVCache:
    """What was delivered into main memory."""
    assert isinstance(result.sink, HostSink)
    return result.sink.cache


def same(a: KVCache, b: KVCache) -> bool:
    return torch.equal(a.keys, b.keys.to(a.dtype)) and torch.equal(a.values, b.values.to(a.dtype))


def make_world(num_chunks: int = 6, name: str = "klt", last_tokens: int = 256) -> World:
    codec = _codec(name)
    tokens = np.frombuffer(seeded_bytes("context", 256 * num_chunks), np.uint8)
    tokens = tokens[: 256 * (num_chunks - 1) + last_tokens]
    chunks = cut(tokens, Namespace(codec.spec.fingerprint, codec.profile_id))
    caches = [TINY.reseed(f"a{i}").cache(chunk, torch.float32) for i, chunk in enumerate(chunks)]
    others = [TINY.reseed(f"b{i}").cache(chunk, torch.float32) for i, chunk in enumerate(chunks)]
    streams = [codec.encode(chunk, cache) for chunk, cache in zip(chunks, caches, strict=True)]
    codec.decode(Bitstream.parse(streams[0]), chunks[0])  # compiles; no delivery shall wait for it
    return World(
        codec,
        chunks,
        caches,
        streams,
        [codec.encode(chunk, cache) for chunk, cache in zip(chunks, others, strict=True)],
    )


def _codec(name: str) -> Codec:
    if name == "klt":
        return KltCodec(TINY.spec, make_profile(TINY.spec))
    calibration = TINY.reseed("calibration")
    samples = [
        calibration.cache(calibration.chunk(bytes(16), 256, i), torch.float32) for i in (0, 1)
    ]
    return CacheGenCodec(TINY.spec, CacheGenProfile.fit(TINY.spec, samples))


async def put_stream(store: Store, stream: bytes) -> Entry:
    info, stream_id = Bitstream.parse(stream).info, Bitstream.parse(stream).stream_id
    return await store.put(
        info.chunk_key, stream, etag=stream_id, checksum=xxh3_64_intdigest(stream)
    )


def level_major(situation: Situation) -> Plan:
    """Level 0 of all chunks, then level 1, ...: as far as is needed, whatever the time."""
    fetches = [
        Fetch(number, level + 1)
        for level in range(max(len(offer.level_ends) for offer in situation.offers))
        for number, offer in enumerate(situation.offers)
        if level == 0 or offer.expected_kld[level - 1] > situation.enough_kld
        if not situation.progress[number].computed
        if situation.progress[number].decoded <= level
    ]
    return Plan(tuple(fetches), 0, situation.now_s, 0.0)


class Proxy(Store):
    """Passes everything on to another store."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    async def put_entry(self, *args: Any, **named: Any) -> Entry:
        return await self.inner.put_entry(*args, **named)

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        return await self.inner.get(key, start, end, etag=etag)

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        return await self.inner.lookup(keys, head_bytes=head_bytes)

    async def delete(self, key: bytes) -> bool:
        return await self.inner.delete(key)

    def list(self, prefix: bytes = b"") -> Any:
        return self.inner.list(prefix)

    async def stats(self) -> Stats:
        return await self.inner.stats()

    async def close(self) -> None:
        await self.inner.close()


class Down(Proxy):
    """Nobody there, for as long as `is_down`."""

    is_down = True

    def _check(self) -> None:
        if self.is_down:
            raise StoreError("nobody there")

    async def put(self, *args: Any, **named: Any) -> Entry:
        self._check()
        return await super().put(*args, **named)

    async def get(self, *args: Any, **named: Any) -> Span | None:
        self._check()
        return await super().get(*args, **named)

    async def lookup(self, *args: Any, **named: Any) -> list[Entry | None]:
        self._check()
        return await super().lookup(*args, **named)


class Flaky(Proxy):
    """Streams in small pieces at a rate, and goes wrong now and then: cuts, stalls, flipped bits,
    vanished objects. `probability` is per piece."""

    def __init__(
        self,
        inner: Store,
        rng: Random,
        *,
        cut: float = 0.0,
        stall: float = 0.0,
        flip: float = 0.0,
        vanish: float = 0.0,
        stall_s: float = 0.3,
        piece_bytes: int = 3000,
        rate: float = float("inf"),
    ) -> None:
        super().__init__(inner)
        self.rng = rng
        self.odds = {"cut": cut, "stall": stall, "flip": flip, "vanish": vanish}
        self.stall_s, self.piece_bytes, self.rate = stall_s, piece_bytes, rate
        self.asked: list[Ask] = []
        self.seen = dict.fromkeys(self.odds, 0)
        self.open_requests = 0
        self._free_s = 0.0  # when the link, shared by all requests, is free again

    def _happens(self, what: str) -> bool:
        happens = self.rng.random() < self.odds[what]
        self.seen[what] += happens
        return happens

    async def read_spans(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece, None]:
        self.asked += asks
        self.open_requests += 1
        try:
            for number, ask in enumerate(asks):
                async for piece in self._read(number, ask):
                    yield piece
        finally:
            self.open_requests -= 1

    async def _read(self, number: int, ask: Ask) -> AsyncGenerator[Piece, None]:
        start = ask.start
        while start < ask.end:
            end = min(ask.end, start + self.rng.randint(1, self.piece_bytes))
            now_s = asyncio.get_running_loop().time()
            self._free_s = max(self._free_s, now_s) + (end - start) / self.rate
            await asyncio.sleep(self._free_s - now_s)
            if self._happens("cut"):
                raise StoreError("cut off")
            if self._happens("stall"):
                await asyncio.sleep(self.stall_s)
            span = await self.inner.get(ask.key, start, end, etag=ask.etag)
            if span is None or self._happens("vanish"):
                yield Piece(number, start, None)
                return
            data = bytearray(span.data)
            if self._happens("flip"):
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            yield Piece(number, start, bytes(data))
            start = end
