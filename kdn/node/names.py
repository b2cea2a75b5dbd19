"""Names: mutable, versioned pointers to manifests, in one SQLite file.

Every update is one transaction in WAL mode with full syncing: after a crash a name has its old
version or its new one, and an acknowledged one is never lost. SQLite works in one thread of its
own, so transactions are one after the other and the event loop never waits for the disk. Manifests
hold texts, as token ids: nobody but the owner of the file may read it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from kdn.errors import NoSpaceError, StoreError
from kdn.files import FOLDER_MODE, private_database

MAX_VERSIONS = 100
MAX_PENDING = 256
BUSY_S = 10.0
Result = TypeVar("Result")
Must = Callable[[str | None], bool]
"""Whether an update may happen, given the newest version's etag (None: there is no version)."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    tenant TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
    etag TEXT NOT NULL, created_s REAL NOT NULL, manifest BLOB NOT NULL,
    PRIMARY KEY (tenant, name, version));
CREATE TABLE IF NOT EXISTS uses (
    tenant TEXT NOT NULL, chunk BLOB NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (tenant, chunk, name, version)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS uses_of_version ON uses (tenant, name, version);
"""
_COLUMNS = "name, version, etag, created_s, length(manifest)"
_NEWEST = (
    "version = (SELECT max(version) FROM versions AS v "
    "WHERE v.tenant = versions.tenant AND v.name = versions.name)"
)


@dataclass(frozen=True)
class Version:
    """One version of a name, without its manifest."""

    name: str
    version: int
    etag: str
    created_s: float
    size_bytes: int


class ConditionError(Exception):
    """The condition does not hold; `newest` is the etag that is there."""

    def __init__(self, newest: str | None):
        super().__init__(newest)
        self.newest = newest


class NameStore:
    """All tenants' names. Methods may be called from many tasks of one event loop."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kdn-names")
        self._pending = asyncio.Semaphore(MAX_PENDING)
        self.changes = asyncio.Lock()
        """Guards deleting a name together with its chunks against every other change."""
        try:
            self._db = self._thread.submit(_open, path).result(BUSY_S)
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise StoreError(f"names in {path}: {error}") from error

    async def get(
        self, tenant: str, name: str, version: int | None = None
    ) -> tuple[Version, bytes] | None:
        """The newest version, or that one, and its manifest."""
        which = _NEWEST if version is None else "version = ?"
        query = (
            f"SELECT {_COLUMNS}, manifest FROM versions WHERE tenant = ? AND name = ? AND {which}"
        )
        values = (tenant, name) if version is None else (tenant, name, version)
        row = await self._run(lambda db: db.execute(query, values).fetchone())
        return None if row is None else (Version(*row[:5]), row[5])

    async def put(
        self, tenant: str, name: str, manifest: bytes, chunks: Iterable[bytes], must: Must
    ) -> Version:
        """Make the next version. ConditionError if `must` does not hold of the newest."""
        created_s = self._clock()

        def update(db: sqlite3.Connection) -> Version:
            newest, etag = _newest(db, tenant, name)
            if not must(etag):
                raise ConditionError(etag)
            made = _make_version(name, newest + 1, created_s, manifest)
            db.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?)",
                (tenant, name, made.version, made.etag, created_s, manifest),
            )
            db.executemany(
                "INSERT OR IGNORE INTO uses VALUES (?, ?, ?, ?)",
                ((tenant, chunk, name, made.version) for chunk in chunks),
            )
            _forget(db, tenant, name, made.version - MAX_VERSIONS)
            return made

        return await self._run(update)

    async def delete(self, tenant: str, name: str, must: Must) -> bool:
        """Forget a name and all its versions; False if there is none."""

        def update(db: sqlite3.Connection) -> bool:
            newest, etag = _newest(db, tenant, name)
            if etag is None:
                return False
            if not must(etag):
                raise ConditionError(etag)
            _forget(db, tenant, name, newest)
            return True

        return await self._run(update)

    async def history(self, tenant: str, name: str) -> list[Version]:
        """Newest first."""
        query = (
            f"SELECT {_COLUMNS} FROM versions WHERE tenant = ? AND name = ? ORDER BY version DESC"
        )
        rows = await self._run(lambda db: db.execute(query, (tenant, name)).fetchall())
        return [Version(*row) for row in rows]

    async def page(self, tenant: str, prefix: str, after: str, limit: int) -> list[Version]:
        """Newest versions of the names that begin so and come after that one, in order."""
        query = (
            f"SELECT {_COLUMNS} FROM versions WHERE tenant = ? AND name > ? "
            f"AND substr(name, 1, ?) = ? AND {_NEWEST} ORDER BY name LIMIT ?"
        )
        values = (tenant, after, len(prefix), prefix, limit)
        rows = await self._run(lambda db: db.execute(query, values).fetchall())
        return [Version(*row) for row in rows]

    async def chunks_of(self, tenant: str, name: str) -> tuple[list[bytes], list[bytes]]:
        """Chunks that any version of it uses: (by this name only, by others as well)."""
        query = (
            "SELECT DISTINCT chunk, EXISTS (SELECT 1 FROM uses AS o WHERE o.tenant = uses.tenant "
            "AND o.chunk = uses.chunk AND o.name != uses.name) FROM uses "
            "WHERE tenant = ? AND name = ? ORDER BY chunk"
        )
        rows = await self._run(lambda db: db.execute(query, (tenant, name)).fetchall())
        return [c for c, shared in rows if not shared], [c for c, shared in rows if shared]

    async def newest_chunks(self, tenant: str) -> dict[str, list[bytes]]:
        """Name to the chunks that its newest version uses."""
        query = (
            "SELECT name, chunk FROM uses WHERE tenant = ? AND version = (SELECT max(version) "
            "FROM versions AS v WHERE v.tenant = uses.tenant AND v.name = uses.name)"
        )
        rows = await self._run(lambda db: db.execute(query, (tenant,)).fetchall())
        found: dict[str, list[bytes]] = {}
        for name, chunk in rows:
            found.setdefault(name, []).append(chunk)
        return found

    async def size_bytes(self, tenant: str) -> int:
        """Of all manifests."""
        query = "SELECT coalesce(sum(length(manifest)), 0) FROM versions WHERE tenant = ?"
        row = await self._run(lambda db: db.execute(query, (tenant,)).fetchone())
        return int(row[0])

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """`work` as one transaction in the thread."""

        def transaction() -> Result:
            try:
                with self._db:
                    self._db.execute("BEGIN IMMEDIATE")
                    return work(self._db)
            except sqlite3.Error as error:
                full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
                raise (NoSpaceError if full else StoreError)(f"names: {error}") from error

        async with self._pending:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    private_database(path)
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA secure_delete = ON")  # a deleted manifest is gone from the file, too
    db.executescript(_SCHEMA)
    return db


def _newest(db: sqlite3.Connection, tenant: str, name: str) -> tuple[int, str | None]:
    query = "SELECT version, etag FROM versions WHERE tenant = ? AND name = ? ORDER BY version DESC"
    row = db.execute(query + " LIMIT 1", (tenant, name)).fetchone()
    return row or (0, None)


def _make_version(name: str, version: int, created_s: float, manifest: bytes) -> Version:
    """The etag covers version and time, so going back to old contents is a new etag."""
    digest = blake2b(manifest, digest_size=16, salt=version.to_bytes(16, "little"))
    digest.update(repr(created_s).encode())
    return Version(name, version, digest.hexdigest(), created_s, len(manifest))


def _forget(db: sqlite3.Connection, tenant: str, name: str, up_to_version: int) -> None:
    for table in ("uses", "versions"):
        db.execute(
            f"DELETE FROM {table} WHERE tenant = ? AND name = ? AND version <= ?",
            (tenant, name, up_to_version),
        )
