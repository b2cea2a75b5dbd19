"""Spans as they arrive: from frames cut anywhere, from any store, and from a real node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from kdn.errors import FormatError, KdnError, StoreError, TruncatedError
from kdn.protocol.frames import FAILED, GONE, MISS, Frame, pack
from kdn.store.base import Store
from kdn.store.evict import open_policy
from kdn.store.http import HttpStore
from kdn.store.memory import MemoryStore
from kdn.store.streaming import Ask, Collected, FrameReader
from tests.node.harness import config_for, running
from tests.store.contract import closing, content, put

ETAG = b"e" * 16
ASKS = [Ask(b"one", 10, 40, ETAG), Ask(b"two", 0, 5, ETAG), Ask(b"one", 0, 3, ETAG)]


def frame(number: int, start: int, data: bytes, **fields: object) -> bytes:
    usual = {
        "number": number, "status": 200, "key": ASKS[number % 3].key, "etag": ETAG, "start": start,
        "parent": b"p", "object_bytes": 100, "length": len(data),
        "checksum": xxh3_64_intdigest(data),
    }  # fmt: skip
    return pack(Frame(**{**usual, **fields})) + data  # type: ignore[arg-type]


BODY = (
    frame(0, 10, b"a" * 20, last=False)
    + frame(0, 30, b"b" * 10)
    + frame(1, 0, b"", status=MISS, etag=b"")
    + frame(2, 0, b"xyz")
)


class Kept(Collected):
    """With what is gone, and memory in small pieces."""

    def __init__(self, num_asks: int, piece_bytes: int = 1 << 20) -> None:
        super().__init__(num_asks)
        self.lost: set[int] = set()
        self.starts: list[int] = []
        self._piece_bytes = piece_bytes

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        self.starts.append(start)
        return super().room(number, start, min(num_bytes, self._piece_bytes))

    def gone(self, number: int) -> None:
        self.lost.add(number)

    def all(self) -> dict[int, bytes | None]:
        return {i: None if i in self.lost else data for i, data in enumerate(self.found)}


def received(body: bytes, sizes: Sequence[int], rng: Random, kept: Kept) -> FrameReader:
    """As from a socket: as much as there is room for, or less."""
    reader = FrameReader(ASKS, kept)
    while body:
        room = reader.room()[: rng.choice(sizes)]
        size = min(len(room), len(body))
        room[:size] = body[:size]
        reader.filled(size)
        body = body[size:]
    return reader


@pytest.mark.parametrize("seed", range(40))
def test_a_body_cut_anywhere(seed: int) -> None:
    rng, kept = Random(seed), Kept(3, piece_bytes=1 + seed)
    if seed % 2:
        reader = received(BODY, [1, 2, 7, 55, 56, 57, 200], rng, kept)
    else:
        reader, rest = FrameReader(ASKS, kept), BODY
        while rest:
            size = rng.choice([1, 2, 7, 55, 56, 57, 200])
            reader.feed(rest[:size])
            rest = rest[size:]
    reader.finish()
    assert kept.all() == {0: b"a" * 20 + b"b" * 10, 1: None, 2: b"xyz"}


def test_data_comes_before_its_frame_is_complete() -> None:
    kept = Kept(3)
    start = len(frame(0, 10, b"")) + 4
    FrameReader(ASKS, kept).feed(frame(0, 10, b"a" * 30)[:start])
    assert kept.found[0] == b"aaaa"
    assert kept.starts == [10]


@pytest.mark.parametrize("direct", [False, True])
def test_padding_is_skipped(direct: bool) -> None:
    body = frame(0, 10, b"a" * 20, last=False) + frame(0, 30, bytes(10), status=GONE)
    kept = Kept(3)
    if direct:
        received(body, [3, 1000], Random(1), kept)
    else:
        FrameReader(ASKS, kept).feed(body)
    assert (kept.found[0], kept.lost) == (b"a" * 20, {0})


def test_an_end_that_comes_too_soon() -> None:
    reader = FrameReader(ASKS, Kept(3))
    reader.feed(BODY[:-100])
    with pytest.raises(TruncatedError):
        reader.finish()


WRONG = {
    "another span": frame(1, 10, b"data"),
    "another key": frame(0, 10, b"data", key=b"two"),
    "another stream": frame(0, 10, b"data", etag=b"f" * 16),
    "a gap": frame(0, 11, b"data"),
    "too much": frame(0, 10, b"d" * 31),
    "a damaged head": b"KDNF" + frame(0, 10, b"data")[4:20] + b"?" + frame(0, 10, b"data")[21:],
    "no frame": b"HTTP" * 100,
    "after the last span": BODY + frame(3, 0, b"data"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_frames_are_named_errors(name: str) -> None:
    with pytest.raises(FormatError):
        FrameReader(ASKS, Kept(3)).feed(WRONG[name])


def test_a_node_whose_store_failed() -> None:
    with pytest.raises(StoreError):
        FrameReader(ASKS, Kept(3)).feed(frame(0, 10, b"", status=FAILED))


async def read(store: Store, asks: list[Ask]) -> dict[int, bytes | None]:
    kept = Kept(len(asks))
    await store.read_into(asks, kept)
    return kept.all()


async def pieces_of(store: Store, asks: list[Ask]) -> dict[int, bytes | None]:
    found: dict[int, bytes | None] = {}
    async with aclosing(store.read_spans(asks)) as pieces:
        async for number, _, data in pieces:
            found[number] = None if data is None else (found.get(number) or b"") + bytes(data)
    return found


@pytest.mark.parametrize("kind", ["memory", "node"])
def test_from_stores(kind: str, tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        data = content("large", (3 << 20) + 17)
        large = (await put(store, b"large", data)).etag
        small = (await put(store, b"small", b"0123456789")).etag
        asks = [
            Ask(b"large", 5, len(data), large), Ask(b"small", 2, 4, small),
            Ask(b"small", 0, 4, large), Ask(b"none", 0, 4, large), Ask(b"small", 0, 1, small),
        ]  # fmt: skip
        expected = {0: data[5:], 1: b"23", 2: None, 3: None, 4: b"0"}
        assert await read(store, asks) == expected
        assert await pieces_of(store, asks) == expected

    async def test() -> None:
        if kind == "memory":
            await check(MemoryStore(2**24, open_policy("lru")))
            return
        async with running(config_for(tmp_path)) as node, closing(HttpStore(node.url)) as store:
            await check(store)
            assert await read(store, [Ask(b"large", 0, 1 << 20, b"?" * 16)]) == {0: None}

    asyncio.run(test())


def test_nobody_there_is_a_named_error() -> None:
    async def test() -> None:
        async with closing(HttpStore("http://127.0.0.1:1")) as store:
            with pytest.raises(KdnError):
                await read(store, ASKS)

    asyncio.run(test())
