"""A region fetches what is asked for, once, and keeps it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kdn.codec.header import Header
from kdn.errors import StoreError
from kdn.store.http import HttpStore
from kdn.store.streaming import Ask, Collected
from tests.node.harness import chunk_stream, key_of, run
from tests.region.regions import (
    centre_and_link,
    depot_of,
    forgive,
    region,
    sent,
    store_at,
    until,
    whole,
)


def drawn(seed: int, size_bytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(size_bytes)


async def put(store: HttpStore, number: int, data: bytes) -> None:
    kept = await store.put(
        key_of(number), data, etag=b"e%d" % number, checksum=xxh3_64_intdigest(data)
    )
    assert kept.etag == b"e%d" % number


async def read(store: HttpStore, number: int, start: int = 0, end: int | None = None) -> bytes:
    span = await store.get(key_of(number), start, end)
    assert span is not None
    return bytes(span.data)


def test_fifty_clients_of_one_document_cost_one_copy(tmp_path: Path) -> None:
    """Levels one after the other, as delivery asks for them, by all clients at once."""
    chunks = {n: chunk_stream(key_of(n), 60_000, seed=n) for n in range(24)}
    keys = [key_of(n) for n in chunks]

    async def client(url: str, seed: int) -> None:
        store, rng = HttpStore(url, collection="chunks"), random.Random(seed)
        try:
            entries = await store.lookup(keys, head_bytes=4096)
            assert all(entries)
            position = [0] * len(chunks)
            while any(at < len(chunks[n]) for n, at in enumerate(position)):
                step = rng.choice((9_000, 20_000, 64_000))
                asks = [
                    Ask(keys[n], at, min(at + step, len(chunks[n])), entries[n].etag)
                    for n, at in enumerate(position)
                    if at < len(chunks[n])
                ]
                got = Collected(len(asks))
                await store.read_into(asks, got)
                for ask, data in zip(asks, got.found, strict=True):
                    number = int.from_bytes(ask.key, "big")
                    assert data == chunks[number][ask.start : ask.end]
                    position[number] = ask.end
        finally:
            await store.close()

    async def work() -> None:
        async with centre_and_link(tmp_path / "centre") as (centre, link):
            async with store_at(centre, "chunks") as store:
                for n, stream in chunks.items():
                    etag = await centre_etag(store, n, stream)
                    assert etag
            async with region(tmp_path / "region", link) as node:
                before = link.down_bytes
                await asyncio.gather(*(client(node.url, seed) for seed in range(50)))
                total = sum(map(len, chunks.values()))
                assert total <= link.down_bytes - before <= 1.05 * total
                # Whole by now, so nothing more crosses the link, nor is it needed.
                link.cut()
                await client(node.url, 99)
            async with region(tmp_path / "region", link) as node:
                await client(node.url, 100)

    async def centre_etag(store: HttpStore, n: int, stream: bytes) -> bytes:
        from kdn.codec.format import Bitstream

        etag = Bitstream.parse(stream).stream_id
        kept = await store.put(key_of(n), stream, etag=etag, checksum=xxh3_64_intdigest(stream))
        return kept.etag

    run(work())


def test_only_what_is_missing_is_fetched(tmp_path: Path) -> None:
    data = drawn(1, 300_000)

    async def work() -> None:
        async with centre_and_link(tmp_path / "centre") as (centre, link):
            async with store_at(centre) as store:
                await put(store, 1, data)
            async with region(tmp_path / "region", link) as node, store_at(node) as store:
                puller = depot_of(node).region.puller
                assert await read(store, 1, 0, 100_000) == data[:100_000]
                assert puller.fetched_bytes == 100_000
                assert await read(store, 1, 50_000, 120_000) == data[50_000:120_000]
                assert puller.fetched_bytes == 120_000
            # Pieces survive a restart, and are enough while the link is cut.
            link.cut()
            async with region(tmp_path / "region", link) as node, store_at(node) as store:
                assert await read(store, 1, 10, 119_999) == data[10:119_999]
                with pytest.raises(StoreError):
                    await store.get(key_of(1), 0, 200_000)
                link.mend()
                forgive(node)
                assert await read(store, 1) == data
                assert depot_of(node).region.puller.fetched_bytes == 180_000

    run(work())


def test_a_damaged_piece_is_fetched_again(tmp_path: Path) -> None:
    data = drawn(2, 90_000)

    async def work() -> None:
        async with centre_and_link(tmp_path / "centre") as (centre, link):
            async with store_at(centre) as store:
                await put(store, 1, data)
            settings = {"memory_bytes": 0}
            async with region(tmp_path / "r", link, **settings) as node, store_at(node) as store:
                assert await store.get(key_of(1), 0, 40_000)
                puller = depot_of(node).region.puller
                await until(lambda: not puller._tasks)
            for path in (tmp_path / "r" / "objects").rglob("*"):
                if path.is_file() and path.stat().st_size > 40_000:
                    whole_file = bytearray(path.read_bytes())
                    whole_file[-100] ^= 1
                    path.write_bytes(whole_file)
                    break
            else:
                raise AssertionError("expected the file of a piece")
            async with region(tmp_path / "r", link, **settings) as node, store_at(node) as store:
                assert await read(store, 1, 0, 40_000) == data[:40_000]
                assert depot_of(node).region.puller.fetched_bytes == 40_000

    run(work())


def test_bytes_that_arrive_damaged_are_neither_served_nor_kept(tmp_path: Path) -> None:
    data = drawn(3, 50_000)

    async def work() -> None:
        async with centre_and_link(tmp_path / "centre") as (centre, link):
            async with store_at(centre) as store:
                await put(store, 1, data)
            async with region(tmp_path / "r", link) as node, store_at(node) as store:
                real = link._carry

                async def damaging(source, sink, is_down):  # type: ignore[no-untyped-def]
                    if not is_down:
                        await real(source, sink, is_down)
                    while is_down and (piece := await source.read(1 << 20)):
                        broken = bytearray(piece)
                        if len(broken) > 5000:
                            broken[-1] ^= 255
                        sink.write(broken)
                        await sink.drain()

                [entry] = await store.lookup([key_of(1)])
                assert entry is not None
                link.cut()
                link._is_cut = False
                link._carry = damaging  # type: ignore[method-assign]
                with pytest.raises(StoreError):
                    await store.get(key_of(1), 0, 40_000)
                link.cut()
                link._is_cut = False
                link._carry = real  # type: ignore[method-assign]
                forgive(node)
                assert await read(store, 1, 0, 40_000) == data[:40_000]

    run(work())


def test_what_the_centre_has_replaced_or_lost(tmp_path: Path) -> None:
    data = drawn(4, 80_000)

    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            store_at(centre) as there,
        ):
            await put(there, 1, data)
            async with region(tmp_path / "r", link) as node, store_at(node) as store:
                assert await store.get(key_of(1), 0, 20_000)
                other = drawn(5, 70_000)
                await there.put(
                    key_of(1), other, etag=b"other", checksum=xxh3_64_intdigest(other),
                    replacing=b"e1",
                )  # fmt: skip
                # The rest of it is gone, so it is: and whoever asks anew gets the other.
                assert await store.get(key_of(1), 20_000, etag=b"e1") is None
                assert await read(store, 1) == other

    run(work())


def test_what_the_centre_has_cut_or_made_whole(tmp_path: Path) -> None:
    """Of the same stream: its first levels, all of them, the first again."""
    stream = chunk_stream(key_of(1), 60_000)
    header = Header.parse(stream)
    short, etag = stream[: header.level_ends[1]], header.stream_id

    async def put_stream(store: HttpStore, data: bytes) -> None:
        checksum = xxh3_64_intdigest(data)
        kept = await store.put(key_of(1), data, etag=etag, checksum=checksum)
        assert kept.size_bytes == len(data)

    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            store_at(centre, "chunks") as there,
            region(tmp_path / "r", link) as node,
            store_at(node, "chunks") as here,
        ):
            await put_stream(there, stream)
            [entry] = await here.lookup([key_of(1)], head_bytes=400)
            assert entry is not None
            assert entry.size_bytes == len(stream)
            await there.delete(key_of(1))
            await put_stream(there, short)
            span = await here.get(key_of(1), 0, len(stream), etag=etag)
            assert span is None, "there is less than was told"
            [entry] = await here.lookup([key_of(1)], head_bytes=400)
            assert entry is not None
            assert entry.size_bytes == len(short)
            assert await read(here, 1) == short
            await put_stream(here, stream)
            await sent(node)
            assert await read(there, 1) == stream
            assert await read(here, 1) == stream

    run(work())


def test_a_replacement_goes_to_the_centre_and_to_what_is_here(tmp_path: Path) -> None:
    data, new = drawn(6, 30_000), drawn(7, 30_000)

    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link) as node,
            store_at(node) as store,
        ):
            await put(store, 1, data)
            kept = await store.put(
                key_of(1), new, etag=b"new", checksum=xxh3_64_intdigest(new), replacing=b"e1"
            )
            assert kept.etag == b"new"
            await sent(node)
            for at in (node, centre):
                async with store_at(at) as one:
                    assert await read(one, 1) == new

    run(work())


def test_deleting_reaches_the_centre(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link) as node,
            store_at(node) as store,
        ):
            await put(store, 1, drawn(8, 20_000))
            assert await store.delete(key_of(1))
            await sent(node)
            async with store_at(centre) as there:
                assert await there.lookup([key_of(1)]) == [None]
                await put(there, 2, drawn(9, 20_000))
            assert await store.get(key_of(2), 0, 1000)
            assert await store.delete(key_of(2))
            assert await store.lookup([key_of(1), key_of(2)]) == [None, None]
            link.cut()
            await put(store, 3, b"here")
            with pytest.raises(StoreError):  # it cannot be known to be gone
                await store.delete(key_of(3))

    run(work())


def test_a_region_without_a_disk_waits_for_the_centre(tmp_path: Path) -> None:
    async def work() -> None:
        async with whole_centre(tmp_path) as centre:
            async with region(tmp_path / "r", centre, disk_bytes=0) as node, store_at(node) as one:
                await put(one, 1, b"through")
                assert depot_of(node).region.outbox is None
            async with store_at(centre) as there:
                assert await there.get(key_of(1))

    def whole_centre(folder: Path):  # type: ignore[no-untyped-def]
        from tests.node.harness import config_for

        return whole(config_for(folder / "centre"))

    run(work())
