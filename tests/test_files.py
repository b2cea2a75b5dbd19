"""Nobody but their owner reads what kdn keeps; nothing that is not kdn's is touched."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from kdn.delivery.parcel import Parcel
from kdn.delivery.spool import Spool
from kdn.files import private_file, private_folder, write_whole
from kdn.node.server import listen, open_node
from kdn.store.base import Hints
from tests.node.harness import Running, config_for, run

OURS = re.compile("ours.*")


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Under which others may read everything."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> dict[str, str]:
    """What others may do anything with, in and below a folder."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode & 0o777
        if mode & 0o077:
            found[str(path.relative_to(folder))] = f"{mode:o}"
    return found


def use_node(folder: Path, number: int = 1) -> None:
    """A chunk, a name and an end; looked at while the files of its log are there, and after."""
    config = config_for(folder, memory_bytes=1 << 20, disk_bytes=1 << 30)

    async def test() -> None:
        async with (
            open_node(config) as node,
            listen(config, node) as listening,
            aiohttp.ClientSession() as session,
        ):
            running = Running(listening, session)
            await running.put_chunk(number)
            manifest = json.dumps({"text": "confidential"}).encode()
            status, _, body = await running.ask("PUT", f"/v1/names/secret{number}", manifest)
            assert status == 201, body
            assert (folder / "names.sqlite-wal").exists()
            assert (folder / "objects" / "index.sqlite-wal").exists()
            assert open_to_others(folder) == {}

    run(test())
    assert open_to_others(folder) == {}


def test_nobody_else_reads_a_nodes_data(tmp_path: Path) -> None:
    use_node(tmp_path / "new" / "data")
    assert open_to_others(tmp_path / "new") == {}


def test_data_that_others_could_read_is_taken_from_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    use_node(data)
    for folder in (data, data / "objects", data / "objects" / "objects"):
        folder.chmod(0o755)
    for name in ("names.sqlite", "objects/index.sqlite"):
        (data / name).chmod(0o644)
    for suffix in ("-wal", "-shm"):
        (data / f"names.sqlite{suffix}").touch(0o644)
    use_node(data, 2)
    assert f"{data} was open to others (755)" in caplog.text
    assert "names.sqlite was open to others (644)" in caplog.text


def test_a_folder_with_other_things_keeps_its_mode(tmp_path: Path) -> None:
    """As a home directory that somebody gave as the data folder: what is kdn's is private."""
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    page = home / "index.html"
    page.write_text("for all to read")
    config = config_for(home, memory_bytes=0, disk_bytes=1 << 30)

    async def test() -> None:
        async with open_node(config):
            assert open_to_others(home) == {".": "755", "index.html": "644"}

    run(test())


def test_a_spool_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o755)
    parcel = Parcel(b"k" * 16, b"e" * 16, b"data", Hints())
    spool = Spool.open(folder)
    spool.add(parcel)
    assert open_to_others(folder) == {}
    spool.close()
    [file] = folder.glob("*/*.chunk")
    file.chmod(0o644)
    assert Spool.open(folder).first() == parcel
    assert open_to_others(folder) == {}


def test_a_spool_leaves_files_of_others_alone(tmp_path: Path) -> None:
    left = tmp_path / ("0" * 16)  # as of a process that is gone
    left.mkdir()
    names = ("film.part", "music.chunk", "00.chunks", "AB.chunk")
    theirs = [folder / name for folder in (tmp_path, left) for name in names]
    theirs.append(tmp_path / ("1" * 16))  # not even a folder
    for path in theirs:
        path.write_bytes(b"not ours")
    (left / "00.chunk").symlink_to(theirs[0])
    (left / "00.part").symlink_to(theirs[0])
    spool = Spool.open(tmp_path)
    assert (len(spool), spool.first(), spool.damaged) == (0, None, 0)
    assert [path.read_bytes() for path in theirs] == [b"not ours"] * 9
    assert (left / "00.chunk").is_symlink()
    assert (left / "00.part").is_symlink()


def test_a_private_folder(tmp_path: Path) -> None:
    for mode, names, expected in (
        (0o755, [], 0o700),
        (0o775, ["ours1", "ours2"], 0o700),
        (0o755, ["ours1", "theirs"], 0o755),
        (0o1777, [], 0o1777),
        (0o500, [], 0o500),
    ):
        folder = tmp_path / f"{mode:o}{len(names)}{expected:o}"
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        folder.chmod(mode)
        private_folder(folder, OURS)
        assert folder.stat().st_mode & 0o7777 == expected
        folder.chmod(0o700)


def test_a_folder_of_another_user_is_left_to_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a volume that a container has mounted: it must work all the same."""
    tmp_path.chmod(0o755)
    file = tmp_path / "ours"
    file.touch(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    private_folder(tmp_path, OURS)
    private_file(file)
    assert (tmp_path.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o755, 0o644)
    assert "belongs to others as well" in caplog.text


def test_a_file_system_without_modes_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("no modes here")

    tmp_path.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(os, "chmod", refuse)
        private_folder(tmp_path, OURS)
    assert "stays so: no modes here" in caplog.text


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    private_folder(Path("a/b"), OURS)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert open_to_others(tmp_path / "a") == {}


def test_a_file_is_whole_and_private_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, aside = tmp_path / "file", tmp_path / "aside"
    aside.touch(0o644)  # left over
    write_whole(path, b"first", aside)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"first", 0o600)

    def full(fd: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, b"second", aside)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]
