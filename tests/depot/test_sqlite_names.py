"""Names in SQLite: restarts, kills, files of before. What every store of names does is in
`test_names.py`."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kdn.depot.sqlite_names import SqliteNames
from kdn.errors import ConditionError, ForgottenError, StoreError
from tests.node.harness import run


def yes(newest: str | None) -> bool:
    return True


def test_the_store_keeps_names_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "names.sqlite"

    async def write() -> None:
        names = SqliteNames(path, clock=lambda: 7.0)
        await names.put("t", "n", b"{}", [b"k"], yes)
        with pytest.raises(ConditionError):
            await names.put("t", "n", b"{}", [], lambda newest: newest is None)
        await names.close()

    async def read() -> None:
        names = SqliteNames(path)
        found = await names.get("t", "n")
        assert found is not None
        assert (found[0].version, found[0].created_s, found[1]) == (1, 7.0, b"{}")
        assert await names.get("u", "n") is None
        assert await names.chunks_of("t", "n") == ([b"k"], [])
        assert (await names.totals("t")).size_bytes == 2
        await names.close()

    run(write())
    run(read())


def test_a_file_of_before_there_was_a_feed(tmp_path: Path) -> None:
    path = tmp_path / "names.sqlite"

    async def write() -> None:
        names = SqliteNames(path)
        await names.put("t", "n", b"{}", [b"k"], yes)
        await names.close()

    async def read() -> None:
        names = SqliteNames(path)
        assert await names.history("t", "n")
        begin = await names.sequence()
        with pytest.raises(ForgottenError):
            await names.changes(0, 10)
        assert await names.changes(begin, 10) == []
        await names.put("t", "n", b"{}", [], yes)
        [change] = await names.changes(begin, 10)
        assert (change.sequence, change.version) == (begin + 1, 2)
        await names.close()

    run(write())
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE changes")
        db.execute("DROP TABLE feed")
    db.close()
    run(read())


def test_a_feed_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def work() -> None:
        names = SqliteNames(tmp_path / "names.sqlite")
        begin = await names.sequence()
        for restart in range(3):
            await names.put("t", "n", b"{}", [], yes)
            await names.close()
            names = SqliteNames(tmp_path / "names.sqlite")
            changes = await names.changes(begin, 10)
            assert [one.version for one in changes] == list(range(1, restart + 2))
        await names.close()

    run(work())


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    async def work() -> None:
        (tmp_path / "names.sqlite").write_bytes(b"not a database" * 1000)
        with pytest.raises(StoreError, match="names"):
            SqliteNames(tmp_path / "names.sqlite")

    run(work())


WRITER = """
import asyncio, sys
from pathlib import Path
from kdn.depot.sqlite_names import SqliteNames

async def main():
    names = SqliteNames(Path(sys.argv[1]))
    while True:
        chunks = [bytes([i]) for i in range(50)]
        made = await names.put("t", "n", b"x" * 5000, chunks, lambda newest: True)
        print(made.version, made.etag, flush=True)

asyncio.run(main())
"""


def test_no_acknowledged_version_is_lost_by_kill(tmp_path: Path) -> None:
    path = tmp_path / "names.sqlite"
    acknowledged = ""
    for delay_s in (0.05, 0.11, 0.02, 0.07):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]
        run(asyncio.sleep(delay_s))
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.stdout.close()
        writer.wait(10)
        acknowledged = [line for line in lines if line.endswith("\n")][-1]

        async def check(expected: str) -> None:
            names = SqliteNames(path)
            version, etag = expected.split()
            found = await names.get("t", "n", int(version))
            assert found is not None
            assert found[0].etag == etag
            newest = await names.get("t", "n")
            assert newest is not None
            assert newest[0].version in (int(version), int(version) + 1)
            own, shared = await names.chunks_of("t", "n")
            assert (len(own), shared) == (50, [])
            await names.close()

        run(check(acknowledged))
