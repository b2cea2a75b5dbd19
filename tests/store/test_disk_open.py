"""What the system has in memory of a file is read at once, verified, and never of an old file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest as checksum_of

from kdn.store.base import Span
from kdn.store.disk import DiskStore, open_disk
from kdn.store.disk_files import RWF_NOWAIT, Files
from kdn.store.evict import open_policy
from tests.node.harness import run

pytestmark = pytest.mark.skipif(not RWF_NOWAIT, reason="the system has no RWF_NOWAIT")

DATA = os.urandom(300_000)


async def put(store: DiskStore, data: bytes, etag: bytes = b"e") -> None:
    await store.put(b"k", data, etag=etag, checksum=checksum_of(data))


async def read_now(store: DiskStore, start: int, end: int, etag: bytes = b"e") -> Span | None:
    """The second time at the latest, when its file is open."""
    for _ in range(50):
        span = store.get_now(b"k", start, end, etag)
        if span is not None:
            return span
        await asyncio.sleep(0.01)
    return None


def test_ranges_are_read_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        store = await open_disk(tmp_path / "d", 2**24, open_policy("lru"))
        await put(store, DATA)
        entry = store.peek(b"k")
        assert entry is not None
        assert (entry.etag, entry.size_bytes) == (b"e", len(DATA))
        assert store.get_now(b"k", 0, 10, b"e") is None  # a thread opens it first
        for start, end in ((0, 1), (65_535, 65_537), (100_000, 165_536), (299_999, 300_000)):
            span = await read_now(store, start, end)
            assert span is not None
            assert (span.start, bytes(span.data)) == (start, DATA[start:end])
        assert store.get_now(b"k", 0, 10, b"other") is None
        assert store.get_now(b"none", 0, 10, b"e") is None
        assert store.get_now(b"k", 0, 300_000, b"e") is None  # too much to do at once
        await store.close()

    run(work())


def test_what_is_changed_is_never_read_from_an_old_file(tmp_path: Path) -> None:
    """Not even under the same etag, nor if the old file was just being opened."""

    async def work() -> None:
        store = await open_disk(tmp_path / "d", 2**24, open_policy("lru"))
        for number in range(30):
            data = bytes([number]) * 1000
            await put(store, data)
            if number % 2:
                assert await read_now(store, 0, 1000) is not None
            else:
                assert store.get_now(b"k", 0, 1000, b"e") is None  # now it is being opened
            await store.delete(b"k")
            assert store.get_now(b"k", 0, 1000, b"e") is None
            assert store.peek(b"k") is None
            again = bytes([100 + number]) * 1000
            await put(store, again)
            span = await read_now(store, 0, 1000)
            assert span is not None
            assert bytes(span.data) == again
            await store.delete(b"k")
        await store.close()
        assert not any("/d/objects/" in os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files())

    run(work())


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def test_damage_is_never_returned(tmp_path: Path) -> None:
    async def work() -> None:
        store = await open_disk(tmp_path / "d", 2**24, open_policy("lru"))
        await put(store, DATA)
        assert await read_now(store, 0, 10) is not None
        [path] = (tmp_path / "d" / "objects").iterdir()
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(bytes([DATA[-1] ^ 1]))
        assert store.get_now(b"k", 299_990, 300_000, b"e") is None
        assert await store.get(b"k", 299_990, 300_000) is None
        assert (await store.stats()).corruptions == 1
        assert store.peek(b"k") is None
        await store.close()

    run(work())


def test_a_system_that_has_nothing_in_memory(tmp_path: Path) -> None:
    class Cold(Files):
        def read_now(self, fd: int, size_bytes: int, start: int) -> bytearray:
            raise BlockingIOError

    async def work() -> None:
        store = await open_disk(tmp_path / "d", 2**24, open_policy("lru"), files=Cold())
        await put(store, DATA)
        for _ in range(3):
            assert store.get_now(b"k", 0, 10, b"e") is None
            await asyncio.sleep(0.02)
        span = await store.get(b"k", 0, 10)
        assert span is not None
        assert bytes(span.data) == DATA[:10]
        await store.close()

    run(work())
