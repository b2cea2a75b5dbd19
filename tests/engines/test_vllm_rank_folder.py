"""The folder in which the ranks of an engine meet."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdn.engines.vllm import rank_folder
from kdn.engines.vllm.rank_folder import RankFolder, load_name, part_name
from kdn.errors import FormatError, UnsupportedError


def test_ranks_see_each_other(tmp_path: Path) -> None:
    first = RankFolder(tmp_path, "engine", 0, 4)
    assert first.alive() == [0]
    third = RankFolder(tmp_path, "engine", 2, 4)
    assert first.alive() == third.alive() == [0, 2]
    other = RankFolder(tmp_path, "another engine", 1, 4)
    assert first.alive() == [0, 2]
    first.close()
    assert third.alive() == [2]
    third.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_rank_is_seen_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from kdn.engines.vllm.rank_folder import RankFolder\n"
        "folder = RankFolder(Path(sys.argv[1]), 'engine', 0, 2)\n"
        "print('there', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        own = RankFolder(tmp_path, "engine", 1, 2)
        assert own.alive() == [0, 1]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert own.alive() == [1]
    own.close()
    assert list(tmp_path.iterdir()) == []


def test_who_cannot_be_looked_at_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (RankFolder(tmp_path, "engine", rank, 3) for rank in range(2))

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        assert second.is_alive(0)
    assert second.alive() == [0, 1]
    first.close()
    second.close()
    assert not second.is_alive(0)


def test_only_its_user_can_open_it(tmp_path: Path) -> None:
    own = RankFolder(tmp_path, "engine", 0, 2)
    assert own.path.stat().st_mode & 0o777 == 0o700
    own.path.chmod(0o755)
    with pytest.raises(UnsupportedError, match="only this user"):
        RankFolder(tmp_path, "engine", 1, 2)
    own.close()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsupportedError, match="only this user"):
        RankFolder(tmp_path, "engine", 0, 2)


def test_two_engines_of_one_name_do_not_meet(tmp_path: Path) -> None:
    own = RankFolder(tmp_path, "engine", 0, 2)
    with pytest.raises(UnsupportedError, match="engine_id"):
        RankFolder(tmp_path, "engine", 0, 2)
    assert own.alive() == [0]


def test_a_file_is_gone_when_its_reader_has_it(tmp_path: Path) -> None:
    first, second, third = (RankFolder(tmp_path, "engine", rank, 3) for rank in range(3))
    fd = first.create([load_name(7, 1), load_name(7, 2)])
    os.write(fd, b"bytes")
    opened = second.fetch(load_name(7, 1))
    assert opened is not None
    assert os.read(opened, 10) == b"bytes"
    assert second.fetch(load_name(7, 1)) is None
    assert third.has(load_name(7, 2))
    first.remove([load_name(7, 1), load_name(7, 2)])
    assert os.fstat(fd).st_nlink == 0
    assert not third.has(load_name(7, 2))
    os.close(fd)
    os.close(opened)


def test_a_file_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    own = RankFolder(tmp_path, "engine", 0, 2)
    name = part_name(b"key", 1)
    own.write(name, [b"x"])
    (own.path / name).chmod(0o666)
    with pytest.raises(FormatError, match="not written by a rank"):
        own.fetch(name)
    assert not own.has(name)
    (own.path / name).mkdir()
    with pytest.raises(FormatError):
        own.fetch(name)


def test_it_is_seen_when_somebody_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        rank_folder.logger, "warning", lambda text, *given: told.append(text % given)
    )
    own = RankFolder(tmp_path, "engine", 0, 2)
    other = RankFolder(tmp_path, "engine", 1, 2)
    assert own.is_there
    assert own.alive() == [0, 1]
    assert not told
    for file in own.path.iterdir():
        file.unlink()
    own.path.rmdir()
    assert own.alive() == [0]
    assert not own.is_there
    [line] = told
    assert "its folder was removed: restart the engine" in line
    with pytest.raises(OSError):
        own.write("part-00-0", [b"x"])
    own.close()
    assert not own.is_there
    assert len(told) == 1
    other.close()


def make_folder(place: Path, name: str, *files: str) -> Path:
    folder = place / f"{rank_folder._beginning()}{name}"
    folder.mkdir(mode=0o700)
    for file in files:
        (folder / file).touch()
    return folder


def test_what_killed_engines_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = make_folder(tmp_path, "00", ".kdn-rank-0", part_name(b"key", 1))
    starting = make_folder(tmp_path, "01")
    strange = make_folder(tmp_path, "02", ".kdn-rank-0", "letters.txt")
    living = RankFolder(tmp_path, "living", 0, 2)
    made_s = max(one.stat().st_mtime for one in tmp_path.iterdir())
    for folder in tmp_path.iterdir():
        os.utime(folder, (made_s, made_s))
    left = []
    for age_s in (rank_folder.UNLOCKED_S, rank_folder.UNLOCKED_S + 1, rank_folder.STALE_S + 1):
        monkeypatch.setattr(time, "time", lambda now_s=made_s + age_s: now_s)
        RankFolder(tmp_path, "own", 0, 2).close()
        left.append([one.is_dir() for one in (killed, starting, strange, living.path)])
    assert left == [
        [True, True, True, True],  # it may just be about to lock
        [False, True, True, True],
        [False, False, True, True],
    ]
    assert living.is_there
    living.close()


def test_an_engines_own_folder_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that start at the same time would remove it under each other."""
    before = RankFolder(tmp_path, "engine", 0, 2)
    half = before.path / before._aside()
    half.touch()
    inode = before.path.stat().st_ino
    os.close(before._lock)  # as if it was killed
    monkeypatch.setattr(time, "time", lambda: before.path.stat().st_mtime + 3600.0)
    own = RankFolder(tmp_path, "engine", 0, 2)
    assert own.path.stat().st_ino == inode
    assert not half.exists()
    own.close()


@pytest.mark.parametrize(
    ("free", "held", "ranks", "room"),
    [
        (100, 0, 1, 25),
        (100, 0, 5, 5),
        (35, 0, 1, 10),  # 25 stay free
        (35, 10, 1, 20),
        (10, 7, 1, 7),  # what is there may stay
    ],
)
def test_some_memory_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, held: int, ranks: int, room: int
) -> None:
    """An engine's own queues are there, too."""
    own = RankFolder(tmp_path, "engine", 0, 2)
    disk = SimpleNamespace(f_blocks=100, f_bavail=free, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda _: disk)
    assert own.room_bytes(1 << 40, held * 4096, ranks) == room * 4096
    assert own.room_bytes(4096, held * 4096, ranks) == 4096
    own.close()


def test_what_was_for_a_rank_of_that_name_before_is_removed(tmp_path: Path) -> None:
    """An engine_id that an operator has set outlives engines."""
    first = RankFolder(tmp_path, "engine", 0, 2)
    os.close(first.create([load_name(1, 1)]))
    first.write(part_name(b"key", 1), [b"x"])
    second = RankFolder(tmp_path, "engine", 1, 2)
    assert not second.has(load_name(1, 1))
    assert second.has(part_name(b"key", 1))
