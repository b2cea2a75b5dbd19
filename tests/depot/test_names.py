"""Names in SQLite: versions, totals, restarts, kills."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from kdn.depot.names import MAX_VERSIONS, NameStore, Totals
from kdn.errors import ConditionError, StoreError
from tests.node.harness import run


def yes(newest: str | None) -> bool:
    return True


def test_totals_are_those_of_what_is_there(tmp_path: Path) -> None:
    async def work() -> None:
        rng = Random(7)
        names = NameStore(tmp_path / "names.sqlite")
        for _ in range(150):
            name = rng.choice("abc")
            chunks = [bytes([rng.randrange(40)]) for _ in range(rng.randrange(10))]
            if rng.random() < 0.1:
                await names.delete("t", name, yes)
            else:
                await names.put("t", name, b"x" * rng.randrange(100), chunks, yes)
        all_names = [about.name for about in await names.page("t", "", "", 10)]
        histories = [await names.history("t", name) for name in all_names]
        used = [sum(map(len, await names.chunks_of("t", name))) for name in all_names]
        size_bytes = sum(about.size_bytes for history in histories for about in history)
        assert await names.totals("t") == Totals(len(all_names), size_bytes, sum(used))
        await names.close()

    run(work())


def test_the_store_keeps_names_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "names.sqlite"

    async def write() -> None:
        names = NameStore(path, clock=lambda: 7.0)
        await names.put("t", "n", b"{}", [b"k"], yes)
        with pytest.raises(ConditionError):
            await names.put("t", "n", b"{}", [], lambda newest: newest is None)
        await names.close()

    async def read() -> None:
        names = NameStore(path)
        found = await names.get("t", "n")
        assert found is not None
        assert (found[0].version, found[0].created_s, found[1]) == (1, 7.0, b"{}")
        assert await names.get("u", "n") is None
        assert await names.chunks_of("t", "n") == ([b"k"], [])
        assert (await names.totals("t")).size_bytes == 2
        await names.close()

    run(write())
    run(read())


def test_old_versions_are_forgotten(tmp_path: Path) -> None:
    async def work() -> None:
        names = NameStore(tmp_path / "names.sqlite")
        for number in range(MAX_VERSIONS + 3):
            await names.put("t", "n", b"{}", [bytes([number])], yes)
        versions = [v.version for v in await names.history("t", "n")]
        assert versions == list(range(MAX_VERSIONS + 3, 3, -1))
        own, _ = await names.chunks_of("t", "n")
        assert len(own) == MAX_VERSIONS
        await names.close()

    run(work())


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    async def work() -> None:
        (tmp_path / "names.sqlite").write_bytes(b"not a database" * 1000)
        with pytest.raises(StoreError, match="names"):
            NameStore(tmp_path / "names.sqlite")

    run(work())


WRITER = """
import asyncio, sys
from pathlib import Path
from kdn.depot.names import NameStore

async def main():
    names = NameStore(Path(sys.argv[1]))
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
            names = NameStore(path)
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
