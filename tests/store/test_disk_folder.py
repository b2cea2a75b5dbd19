"""The disk store's folder: healing of the index, damaged files. Faults are in test_faults.py."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing as closing_now
from pathlib import Path

import pytest

from kdn.store.base import Entry, Hints
from kdn.store.disk import footprint_bytes
from kdn.store.disk_folder import MAX_DAMAGED
from kdn.store.disk_format import BLOCK_BYTES, encode_header, header_bytes
from kdn.store.disk_index import row_of
from kdn.store.disk_reading import file_name
from tests.store.contract import closing, content, etag_of, listed, put, read
from tests.store.disks import KEYS, fill, objects, opened, rows
from tests.store.ledger import check_agreement


def _lose(folder: Path) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()


def _spoil(folder: Path) -> None:
    (folder / "index.sqlite").write_bytes(content("no database", 9000))


def _tear(folder: Path) -> None:
    """Good enough to open, not to read."""
    path = folder / "index.sqlite"
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes(len(data) - 100))


def _outdate(folder: Path) -> None:
    with closing_now(sqlite3.connect(folder / "index.sqlite")) as index:
        index.execute("PRAGMA user_version=99")


def _retype(folder: Path) -> None:
    with closing_now(sqlite3.connect(folder / "index.sqlite")) as index, index:
        index.execute(
            "UPDATE objects SET etag = 'text', size_bytes = 'large' WHERE key = ?", (b"3",)
        )


@pytest.mark.parametrize("damage", [_lose, _spoil, _tear, _outdate, _retype])
def test_a_lost_or_damaged_index_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    fill(tmp_path, KEYS)
    before = rows(tmp_path)
    damage(tmp_path)

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            assert await listed(store) == KEYS
            found = await store.lookup(KEYS)
            assert [entry and entry.hints for entry in found] == [Hints(b"parent", 0.5)] * 10
            for key in KEYS:
                assert await read(store, key) == content(key, 3000)
            assert (await store.stats()).corruptions == 0

    asyncio.run(work())
    assert rows(tmp_path) == before


def test_rows_without_files_and_files_without_rows(tmp_path: Path) -> None:
    fill(tmp_path, KEYS)
    paths = objects(tmp_path)
    paths[b"3"].unlink()
    (tmp_path / "objects" / "7.part").write_bytes(b"half an object")
    twin = content("another five", 100)
    entry = Entry(b"5", etag_of(twin), 100)
    (tmp_path / "objects" / file_name(entry)).write_bytes(encode_header(entry, twin) + twin)
    with closing_now(sqlite3.connect(tmp_path / "index.sqlite")) as index, index:
        index.execute("DELETE FROM objects WHERE key = ?", (b"4",))

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            assert await listed(store) == [key for key in KEYS if key != b"3"]
            assert await read(store, b"4") == content(b"4", 3000)
            assert await read(store, b"5") == content(b"5", 3000)
            assert (await store.stats()).corruptions == 0

    asyncio.run(work())
    check_agreement(tmp_path)


def test_a_row_of_an_earlier_object_is_not_believed(tmp_path: Path) -> None:
    """As after a power loss: the key was deleted and put again, the index lost both."""
    fill(tmp_path, KEYS)
    objects(tmp_path)[b"5"].unlink()
    new = content("new five", 200)
    entry = Entry(b"5", etag_of(new), 200)
    (tmp_path / "objects" / file_name(entry)).write_bytes(encode_header(entry, new) + new)

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            assert await store.lookup([b"5"]) == [entry]
            assert await read(store, b"5") == new

    asyncio.run(work())
    check_agreement(tmp_path)


def test_a_wrong_row_is_corrected_from_the_file(tmp_path: Path) -> None:
    fill(tmp_path, KEYS)
    with closing_now(sqlite3.connect(tmp_path / "index.sqlite")) as index, index:
        index.execute("UPDATE objects SET size_bytes = 99999 WHERE key = ?", (b"5",))

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            span = await store.get(b"5")
            assert span is not None
            assert (span.entry.size_bytes, bytes(span.data)) == (3000, content(b"5", 3000))
            assert (await store.stats()).size_bytes == 10 * footprint_bytes(row_of(span.entry, 0))

    asyncio.run(work())
    assert {size for _, _, size in rows(tmp_path)} == {3000}


# damage

SIZE = 3 * BLOCK_BYTES + 10
HEADER_BYTES = header_bytes(SIZE, len(b"0") + 16 + len(b"parent"))


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "offset", [*range(0, HEADER_BYTES, 7), HEADER_BYTES, HEADER_BYTES + 99, -1]
)
def test_a_damaged_file_is_a_miss_counted_once_and_set_aside(tmp_path: Path, offset: int) -> None:
    fill(tmp_path, [b"0", b"1"], SIZE)
    path = objects(tmp_path)[b"0"]
    _flip(path, offset)

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            spans = await asyncio.gather(*(store.get(b"0") for _ in range(8)))
            assert spans == [None] * 8
            assert await store.lookup([b"0"]) == [None]
            stats = await store.stats()
            assert (stats.corruptions, stats.objects, stats.misses) == (1, 1, 8)
            assert os.listdir(tmp_path / "damaged") == [path.name]
            assert await read(store, b"1") == content(b"1", SIZE)
            await put(store, b"0", content(b"0", SIZE))
            assert await read(store, b"0") == content(b"0", SIZE)

    asyncio.run(work())
    check_agreement(tmp_path)


def test_a_range_is_served_if_its_own_blocks_are_sound(tmp_path: Path) -> None:
    """And every byte that is served was verified: a range reads only the blocks it touches."""
    fill(tmp_path, [b"0"], SIZE)
    _flip(objects(tmp_path)[b"0"], HEADER_BYTES + BLOCK_BYTES + 5)

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            span = await store.get(b"0", 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 9)
            assert span is not None
            expected = content(b"0", SIZE)[2 * BLOCK_BYTES : 2 * BLOCK_BYTES + 9]
            assert bytes(span.data) == expected
            # The flipped byte itself is not asked for, but its block would have been served.
            assert await store.get(b"0", BLOCK_BYTES + 6, BLOCK_BYTES + 9) is None
            assert (await store.stats()).corruptions == 1

    asyncio.run(work())


@pytest.mark.parametrize("length", [0, 1, 39, 40, HEADER_BYTES - 1, HEADER_BYTES, SIZE])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_truncated_file_is_never_served(tmp_path: Path, length: int, with_index: bool) -> None:
    fill(tmp_path, [b"0"], SIZE)
    path = objects(tmp_path)[b"0"]
    path.write_bytes(path.read_bytes()[:length])
    if not with_index:
        _lose(tmp_path)

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            assert await store.get(b"0", 0, 1) is None
            assert await store.lookup([b"0"], head_bytes=10) == [None]
            assert (await store.stats()).corruptions == 1

    asyncio.run(work())
    check_agreement(tmp_path)


def test_a_file_under_another_name_is_not_served(tmp_path: Path) -> None:
    fill(tmp_path, [b"0", b"1"])
    paths = objects(tmp_path)
    paths[b"1"].write_bytes(paths[b"0"].read_bytes())

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            assert await store.get(b"1") is None
            assert await read(store, b"0") == content(b"0", 3000)

    asyncio.run(work())


def test_a_file_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            await put(store, b"0", content(b"0", 3000))
            objects(tmp_path)[b"0"].unlink()
            assert await store.lookup([b"0"], head_bytes=1) == [None]
            assert (await store.stats()).objects == 0
            await put(store, b"0", content(b"0", 3000))
            assert await read(store, b"0") == content(b"0", 3000)

    asyncio.run(work())


def test_damaged_files_are_set_aside_and_bounded(tmp_path: Path) -> None:
    fill(tmp_path, [b"0"])
    for i in range(MAX_DAMAGED + 10):
        (tmp_path / "objects" / f"{i:02x}-00").write_bytes(b"what is this")

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            assert await listed(store) == [b"0"]

    asyncio.run(work())
    check_agreement(tmp_path)
    assert len(os.listdir(tmp_path / "damaged")) == MAX_DAMAGED


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """Neither moved, nor deleted, nor counted as damage, in any of the folders."""
    fill(tmp_path, [b"0"])
    theirs = [tmp_path / place for place in ("objects/film.part", "objects/thesis", "damaged/all")]
    for path in theirs:
        path.write_bytes(b"not ours")
    for i in range(MAX_DAMAGED):
        (tmp_path / "objects" / f"{i:02x}-00").write_bytes(b"what is this")

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            assert await listed(store) == [b"0"]
            assert (await store.stats()).corruptions == MAX_DAMAGED

    asyncio.run(work())
    assert [path.read_bytes() for path in theirs] == [b"not ours"] * 3


def test_deleting_removes_damaged_copies_too(tmp_path: Path) -> None:
    fill(tmp_path, [b"0", b"1"])
    for path in objects(tmp_path).values():
        _flip(path, -1)

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            assert [await read(store, key) for key in (b"0", b"1")] == [None, None]
            await store.delete(b"0")
            [name] = os.listdir(tmp_path / "damaged")
            assert name.startswith(b"1".hex())

    asyncio.run(work())
