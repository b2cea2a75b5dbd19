"""Folders of disk stores, filled and looked into by tests."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing as closing_now
from pathlib import Path
from typing import Any

from kdn.store.base import Hints
from kdn.store.disk import DiskStore, open_disk
from kdn.store.evict import open_policy
from tests.store.contract import AMPLE_BYTES, closing, content, put

KEYS = [b"%d" % i for i in range(10)]


async def opened(folder: Path, capacity_bytes: int = AMPLE_BYTES, **options: Any) -> DiskStore:
    return await open_disk(folder, capacity_bytes, open_policy("lru"), **options)


def fill(folder: Path, keys: list[bytes], size: int = 3000) -> None:
    async def work() -> None:
        async with closing(await opened(folder)) as store:
            for key in keys:
                await put(store, key, content(key, size), Hints(b"parent", 0.5))

    asyncio.run(work())


def objects(folder: Path) -> dict[bytes, Path]:
    """Files by key."""
    paths = (folder / "objects").iterdir()
    return {bytes.fromhex(path.name.partition("-")[0]): path for path in paths}


def rows(folder: Path) -> set[tuple[bytes, bytes, int]]:
    with closing_now(sqlite3.connect(folder / "index.sqlite")) as index:
        return set(index.execute("SELECT key, etag, size_bytes FROM objects"))
