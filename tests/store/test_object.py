"""Objects in buckets: the contract over every kind. What goes wrong is `test_object_faults.py`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kdn.bench.s3_servers import S3Server
from kdn.store.base import Store
from kdn.store.streaming import Ask, Collected
from tests.store.contract import StoreContract, closing, content, put

pytest.importorskip("obstore")

from obstore.store import MemoryStore as MemoryBucket

from kdn.store.object import ObjectStore, open_object_store
from kdn.store.object_bucket import Bucket, Found


@pytest.fixture(autouse=True)
def _no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process goes on after each test: there is nothing to wait for."""
    monkeypatch.setattr("kdn.store.object_requests.LEAVE_S", 0)


class TestMemory(StoreContract):
    """obstore's own, which keeps to every condition."""

    evicts = False
    counts = False

    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        async with closing(ObjectStore(Bucket(MemoryBucket(), "memory"))) as store:
            yield store


class TestFile(StoreContract):
    evicts = False
    counts = False

    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        async with closing(open_object_store(f"file://{self.folder}/kdn")) as store:
            yield store


class S3Contract(StoreContract):
    evicts = False
    counts = False
    server: S3Server

    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        url = self.server.url(f"tests/{secrets.token_hex(8)}")
        async with closing(open_object_store(url)) as store:
            yield store


class TestMoto(S3Contract):
    @pytest.fixture(autouse=True)
    def _server(self, moto_s3: S3Server, s3_environment: None) -> None:
        self.server = moto_s3


class TestRclone(S3Contract):
    """It ignores conditions of puts and of gets."""

    @pytest.fixture(autouse=True)
    def _server(self, rclone_s3: S3Server, s3_environment: None) -> None:
        self.server = rclone_s3


class TestRcloneAsItIs(S3Contract):
    """It answers ranges with status 200, too."""

    @pytest.fixture(autouse=True)
    def _server(self, rclone_s3_as_it_is: S3Server, s3_environment: None) -> None:
        self.server = rclone_s3_as_it_is


def test_a_short_object_is_read_from_the_beginning_in_one_request() -> None:
    async def test() -> None:
        store = ObjectStore(Bucket(MemoryBucket(), "memory"))
        data = content("short", 5000)
        entry = await put(store, b"key", data)
        asked, get = [], store.bucket.get

        async def watched(path: str, start: int, end: int, **named: Any) -> Found | None:
            asked.append(start)
            return await get(path, start, end, **named)

        store.bucket.get = watched  # type: ignore[method-assign]
        for start, end in ((0, 5000), (1, 4999), (4000, 5000)):
            collected = Collected(1)
            await store.read_into([Ask(b"key", start, end, entry.etag)], collected)
            assert collected.found == [data[start:end]]
        assert asked == [0, 0, store.begins_at(b"key") + 4000]
        await store.close()

    asyncio.run(test())
