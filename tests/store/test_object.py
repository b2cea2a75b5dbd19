"""Objects in buckets: the contract over every kind. What goes wrong is `test_object_faults.py`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kdn.bench.s3_servers import S3Server
from kdn.store.base import Store
from tests.store.contract import StoreContract, closing

pytest.importorskip("obstore")

from obstore.store import MemoryStore as MemoryBucket

from kdn.store.object import ObjectStore, open_object_store
from kdn.store.object_bucket import Bucket


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
