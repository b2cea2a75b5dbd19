"""Objects in buckets: the contract over every kind, and what hostile ones may hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kdn.store.base import Store
from tests.store.contract import StoreContract, closing

pytest.importorskip("obstore")

from obstore.store import MemoryStore as MemoryBucket

from kdn.store.object import ObjectStore, open_object_store
from kdn.store.object_bucket import Bucket


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
