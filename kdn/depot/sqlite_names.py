"""Names in one SQLite file.

Transactions are in WAL mode with full syncing. SQLite works in one thread of its own, so
transactions are one after the other and the event loop never waits for the disk. Of each tenant a
few wait at a time: many questions of one do not keep another's from being next. Manifests hold
texts, as token ids: nobody but the owner of the file may read it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kdn.depot.names import (
    MAX_CHANGES,
    MAX_VERSIONS,
    UNCHANGED,
    Change,
    Must,
    NameStore,
    Totals,
    Version,
    beyond,
    check_known,
    make_version,
)
from kdn.errors import ConditionError, NoSpaceError, QuotaError, StoreError
from kdn.files import FOLDER_MODE, private_database

MAX_PENDING = 4
"""Transactions of one tenant that wait for the thread."""
BUSY_S = 10.0
PAGE = 1000
Result = TypeVar("Result")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    tenant TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
    etag TEXT NOT NULL, created_s REAL NOT NULL, manifest BLOB NOT NULL,
    PRIMARY KEY (tenant, name, version));
CREATE TABLE IF NOT EXISTS uses (
    tenant TEXT NOT NULL, chunk BLOB NOT NULL, name TEXT NOT NULL, last_version INTEGER NOT NULL,
    PRIMARY KEY (tenant, chunk, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS uses_of_name ON uses (tenant, name, last_version);
CREATE TABLE IF NOT EXISTS totals (
    tenant TEXT PRIMARY KEY, names INTEGER DEFAULT 0, size_bytes INTEGER DEFAULT 0,
    chunks INTEGER DEFAULT 0) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, name TEXT NOT NULL,
    version INTEGER NOT NULL, etag TEXT);
CREATE TABLE IF NOT EXISTS last_changes (
    tenant TEXT PRIMARY KEY, sequence INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS feed (id INTEGER PRIMARY KEY CHECK (id = 0), first INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS version_made AFTER INSERT ON versions BEGIN
    UPDATE totals SET size_bytes = size_bytes + length(NEW.manifest) WHERE tenant = NEW.tenant; END;
CREATE TRIGGER IF NOT EXISTS version_gone AFTER DELETE ON versions BEGIN
    UPDATE totals SET size_bytes = size_bytes - length(OLD.manifest) WHERE tenant = OLD.tenant; END;
CREATE TRIGGER IF NOT EXISTS use_made AFTER INSERT ON uses BEGIN
    UPDATE totals SET chunks = chunks + 1 WHERE tenant = NEW.tenant; END;
CREATE TRIGGER IF NOT EXISTS use_gone AFTER DELETE ON uses BEGIN
    UPDATE totals SET chunks = chunks - 1 WHERE tenant = OLD.tenant; END;
"""
_FEED = ""
"""Who reads the feed: a tenant of its own, no tenant's name."""
_COLUMNS = "name, version, etag, created_s, length(manifest)"
_NEWEST = (
    "version = (SELECT max(version) FROM versions AS v "
    "WHERE v.tenant = versions.tenant AND v.name = versions.name)"
)


class SqliteNames(NameStore):
    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kdn-names")
        self._pending: dict[str, asyncio.Semaphore] = {}  # by tenant: there are few
        try:
            self._db = self._thread.submit(_open, path).result(BUSY_S)
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise StoreError(f"names in {path}: {error}") from error

    async def find(self, tenant: str, name: str, version: int | None = None) -> Version | None:
        which = _NEWEST if version is None else "version = ?"
        query = f"SELECT {_COLUMNS} FROM versions WHERE tenant = ? AND name = ? AND {which}"
        values = (tenant, name) if version is None else (tenant, name, version)
        rows = await self._rows(tenant, query, *values)
        return Version(*rows[0]) if rows else None

    async def manifest(self, tenant: str, about: Version) -> bytes | None:
        query = "SELECT manifest FROM versions WHERE tenant = ? AND name = ? AND etag = ?"
        rows = await self._rows(tenant, query, tenant, about.name, about.etag)
        return rows[0][0] if rows else None

    async def put(
        self,
        tenant: str,
        name: str,
        manifest: bytes,
        chunks: Iterable[bytes],
        must: Must,
        most: Totals | None = None,
    ) -> Version:
        created_s = self._clock()

        def update(db: sqlite3.Connection) -> Version:
            newest, etag = _newest(db, tenant, name)
            if not must(etag):
                raise ConditionError(etag)
            made = make_version(name, newest + 1, created_s, manifest)
            db.execute("INSERT OR IGNORE INTO totals (tenant) VALUES (?)", (tenant,))
            db.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?)",
                (tenant, name, made.version, made.etag, created_s, manifest),
            )
            db.executemany(
                "INSERT INTO uses VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
                "SET last_version = excluded.last_version",
                ((tenant, chunk, name, made.version) for chunk in chunks),
            )
            if etag is None:
                db.execute("UPDATE totals SET names = names + 1 WHERE tenant = ?", (tenant,))
            _forget(db, tenant, name, made.version - MAX_VERSIONS)
            if most is not None:
                _keep_within(db, tenant, made, most)
            _tell(db, tenant, name, made.version, made.etag)
            return made

        return await self._run(tenant, update)

    async def delete(self, tenant: str, name: str, must: Must) -> bool:

        def update(db: sqlite3.Connection) -> bool:
            newest, etag = _newest(db, tenant, name)
            if etag is None:
                return False
            if not must(etag):
                raise ConditionError(etag)
            _forget(db, tenant, name, newest)
            db.execute("UPDATE totals SET names = names - 1 WHERE tenant = ?", (tenant,))
            _tell(db, tenant, name, newest, None)
            return True

        return await self._run(tenant, update)

    async def history(self, tenant: str, name: str) -> list[Version]:
        query = (
            f"SELECT {_COLUMNS} FROM versions WHERE tenant = ? AND name = ? ORDER BY version DESC"
        )
        return [Version(*row) for row in await self._rows(tenant, query, tenant, name)]

    async def page(self, tenant: str, prefix: str, after: str, limit: int) -> list[Version]:
        query = (
            f"SELECT {_COLUMNS} FROM versions WHERE tenant = ? AND name > ? "
            f"AND substr(name, 1, ?) = ? AND {_NEWEST} ORDER BY name LIMIT ?"
        )
        rows = await self._rows(tenant, query, tenant, after, len(prefix), prefix, limit)
        return [Version(*row) for row in rows]

    async def chunks_of(self, tenant: str, name: str) -> tuple[list[bytes], list[bytes]]:
        query = (
            "SELECT chunk, EXISTS (SELECT 1 FROM uses AS o WHERE o.tenant = uses.tenant "
            "AND o.chunk = uses.chunk AND o.name != uses.name) FROM uses "
            "WHERE tenant = ? AND name = ? ORDER BY chunk"
        )
        rows = await self._rows(tenant, query, tenant, name)
        return [c for c, shared in rows if not shared], [c for c, shared in rows if shared]

    async def newest_chunks(self, tenant: str) -> AsyncIterator[tuple[str, list[bytes]]]:
        query = "SELECT chunk FROM uses WHERE tenant = ? AND name = ? AND last_version = ?"
        after = ""
        while page := await self.page(tenant, "", after, PAGE):
            for about in page:
                rows = await self._rows(tenant, query, tenant, about.name, about.version)
                yield about.name, [chunk for (chunk,) in rows]
            after = page[-1].name

    async def totals(self, tenant: str) -> Totals:
        return await self._run(tenant, lambda db: _totals(db, tenant))

    async def num_versions(self, tenant: str) -> int | None:
        query = "SELECT count(*) FROM versions WHERE tenant = ?"
        [(number,)] = await self._rows(tenant, query, tenant)
        return int(number)

    async def sequence(self) -> int:
        return await self._run(_FEED, lambda db: _known(db)[1])

    async def last_change(self, tenant: str) -> int:
        query = "SELECT sequence FROM last_changes WHERE tenant = ?"
        rows = await self._rows(tenant, query, tenant)
        return rows[0][0] if rows else UNCHANGED

    async def changes(self, after: int, limit: int) -> list[Change]:
        def read(db: sqlite3.Connection) -> list[Change]:
            check_known(after, *_known(db))
            query = "SELECT * FROM changes WHERE sequence > ? ORDER BY sequence LIMIT ?"
            return [Change(*row) for row in db.execute(query, (after, limit))]

        return await self._run(_FEED, read)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def _rows(self, tenant: str, query: str, *values: object) -> list[tuple[Any, ...]]:
        """All that a question finds."""
        return await self._run(tenant, lambda db: db.execute(query, values).fetchall())

    async def _run(self, tenant: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """`work` as one transaction in the thread."""

        def transaction() -> Result:
            try:
                with self._db:
                    self._db.execute("BEGIN IMMEDIATE")
                    return work(self._db)
            except sqlite3.Error as error:
                full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
                raise (NoSpaceError if full else StoreError)(f"names: {error}") from error

        async with self._pending.setdefault(tenant, asyncio.Semaphore(MAX_PENDING)):
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    private_database(path)
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA secure_delete = ON")  # a deleted manifest is gone from the file, too
    db.executescript(_SCHEMA)
    _begin_feed(db)
    return db


def _newest(db: sqlite3.Connection, tenant: str, name: str) -> tuple[int, str | None]:
    query = "SELECT version, etag FROM versions WHERE tenant = ? AND name = ? ORDER BY version DESC"
    row = db.execute(query + " LIMIT 1", (tenant, name)).fetchone()
    return row or (0, None)


def _begin_feed(db: sqlite3.Connection) -> None:
    """Once: of names that are there already nobody knows the changes."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        if db.execute("SELECT 1 FROM feed").fetchone() is None:
            now = time.time_ns() // 1000
            db.execute("INSERT INTO feed VALUES (0, ?)", (now,))
            db.execute("INSERT INTO sqlite_sequence VALUES ('changes', ?)", (now,))


def _known(db: sqlite3.Connection) -> tuple[int, int]:
    """The changes (first, last] are known."""
    query = "SELECT first, (SELECT seq FROM sqlite_sequence WHERE name = 'changes') FROM feed"
    first, last = db.execute(query).fetchone()
    return first, last


def _tell(db: sqlite3.Connection, tenant: str, name: str, version: int, etag: str | None) -> None:
    """A change, of which there are `MAX_CHANGES` at most."""
    change = db.execute(
        "INSERT INTO changes (tenant, name, version, etag) VALUES (?, ?, ?, ?)",
        (tenant, name, version, etag),
    )
    assert change.lastrowid is not None
    db.execute("REPLACE INTO last_changes VALUES (?, ?)", (tenant, change.lastrowid))
    forgotten = change.lastrowid - MAX_CHANGES
    if db.execute("DELETE FROM changes WHERE sequence <= ?", (forgotten,)).rowcount:
        db.execute("UPDATE feed SET first = ?", (forgotten,))


def _forget(db: sqlite3.Connection, tenant: str, name: str, up_to_version: int) -> None:
    for column in ("uses WHERE last_version", "versions WHERE version"):
        db.execute(
            f"DELETE FROM {column} <= ? AND tenant = ? AND name = ?", (up_to_version, tenant, name)
        )


def _keep_within(db: sqlite3.Connection, tenant: str, made: Version, most: Totals) -> None:
    """Forget versions before `made`, the oldest first, until the tenant has no more than `most`."""
    query = "SELECT min(version) FROM versions WHERE tenant = ? AND name = ?"
    while found := beyond(_totals(db, tenant), most):
        (oldest,) = db.execute(query, (tenant, made.name)).fetchone()
        if oldest == made.version:
            raise QuotaError(found)
        _forget(db, tenant, made.name, oldest)


def _totals(db: sqlite3.Connection, tenant: str) -> Totals:
    query = "SELECT names, size_bytes, chunks FROM totals WHERE tenant = ?"
    return Totals(*(db.execute(query, (tenant,)).fetchone() or (0, 0, 0)))
