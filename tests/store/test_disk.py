"""The disk store: the contract, restarts, locking, deadlines, scale."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextlib import closing as closing_now
from pathlib import Path
from threading import Event

import pytest

from kdn.errors import NoSpaceError, StoreError
from kdn.store.base import Entry, Hints, Store
from kdn.store.disk import footprint_bytes, open_disk
from kdn.store.disk_files import Files
from kdn.store.disk_index import row_of
from kdn.store.disk_tasks import MAX_OPERATIONS
from kdn.store.evict import open_policy
from tests.store.contract import StoreContract, closing, content, etag_of, listed, put, read
from tests.store.disks import KEYS, fill, objects, opened
from tests.store.ledger import check_agreement


class TestDiskStore(StoreContract):
    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        async with closing(await opened(self.folder / "store", capacity_bytes)) as store:
            yield store


def test_survives_a_restart(tmp_path: Path) -> None:
    fill(tmp_path, KEYS)

    async def work() -> None:
        async with closing(await opened(tmp_path)) as store:
            found = await store.lookup(KEYS)
            assert [entry and entry.hints for entry in found] == [Hints(b"parent", 0.5)] * 10
            for key in KEYS:
                assert await read(store, key) == content(key, 3000)

    asyncio.run(work())
    check_agreement(tmp_path)


def test_remembers_the_order_of_use(tmp_path: Path) -> None:
    fill(tmp_path, KEYS)

    async def use() -> None:
        async with closing(await opened(tmp_path)) as store:
            for key in (b"3", b"0", b"3"):
                await store.get(key)

    async def shrink() -> None:
        entry = Entry(b"0", bytes(16), 3000, Hints(b"parent"))
        async with closing(await opened(tmp_path, 3 * footprint_bytes(row_of(entry, 0)))) as store:
            assert await listed(store) == [b"0", b"3", b"9"]
            assert (await store.stats()).evictions == 7

    asyncio.run(use())
    asyncio.run(shrink())
    check_agreement(tmp_path)


def test_a_use_counts_before_the_policy_knows_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdn.store.disk.SLICE_ROWS", 1)
    fill(tmp_path, KEYS)

    async def work() -> None:
        size_bytes = footprint_bytes((b"0", bytes(16), 3000, b"parent", 0.5, 0, b""))
        async with closing(await opened(tmp_path, 10 * size_bytes)) as store:
            await store.get(b"0")
            await put(store, b"new", content("new", 3000), Hints(b"parent"))
            assert await listed(store) == [b"0", *KEYS[2:], b"new"]

    asyncio.run(work())


# locking, deadlines, cancellation


def test_a_folder_is_open_only_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(await opened(tmp_path)):
            with pytest.raises(StoreError, match="open in another process"):
                await opened(tmp_path)
        await (await opened(tmp_path)).close()

    asyncio.run(work())


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot open"):
        asyncio.run(opened(tmp_path / "file" / "store"))


def test_nothing_works_after_close(tmp_path: Path) -> None:
    async def work() -> None:
        store = await opened(tmp_path)
        await put(store, b"0", b"data")
        await store.close()
        with pytest.raises(StoreError, match="closed"):
            await put(store, b"1", b"data")
        with pytest.raises(StoreError, match="closed"):
            await store.get(b"0")

    asyncio.run(work())


class SlowFiles(Files):
    """Syncs take a while."""

    delay_s = 0.3

    def sync(self, fd: int) -> None:
        time.sleep(self.delay_s)
        super().sync(fd)


async def read_in_time(store: Store, key: bytes) -> bytes | None:
    """None: it is not there, or a busy machine took too long."""
    try:
        return await read(store, key)
    except StoreError:
        return None


def test_a_slow_disk_meets_the_deadline_with_an_error_and_the_put_still_ends(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        store = await opened(tmp_path, files=SlowFiles(), deadline_s=0.1)
        with pytest.raises(StoreError, match=r"within 0\.1 s"):
            await put(store, b"0", b"data")
        async with asyncio.timeout(20):
            while await read_in_time(store, b"0") != b"data":
                await asyncio.sleep(0.05)
        await store.close()

    asyncio.run(work())
    check_agreement(tmp_path)


def test_a_cancelled_put_leaves_all_in_order(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(await opened(tmp_path, files=SlowFiles())) as store:
            writing = asyncio.create_task(put(store, b"0", b"data"))
            await asyncio.sleep(0.1)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            assert (await put(store, b"0", b"other")).etag == etag_of(b"data")
            late = asyncio.create_task(put(store, b"1", b"late"))
            await asyncio.sleep(0.1)
        assert (await late).size_bytes == 4  # close waited for it

    asyncio.run(work())
    check_agreement(tmp_path)
    assert set(objects(tmp_path)) == {b"0", b"1"}


def test_the_event_loop_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(await opened(tmp_path, files=SlowFiles())) as store:
            writing = asyncio.create_task(put(store, b"0", b"data"))
            rounds = 0
            while not writing.done():
                await asyncio.sleep(0.005)
                rounds += 1
            assert rounds > 10  # a loop that waits has one or two for each call to the disk

    asyncio.run(work())


def test_too_many_operations_are_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(await opened(tmp_path, files=SlowFiles(), threads=1)) as store:
            puts = [
                asyncio.create_task(put(store, b"same", b"data")) for _ in range(MAX_OPERATIONS + 6)
            ]
            results = await asyncio.gather(*puts, return_exceptions=True)
            refused = [result for result in results if isinstance(result, StoreError)]
            assert len(refused) in (6, 7)  # the policy may still be told what is here
            assert "overloaded" in str(refused[0])

    asyncio.run(work())


def test_held_objects_stay_and_newcomers_are_refused(tmp_path: Path) -> None:
    async def work() -> None:
        policy = open_policy("lru")
        policy.retain(b"name", [b"0", b"1"])
        size_bytes = footprint_bytes((b"0", bytes(16), 3000, None, 0, 0, b""))
        async with closing(await open_disk(tmp_path, 2 * size_bytes, policy)) as store:
            for key in (b"0", b"1"):
                await put(store, key, content(key, 3000))
            with pytest.raises(NoSpaceError):
                await put(store, b"2", content(b"2", 3000))
            assert await listed(store) == [b"0", b"1"]
        async with closing(await opened(tmp_path, 1)) as store:
            assert await listed(store) == []

    asyncio.run(work())
    check_agreement(tmp_path)


# scale


def test_opens_forty_thousand_objects_quickly(tmp_path: Path) -> None:
    """Healing included, without opening a single file. The files are links to one: only their
    names are looked at. It takes 0.3 s of a processor."""
    count = 40_000  # fewer than the links that a file may have
    fill(tmp_path, [b"template"], 100)
    [template] = objects(tmp_path).values()
    keys = [content(b"%d" % i, 16) for i in range(count)]
    etag = bytes(16)
    for key in keys:
        os.link(template, tmp_path / "objects" / f"{key.hex()}-{etag.hex()}")
    with closing_now(sqlite3.connect(tmp_path / "index.sqlite")) as index, index:
        index.executemany(
            "INSERT INTO objects VALUES (?, ?, 65536, ?, 0.5, ?, x'')",
            ((key, etag, keys[i - 1], i + 1) for i, key in enumerate(keys)),
        )

    async def work() -> None:
        start_s = time.process_time()
        store = await opened(tmp_path, 1 << 40)
        took_s = time.process_time() - start_s
        assert (await store.stats()).objects == count + 1
        await store.close()
        assert took_s < 1.5

    asyncio.run(work())


class GatedFiles(Files):
    """Lets nothing be synced until it is told to."""

    def __init__(self) -> None:
        self.gate = Event()
        self.gate.set()

    def sync(self, fd: int) -> None:
        assert self.gate.wait(20)
        super().sync(fd)


def test_a_replacement_and_an_eviction_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """There is room for one object. One that is being written is to be replaced and, by a put of
    another, to be evicted: the one holds the key and waits for room, the other has the room and
    waits for the key."""
    size = footprint_bytes(row_of(Entry(b"a", bytes(16), 3000), 0))

    async def work() -> None:
        files = GatedFiles()
        async with closing(await opened(tmp_path, size, files=files)) as store:
            files.gate.clear()
            old, new = content("old", 3000), content("new", 3000)
            puts = [asyncio.create_task(put(store, b"a", old))]
            await asyncio.sleep(0.05)
            puts.append(asyncio.create_task(put(store, b"a", new, replacing=etag_of(old))))
            await asyncio.sleep(0.05)
            puts.append(asyncio.create_task(put(store, b"b", content("b", 3000))))
            await asyncio.sleep(0.05)
            files.gate.set()
            async with asyncio.timeout(10):
                await asyncio.gather(*puts)
            assert len(await listed(store)) == 1
            assert await read(store, b"a") in (None, new)

    asyncio.run(work())
    check_agreement(tmp_path)


def test_a_replaced_object_does_not_come_back(tmp_path: Path) -> None:
    old, new = content("old", 3000), content("new", 2000)

    async def write() -> None:
        async with closing(await opened(tmp_path)) as store:
            await put(store, b"a", old)
            await put(store, b"a", new, replacing=etag_of(old))

    async def check() -> None:
        async with closing(await opened(tmp_path)) as store:
            assert await read(store, b"a") == new

    asyncio.run(write())
    assert len(objects(tmp_path)) == len(list((tmp_path / "objects").iterdir())) == 1
    (tmp_path / "index.sqlite").unlink()
    asyncio.run(check())
    check_agreement(tmp_path)
