"""The disk store's table of contents, in SQLite: what lets it open without reading every file.

It is a copy of what the files say, plus the order of their last use. Nothing acknowledged depends
on it: whatever state it is found in (behind the files, ahead of them, damaged, gone), the store
makes it fit the files again when it opens. That is why

- a write-ahead log with `synchronous=NORMAL` is enough: after a power loss SQLite's file is sound
  but may lack the latest commits, and a lacking commit is one more thing to heal;
- a write that fails (disk full, say) is logged and does not fail the put or delete it belongs to;
- a damaged index is deleted and made anew.

The folder's lock keeps other processes out, so SQLite holds its own lock for good and needs no
shared memory file (which a full disk could not hold).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Final, Self

from kdn.files import private_database
from kdn.store.base import Entry, Hints
from kdn.store.disk_format import pack_cuts, parse_cuts

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    key BLOB PRIMARY KEY, etag BLOB NOT NULL, size_bytes INTEGER NOT NULL,
    parent BLOB, saved_s REAL NOT NULL, used INTEGER NOT NULL, cuts BLOB NOT NULL DEFAULT x''
) WITHOUT ROWID
"""
_FROM_VERSION_1 = "ALTER TABLE objects ADD COLUMN cuts BLOB NOT NULL DEFAULT x''"
_INSERT = "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)"
_DELETE = "DELETE FROM objects WHERE key = ?"
# SQLite has no checksums: a flipped bit may make a value another type, but never a wrong read,
# since the files are believed and not the index.
_SELECT = """
SELECT * FROM objects WHERE typeof(key) = 'blob' AND typeof(etag) = 'blob'
    AND typeof(size_bytes) = 'integer' AND typeof(parent) IN ('blob', 'null')
    AND typeof(saved_s) = 'real' AND typeof(used) = 'integer' AND typeof(cuts) = 'blob'
"""


Row = tuple[bytes, bytes, int, bytes | None, float, int, bytes]
"""Key, etag, size, parent, seconds saved, when it was used (a higher number was later), and where
it may be cut. Bare, as SQLite gives them: to make a hundred thousand objects of a class more would
be felt at start."""
USED: Final = 5


def row_of(entry: Entry, used: int) -> Row:
    hints = entry.hints
    cuts = pack_cuts(hints.cuts)
    return entry.key, entry.etag, entry.size_bytes, hints.parent, hints.saved_s, used, cuts


def entry_of(row: Row) -> Entry:
    key, etag, size_bytes, parent, saved_s, _, cuts = row
    return Entry(key, etag, size_bytes, Hints(parent, saved_s, parse_cuts(cuts) if cuts else ()))


def used_at(row: Row, used: int) -> Row:
    key, etag, size_bytes, parent, saved_s, _, cuts = row
    return key, etag, size_bytes, parent, saved_s, used, cuts


class Index:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = Lock()  # guards the connection: many threads write through it

    @classmethod
    def open(cls, path: Path) -> tuple[Self, list[Row]]:
        """The index at `path` and its rows, least recently used first; empty if it was missing or
        unusable. Where not even a new one can be written, it lives in memory this time."""
        for connect in (_connect, _connect_anew):
            try:
                connection = connect(path)
                return cls(connection), _load(connection)
            except (sqlite3.Error, OSError) as error:
                logger.warning("%s is unusable, so it is made anew: %s", path, error)
        return cls(_prepare(sqlite3.connect(":memory:", check_same_thread=False))), []

    def change(self, put: Iterable[Row] = (), remove: Iterable[bytes] = ()) -> None:
        """All or nothing. Failure is logged: the next opening heals it."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany(_DELETE, ((key,) for key in remove))
                self._connection.executemany(_INSERT, put)
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                logger.warning("the index misses a change until the next start: %s", error)
                self._roll_back()

    def close(self) -> None:
        with self._lock:
            try:
                self._connection.close()
            except sqlite3.Error as error:
                logger.warning("the index was not closed cleanly: %s", error)

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            logger.warning("the index could not roll back: %s", error)


def _load(connection: sqlite3.Connection) -> list[Row]:
    try:
        # Sorted here: SQLite would carry whole rows through its sorter, at thrice the cost.
        return sorted(connection.execute(_SELECT).fetchall(), key=itemgetter(USED))
    except sqlite3.Error:
        connection.close()
        raise


def _connect(path: Path) -> sqlite3.Connection:
    private_database(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        return _prepare(connection)
    except sqlite3.Error:
        connection.close()
        raise


def _connect_anew(path: Path) -> sqlite3.Connection:
    """The log goes first: left alone, it would be replayed into the new file."""
    for suffix in ("-wal", "-shm", "-journal", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return _connect(path)


def _prepare(connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.isolation_level = None
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, 1, SCHEMA_VERSION):
        raise sqlite3.DatabaseError(f"expected version {SCHEMA_VERSION}, found {version}")
    if version == 1:
        connection.execute(_FROM_VERSION_1)
    connection.execute(_SCHEMA)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    return connection
