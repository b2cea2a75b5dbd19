"""Spans as pieces: from frames cut anywhere, from any store, and from a real node."""

from __future__ import annotations

import asyncio
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
from kdn.store.streaming import Ask, FrameSplitter, Piece
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


def joined(pieces: list[Piece]) -> dict[int, bytes | None]:
    found: dict[int, bytes | None] = {}
    for piece in pieces:
        before = found.get(piece.number) or b""
        found[piece.number] = None if piece.data is None else before + bytes(piece.data)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_body_cut_anywhere(seed: int) -> None:
    rng, splitter, pieces, rest = Random(seed), FrameSplitter(ASKS), list[Piece](), BODY
    while rest:
        size = rng.choice([1, 2, 7, 55, 56, 57, 200])
        pieces += splitter.feed(rest[:size])
        rest = rest[size:]
    splitter.finish()
    assert joined(pieces) == {0: b"a" * 20 + b"b" * 10, 1: None, 2: b"xyz"}


def test_data_comes_before_its_frame_is_complete() -> None:
    splitter = FrameSplitter(ASKS)
    start = len(frame(0, 10, b"")) + 4
    [piece] = splitter.feed(frame(0, 10, b"a" * 30)[:start])
    assert piece == Piece(0, 10, b"aaaa")


def test_padding_is_skipped() -> None:
    body = frame(0, 10, b"a" * 20, last=False) + frame(0, 30, bytes(10), status=GONE)
    pieces = list(FrameSplitter(ASKS).feed(body))
    assert [piece.data is None for piece in pieces] == [False, True]


def test_an_end_that_comes_too_soon() -> None:
    splitter = FrameSplitter(ASKS)
    list(splitter.feed(BODY[:-100]))
    with pytest.raises(TruncatedError):
        splitter.finish()


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
        list(FrameSplitter(ASKS).feed(WRONG[name]))


def test_a_node_whose_store_failed() -> None:
    with pytest.raises(StoreError):
        list(FrameSplitter(ASKS).feed(frame(0, 10, b"", status=FAILED)))


async def pieces_of(store: Store, asks: list[Ask]) -> list[Piece]:
    async with aclosing(store.read_spans(asks)) as pieces:
        return [piece async for piece in pieces]


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
        found = joined(await pieces_of(store, asks))
        assert found == {0: data[5:], 1: b"23", 2: None, 3: None, 4: b"0"}

    async def test() -> None:
        if kind == "memory":
            await check(MemoryStore(2**24, open_policy("lru")))
            return
        async with running(config_for(tmp_path)) as node, closing(HttpStore(node.url)) as store:
            await check(store)
            pieces = store.read_spans([Ask(b"large", 0, 1 << 20, b"?" * 16)])
            assert (await anext(pieces)).data is None
            await pieces.aclose()

    asyncio.run(test())


def test_nobody_there_is_a_named_error() -> None:
    async def test() -> None:
        async with closing(HttpStore("http://127.0.0.1:1")) as store:
            with pytest.raises(KdnError):
                await pieces_of(store, ASKS)

    asyncio.run(test())
