"""A region's copy of the centre's names, in one SQLite file.

Of every name the copy has the newest version's number and etag, as the feed told, and of those that
were asked for the manifest as well. What the feed told is in memory, too, and is answered from
there. SQLite works in a thread of its own. Nothing here is the only one of its kind: a copy that is
lost or damaged is made anew.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from kdn.depot.names import Version
from kdn.errors import StoreError
from kdn.files import FOLDER_MODE, private_database

BUSY_S = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS centre (url TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS feeds (
    tenant TEXT PRIMARY KEY, position INTEGER NOT NULL, heard_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS newest (
    tenant TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, etag TEXT NOT NULL,
    PRIMARY KEY (tenant, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS manifests (
    tenant TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, etag TEXT NOT NULL,
    manifest BLOB NOT NULL, PRIMARY KEY (tenant, name));
"""
Result = TypeVar("Result")


class Newest(NamedTuple):
    """A name's newest version; without an etag: there is none any more."""

    name: str
    version: int
    etag: str | None


@dataclass
class View:
    """What is known of one tenant's names."""

    position: int = 0
    """Of the feed."""
    heard_s: float = 0.0
    """When the centre was last heard of, in seconds since 1970."""
    names: dict[str, Newest] = field(default_factory=dict)
    held: dict[str, Version] = field(default_factory=dict)
    """Whose manifests are here."""


class NamesCopy:
    def __init__(self, path: Path, centre: str) -> None:
        """What was copied from another centre is forgotten."""
        self.views: dict[str, View] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kdn-region")
        try:
            self._db = self._thread.submit(_open, path, centre).result(BUSY_S)
            self._thread.submit(self._load).result(BUSY_S)
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise StoreError(f"names in {path}: {error}") from error

    def view(self, tenant: str) -> View:
        return self.views.setdefault(tenant, View())

    async def write(
        self, tenant: str, changes: Sequence[Newest], position: int, heard_s: float
    ) -> None:
        """What the feed told up to `position`; `view` has it already."""

        def update(db: sqlite3.Connection) -> None:
            _write(db, tenant, changes)
            db.execute("REPLACE INTO feeds VALUES (?, ?, ?)", (tenant, position, heard_s))

        self.view(tenant).heard_s = heard_s
        await self._run(update)

    async def renew(
        self, tenant: str, names: Sequence[Newest], position: int, heard_s: float
    ) -> None:
        """All names that there are; manifests of others are forgotten."""
        view = self.view(tenant)
        view.names = {one.name: one for one in names}
        view.held = {name: held for name, held in view.held.items() if name in view.names}
        view.position, view.heard_s = position, heard_s

        def update(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM newest WHERE tenant = ?", (tenant,))
            _write(db, tenant, names)
            db.execute("REPLACE INTO feeds VALUES (?, ?, ?)", (tenant, position, heard_s))
            db.execute(
                "DELETE FROM manifests WHERE tenant = ? AND NOT EXISTS (SELECT 1 FROM newest AS n "
                "WHERE n.tenant = manifests.tenant AND n.name = manifests.name)",
                (tenant,),
            )

        await self._run(update)

    async def keep(self, tenant: str, about: Version, manifest: bytes, sequence: int) -> None:
        """What the centre answered when its names were at `sequence`; not if the feed has since
        told of another version here, or that the name was deleted."""
        view = self.view(tenant)
        newest = view.names.get(about.name)
        if sequence <= view.position and (newest is None or newest.etag != about.etag):
            return
        # At once, and before it is written: a deletion that the feed tells from now on finds it
        # here, and is written after it.
        view.held[about.name] = about
        row = (tenant, about.name, about.version, about.etag, manifest)
        await self._run(lambda db: db.execute("REPLACE INTO manifests VALUES (?, ?, ?, ?, ?)", row))

    async def manifest(self, tenant: str, about: Version) -> bytes | None:
        query = "SELECT manifest FROM manifests WHERE tenant = ? AND name = ? AND etag = ?"
        row = await self._run(
            lambda db: db.execute(query, (tenant, about.name, about.etag)).fetchone()
        )
        return row[0] if row else None

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    def _load(self) -> None:
        for tenant, position, heard_s in self._db.execute("SELECT * FROM feeds"):
            self.views[tenant] = View(position, heard_s)
        for tenant, name, version, etag in self._db.execute("SELECT * FROM newest"):
            self.view(tenant).names[name] = Newest(name, version, etag)
        query = "SELECT tenant, name, version, etag, length(manifest) FROM manifests"
        for tenant, name, version, etag, size_bytes in self._db.execute(query):
            self.view(tenant).held[name] = Version(name, version, etag, 0.0, size_bytes)

    async def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """As one transaction in the thread."""

        def transaction() -> Result:
            try:
                with self._db:
                    self._db.execute("BEGIN IMMEDIATE")
                    return work(self._db)
            except sqlite3.Error as error:
                raise StoreError(f"the copy of names: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)


def _open(path: Path, centre: str) -> sqlite3.Connection:
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    private_database(path)
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")  # what a copy forgets, it hears again
    db.execute("PRAGMA secure_delete = ON")  # a deleted manifest is gone from the file, too
    db.executescript(_SCHEMA)
    if db.execute("SELECT url FROM centre").fetchall() != [(centre,)]:
        for table in ("centre", "feeds", "newest", "manifests"):
            db.execute(f"DELETE FROM {table}")
        db.execute("INSERT INTO centre VALUES (?)", (centre,))
    return db


def _write(db: sqlite3.Connection, tenant: str, changes: Sequence[Newest]) -> None:
    for name, version, etag in changes:
        if etag is None:
            for table in ("newest", "manifests"):
                db.execute(f"DELETE FROM {table} WHERE tenant = ? AND name = ?", (tenant, name))
        else:
            db.execute("REPLACE INTO newest VALUES (?, ?, ?, ?)", (tenant, name, version, etag))
