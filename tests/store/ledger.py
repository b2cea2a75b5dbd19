"""What a tester remembers of a disk store, to judge what is found in it after a fault."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from kdn.store.base import Store
from kdn.store.disk_files import Files
from kdn.store.evict import LRU
from tests.store.contract import etag_of, listed, put, read


class Ledger:
    """`must` be here: acknowledged, and since then neither evicted nor deleted. `may` be here:
    begun but not acknowledged, or evicted. Whatever else is found is wrong."""

    def __init__(self) -> None:
        self.must: dict[bytes, bytes] = {}
        self.may: defaultdict[bytes, set[bytes]] = defaultdict(set)
        self.damaged: set[bytes] = set()

    async def put(self, store: Store, key: bytes, data: bytes) -> None:
        self.may[key].add(data)
        entry = await put(store, key, data)
        assert entry.size_bytes == len(data)
        self.must[key] = data

    async def replace(self, store: Store, key: bytes, data: bytes) -> None:
        old = self.must[key]
        self.lose(key)
        self.may[key].add(data)
        entry = await put(store, key, data, replacing=etag_of(old))
        assert entry.etag == etag_of(data)
        self.may[key] = {data}
        self.must[key] = data

    async def delete(self, store: Store, key: bytes) -> None:
        self.lose(key)
        assert await store.delete(key)
        self.may[key].clear()

    def lose(self, key: bytes) -> None:
        """It may go from now on."""
        if key in self.must:
            self.may[key].add(self.must.pop(key))

    async def check(self, store: Store) -> None:
        for key, data in self.must.items():
            assert await read(store, key) == data, f"{key!r} was acknowledged and is lost or wrong"
        for key in await listed(store):
            found = await read(store, key)
            allowed = {self.must[key]} if key in self.must else self.may[key]
            assert found in allowed or (found is None and key in self.damaged), f"{key!r} is wrong"
        stats = await store.stats()
        assert stats.objects == len(await listed(store))
        assert stats.size_bytes <= stats.capacity_bytes


class WatchedLRU(LRU):
    """Tells the ledger of every victim before it is evicted."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def victim(self) -> bytes | None:
        key = super().victim()
        if key is not None:
            self._ledger.lose(key)
        return key


def check_agreement(folder: Path, files: Files | None = None) -> None:
    """Index and files of a closed store say the same, and nothing is left over."""
    names = (files or Files()).list(folder / "objects")
    assert sorted(names) == index_names(folder)


def index_names(folder: Path) -> Sequence[str]:
    """The names of the files that the index expects."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as index:
        rows = index.execute("SELECT key, etag FROM objects").fetchall()
    return sorted(f"{key.hex()}-{etag.hex()}" for key, etag in rows)


def scratch_folder() -> Path | None:
    """Memory, where the system has some: thousands of small databases are made here."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else None
