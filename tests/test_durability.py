"""What survives a power loss must have been synced before it was acknowledged: the real calls.

The tests of crashes (tests/store/test_crash.py) simulate the disk, so they would not notice if the
real one were never asked to sync.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from kdn.delivery.parcel import Parcel
from kdn.delivery.spool import Spool
from kdn.files import write_whole
from kdn.node.server import listen, open_node
from kdn.store.base import Hints
from kdn.store.disk import open_disk
from kdn.store.disk_reading import file_name
from kdn.store.evict import open_policy
from tests.disk_calls import DiskCalls
from tests.node.harness import Running, config_for, key_of, run
from tests.store.contract import closing, content, put
from tests.store.disks import KEYS, opened

ANSWERED = ("answered",)
PRAGMAS = {"synchronous": 2, "journal_mode": "wal"}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCalls:
    return DiskCalls(tmp_path, monkeypatch)


def test_an_object_is_synced_before_its_name_and_its_name_before_the_answer(
    tmp_path: Path, calls: DiskCalls
) -> None:
    async def test() -> None:
        async with closing(await opened(tmp_path)) as store:
            for number, key in enumerate(KEYS[:2]):
                calls.clear()
                entry = await put(store, key, content(key, 300_000))
                calls.append(ANSWERED)
                name = f"objects/{file_name(entry)}"
                size = (tmp_path / name).stat().st_size
                part = f"objects/{number}.part"
                assert size > 300_000
                assert calls == [
                    ("sync", part, size), ("rename", part, name), ("sync", "objects"), ANSWERED
                ]  # fmt: skip

    asyncio.run(test())


def test_a_deletion_is_synced_before_the_answer(tmp_path: Path, calls: DiskCalls) -> None:
    async def test() -> None:
        async with closing(await opened(tmp_path)) as store:
            entry = await put(store, b"a", content(b"a", 3000))
            calls.clear()
            assert await store.delete(b"a")
            calls.append(ANSWERED)
            assert calls == [
                ("unlink", f"objects/{file_name(entry)}"), ("sync", "objects"), ANSWERED
            ]  # fmt: skip

    asyncio.run(test())


def test_what_is_left_of_an_object_is_synced_before_it_takes_its_place(
    tmp_path: Path, calls: DiskCalls
) -> None:
    async def test() -> None:
        store = await open_disk(tmp_path, 50_000, open_policy("graded"))
        async with closing(store):
            hints = Hints(saved_s=1.0, cuts=(9_000, 30_000))
            entry = await put(store, b"a", content(b"a", 30_000), hints)
            calls.clear()
            await put(store, b"b", content(b"b", 30_000), hints)
            name = f"objects/{file_name(entry)}"
            size = (tmp_path / name).stat().st_size
            assert 9_000 < size < 10_000
            part, other = "objects/1.part", "objects/2.part"
            assert calls[:3] == [
                ("sync", part, size), ("rename", part, name), ("sync", "objects")
            ]  # fmt: skip
            assert calls[3][:2] == ("sync", other), "only then is there room for the next one"

    asyncio.run(test())


def test_what_is_damaged_is_gone_from_where_it_was(tmp_path: Path, calls: DiskCalls) -> None:
    async def test() -> None:
        async with closing(await opened(tmp_path)) as store:
            entry = await put(store, b"a", content(b"a", 3000))
            name = file_name(entry)
            (tmp_path / "objects" / name).write_bytes(b"damage")
            calls.clear()
            assert await store.get(b"a") is None
            assert calls == [
                ("rename", f"objects/{name}", f"damaged/{name}"),
                ("sync", "damaged"),
                ("sync", "objects"),
            ]

    asyncio.run(test())


def test_a_node_answers_when_it_is_on_disk(tmp_path: Path, calls: DiskCalls) -> None:
    """With all tiers in between, over the wire, in folders that are new."""
    config = config_for(tmp_path / "new" / "data", memory_bytes=1 << 20, disk_bytes=1 << 30)

    async def test() -> None:
        async with (
            open_node(config) as node,
            listen(config, node) as listening,
            aiohttp.ClientSession() as session,
        ):
            check_new_folders(calls)
            calls.clear()
            await Running(listening, session).put_chunk(1)
            calls.append(ANSWERED)
            objects = "new/data/objects/objects"
            [file] = (tmp_path / objects).iterdir()
            part, name = f"{objects}/0.part", f"{objects}/{file.name}"
            assert key_of(1).hex() in file.name
            assert calls == [
                ("sync", part, file.stat().st_size), ("rename", part, name), ("sync", objects),
                ANSWERED,
            ]  # fmt: skip

    run(test())


def check_new_folders(calls: DiskCalls) -> None:
    """Each is made, and then the folder it is in is synced."""
    made = [(at, Path(str(call[1]))) for at, call in enumerate(calls) if call[0] == "mkdir"]
    assert {str(path) for _, path in made} >= {"new", "new/data", "new/data/objects"}
    for at, path in made:
        assert ("sync", str(path.parent)) in calls[at:], path


def test_names_are_synced_by_sqlite(tmp_path: Path) -> None:
    """At every commit: FULL. With NORMAL, a log may lack the last ones after a power loss."""
    config = config_for(tmp_path / "data")

    async def test() -> None:
        async with open_node(config) as node:
            settings = await node.depot.names._run(
                "anybody", lambda db: [db.execute(f"PRAGMA {one}").fetchone()[0] for one in PRAGMAS]
            )
            assert settings == list(PRAGMAS.values())

    run(test())


def test_a_spooled_chunk_is_synced(tmp_path: Path, calls: DiskCalls) -> None:
    spool = Spool.open(tmp_path / "new" / "spool")
    [folder] = (tmp_path / "new" / "spool").iterdir()
    own = f"new/spool/{folder.name}"
    assert calls == [
        ("mkdir", "new"), ("mkdir", "new/spool"), ("sync", "new"), ("sync", "."),
        ("mkdir", own), ("sync", "new/spool"),
    ]  # fmt: skip
    calls.clear()
    assert spool.add(Parcel(b"k" * 16, b"e" * 16, content(b"k", 5000), Hints()))
    calls.append(ANSWERED)
    name = f"{own}/{(b'k' * 16).hex()}"
    size = (tmp_path / f"{name}.chunk").stat().st_size
    assert calls == [
        ("sync", f"{name}.part", size), ("rename", f"{name}.part", f"{name}.chunk"),
        ("sync", own), ANSWERED,
    ]  # fmt: skip


def test_an_adopted_chunk_is_synced_where_it_is_now(tmp_path: Path, calls: DiskCalls) -> None:
    left = Spool.open(tmp_path)
    assert left.add(Parcel(b"k" * 16, b"e" * 16, content(b"k", 5000), Hints()))
    left.close()
    [old] = tmp_path.iterdir()
    calls.clear()
    assert len(Spool.open(tmp_path)) == 1
    [new] = tmp_path.iterdir()
    name = f"{(b'k' * 16).hex()}.chunk"
    assert calls == [
        ("mkdir", new.name), ("sync", "."), ("rename", f"{old.name}/{name}", f"{new.name}/{name}"),
        ("sync", new.name), ("unlink", f"{old.name}/lock"),
    ]  # fmt: skip


def test_a_file_written_whole_is_synced(tmp_path: Path, calls: DiskCalls) -> None:
    write_whole(tmp_path / "file", bytes(100), tmp_path / "aside")
    assert calls == [("sync", "aside", 100), ("rename", "aside", "file"), ("sync", ".")]
