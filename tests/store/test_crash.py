"""The disk store and real processes that die, and a real disk that is full."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kdn.errors import NoSpaceError
from kdn.store.base import Entry, Store
from kdn.store.disk import open_disk
from kdn.store.evict import open_policy
from tests.store.contract import AMPLE_BYTES, closing, content, etag_of, listed, put, read
from tests.store.ledger import check_agreement

CAPACITY_BYTES = 3_000_000
ROOT = Path(__file__).parents[2]
START_LIMIT_S = 60.0


class Reports:
    """What the victims said, and so what must and what must not be found."""

    def __init__(self) -> None:
        self.must: dict[bytes, bytes] = {}  # key to etag
        self.must_not: set[bytes] = set()
        self.puts = self.evictions = self.deletions = 0

    def take(self, line: str) -> None:
        word, *rest = line.split()
        fields = [bytes.fromhex(field) for field in rest]
        if word == "put":
            self.must[fields[0]] = fields[1]
            self.puts += 1
        elif word == "begin":
            self.must_not.discard(fields[0])
        elif word in ("evict", "delete"):
            self.must.pop(fields[0], None)
            self.evictions += word == "evict"
        elif word == "deleted":
            self.must_not.add(fields[0])
            self.deletions += 1

    async def check(self, folder: Path) -> None:
        async with closing(await open_disk(folder, CAPACITY_BYTES, open_policy("lru"))) as store:
            here = await listed(store)
            assert self.must_not.isdisjoint(here), "a deleted object is back"
            for key, etag in self.must.items():
                assert await store.get(key, 0, 1, etag=etag) is not None, f"{key!r} is lost"
            for key in here:
                span = await store.get(key)
                assert span is not None, f"{key!r} is listed and cannot be read"
                data = bytes(span.data)
                assert data.startswith(key + b":"), f"{key!r} has the bytes of another"
                assert etag_of(data) == span.entry.etag, f"{key!r} has wrong bytes"
            stats = await store.stats()
            assert (stats.corruptions, stats.evictions) == (0, 0)
            assert stats.size_bytes <= CAPACITY_BYTES
        check_agreement(folder)


def live_and_die(folder: Path, reports: Reports, chance: random.Random) -> None:
    """One victim: killed while it starts, or at a random moment of its work."""
    command = [sys.executable, "-m", "tests.store.victim"]
    arguments = [str(folder), str(CAPACITY_BYTES), str(chance.randrange(1 << 30))]
    with subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        bufsize=0,  # else `readline` takes more than a line, and `communicate` never sees it
    ) as victim:
        assert victim.stdout is not None
        said_first = b""
        if chance.random() < 0.8:
            said_first = victim.stdout.readline()
            assert said_first == b"0 ready\n"
        try:
            said, _ = victim.communicate(timeout=chance.uniform(0, 0.4))
            raise AssertionError(f"the victim ended by itself: {said[-200:]!r}")
        except subprocess.TimeoutExpired:
            os.kill(victim.pid, signal.SIGKILL)
            said, _ = victim.communicate(timeout=START_LIMIT_S)
    for number, line in enumerate((said_first + said).decode().splitlines()):
        assert line.startswith(f"{number} "), f"expected report {number}, found {line!r}"
        reports.take(line.partition(" ")[2])


def test_killed_at_random_moments(tmp_path: Path, thorough: bool) -> None:
    """No acknowledged object is lost unless evicted or deleted, no wrong byte is served, index and
    files agree. Some victims inherit the folder from a killed one, not from a check."""
    rounds, puts = (50, 1000) if thorough else (6, 100)
    chance = random.Random(7)
    reports = Reports()
    done = 0
    while done < rounds or reports.puts < puts:
        live_and_die(tmp_path, reports, chance)
        if chance.random() < 0.7:
            asyncio.run(reports.check(tmp_path))
        done += 1
        assert done < 20 * rounds, f"only {reports.puts} puts in {done} rounds"
    asyncio.run(reports.check(tmp_path))
    assert reports.evictions > 0
    assert reports.deletions > 0
    print(  # noqa: T201
        f"{done} kills, {reports.puts} acknowledged puts, {reports.evictions} evictions, "
        f"{reports.deletions} deletions, {len(reports.must)} objects that must be here"
    )


# a full disk

DISK_BYTES = 4 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of DISK_BYTES."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


def test_a_full_disk_is_a_clear_error_and_loses_nothing(small_disk: Path) -> None:
    """Large objects until none fits, then small ones until not a page is left, many at once."""
    acknowledged: dict[bytes, bytes] = {}

    async def fill(store: Store, name: str, count: int, size: int) -> int:
        wanted = {b"%s %d" % (name.encode(), i): content(f"{name} {i}", size) for i in range(count)}
        results = await asyncio.gather(
            *(put(store, key, data) for key, data in wanted.items()), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, NoSpaceError) for error in errors)
        assert all("No space left" in str(error) for error in errors)
        for (key, data), result in zip(wanted.items(), results, strict=True):
            if isinstance(result, Entry):
                acknowledged[key] = data
        return len(errors)

    async def check(store: Store) -> None:
        assert await listed(store) == sorted(acknowledged)
        for key, data in acknowledged.items():
            assert await read(store, key) == data

    async def once(name: str) -> None:
        async with closing(await open_disk(small_disk, AMPLE_BYTES, open_policy("lru"))) as store:
            await check(store)
            assert await fill(store, f"large {name}", 40, 150_000) > 0
            assert await fill(store, f"small {name}", 300, 2000) > 0
            await check(store)
            for key in list(acknowledged)[:3]:
                assert await store.delete(key)
                del acknowledged[key]
            assert await fill(store, f"after {name}", 1, 2000) == 0
            await check(store)

    for name in "abc":
        asyncio.run(once(name))
    assert len(acknowledged) > 20
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(1024)):
            pass
    # A start where not a byte can be written, not even to heal the index.
    for path in small_disk.glob("index.sqlite*"):
        path.unlink()
    (small_disk / "index.sqlite").write_bytes(b"")

    async def look() -> None:
        async with closing(await open_disk(small_disk, AMPLE_BYTES, open_policy("lru"))) as store:
            await check(store)

    asyncio.run(look())
    (small_disk / "filler").unlink()
    asyncio.run(look())
    check_agreement(small_disk)


def test_eviction_makes_room_before_the_disk_is_full(small_disk: Path) -> None:
    """A store that may hold most of a disk never sees it full: evicted before written."""

    async def work() -> None:
        capacity_bytes = DISK_BYTES * 3 // 4
        async with closing(
            await open_disk(small_disk, capacity_bytes, open_policy("lru"))
        ) as store:
            for i in range(100):
                await put(store, b"%d" % i, content(f"{i}", 150_000))
            assert (await store.stats()).evictions > 70

    asyncio.run(work())
    check_agreement(small_disk)
