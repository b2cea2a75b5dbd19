"""Chunks on disk: whole or not there, bounded, verified, each with one owner."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from kdn.delivery import spool as spool_module
from kdn.delivery.parcel import Parcel, pack
from kdn.delivery.spool import MAX_AGE_S, Spool
from kdn.errors import StoreError
from kdn.files import is_own_file, lock_file
from kdn.store.base import Hints


def parcel(number: int, size: int = 1000) -> Parcel:
    key = number.to_bytes(16, "big")
    return Parcel(key, b"e" * 16, bytes(range(250)) * (size // 250), Hints(b"p" * 16, 1.5))


def taken(spool: Spool) -> list[Parcel]:
    """All of them, in order, sent and removed."""
    found = []
    while (first := spool.first()) is not None:
        found.append(first)
        spool.remove(first.key)
    return found


def files(root: Path) -> list[str]:
    """Their names, whoever owns them."""
    return sorted(path.name for path in root.glob("*/*"))


def test_what_is_kept_comes_back_in_order_after_a_restart(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path)
    for number in (3, 1, 2):
        assert spool.add(parcel(number))
    [folder] = tmp_path.iterdir()
    (folder / "00.part").write_bytes(b"half")
    spool.close()
    again = Spool.open(tmp_path)
    assert len(again) == 3
    assert "00.part" not in files(tmp_path)
    assert taken(again) == [parcel(3), parcel(1), parcel(2)]
    again.close()
    assert not list(tmp_path.iterdir())


def test_each_owner_has_chunks_of_its_own(tmp_path: Path) -> None:
    """Until it is gone."""
    one, two = Spool.open(tmp_path), Spool.open(tmp_path)
    assert one.add(parcel(1))
    assert two.add(parcel(2))
    assert (one.adopt(), two.adopt()) == (0, 0)
    assert parcel(1).key not in two
    two.remove(parcel(1).key)
    one.close()
    assert two.adopt() == 1
    assert taken(two) == [parcel(2), parcel(1)]
    assert files(tmp_path) == ["lock"]


def test_an_owner_whose_folder_was_taken_before_it_was_locked_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is one that nobody else sees. So another folder is made."""
    made: list[str] = []

    def late(path: Path) -> int:
        lock = lock_file(path)
        made.append(path.parent.name)
        if len(made) == 1:
            path.unlink()
        return lock

    monkeypatch.setattr(spool_module, "lock_file", late)
    spool = Spool.open(tmp_path)
    assert spool.add(parcel(1))
    [found] = tmp_path.glob("*/*.chunk")
    assert found.parent.name == made[1]


def test_a_chunk_left_by_two_owners_is_sent_once(tmp_path: Path) -> None:
    for spool in [Spool.open(tmp_path) for _ in range(2)]:
        assert spool.add(parcel(1))
        spool.close()
    assert taken(Spool.open(tmp_path)) == [parcel(1)]
    assert files(tmp_path) == ["lock"]


def test_the_bound_holds_for_all_owners_together(tmp_path: Path) -> None:
    one, two = (Spool.open(tmp_path, max_bytes=2500) for _ in range(2))
    assert one.add(parcel(1))
    assert two.add(parcel(2))
    assert not one.add(parcel(3))
    assert not two.add(parcel(3))
    assert one.add(parcel(1)), "it is there already"
    one.remove(parcel(1).key)
    assert two.add(parcel(3))


def test_damaged_files_are_removed_and_counted(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path)
    for number in (1, 2, 3, 4):
        spool.add(parcel(number))
    [folder] = tmp_path.iterdir()
    first, second, third = (folder / f"{parcel(n).key.hex()}.chunk" for n in (1, 2, 3))
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    second.write_bytes(pack(parcel(9)))
    third.unlink()
    assert spool.first() == parcel(4)
    assert spool.damaged == 2
    assert len(spool) == 1


def test_a_disk_that_fails_costs_no_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without file descriptors left: what cannot be read now is not damaged."""
    spool = Spool.open(tmp_path)
    for number in (1, 2):
        spool.add(parcel(number))
    read = Path.read_bytes

    def fails(path: Path) -> bytes:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(OSError, match="Too many"):
        spool.first()
    monkeypatch.setattr(Path, "read_bytes", read)
    assert taken(spool) == [parcel(2), parcel(1)]


def test_a_root_that_somebody_emptied_is_used_again(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "root")
    spool.add(parcel(1))
    shutil.rmtree(tmp_path / "root")
    assert spool.add(parcel(2))
    assert parcel(1).key not in spool
    spool.close()
    assert taken(Spool.open(tmp_path / "root")) == [parcel(2)]


def test_a_closed_spool_keeps_nothing(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path)
    left = Spool.open(tmp_path)
    left.add(parcel(1))
    left.close()
    spool.close()
    spool.close()
    assert not spool.add(parcel(2))
    assert spool.adopt() == 0


def test_a_root_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot spool in"):
        Spool.open(tmp_path / "file")


def test_a_root_of_another_user_or_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared := tmp_path / "shared").mkdir()
    (shared / "notes.txt").touch()  # with this in it, the folder keeps its mode
    for mode in (0o777, 0o1777, 0o770):
        shared.chmod(mode)
        with pytest.raises(StoreError, match="folder of this user's, found mode"):
            Spool.open(shared)
    (own := tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(own)
    with pytest.raises(StoreError, match="folder of this user's, found mode"):
        Spool.open(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="folder of this user's, found mode"):
        Spool.open(own)
    assert not list(own.glob("*/*"))


def test_what_others_put_there_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that they may write to, a lock that leads elsewhere, a file of theirs."""
    folders = [tmp_path / (digit * 16) for digit in "012"]
    for number, folder in enumerate(folders):
        folder.mkdir(mode=0o700)
        (folder / f"{parcel(number).key.hex()}.chunk").write_bytes(pack(parcel(number)))
    folders[0].chmod(0o770)
    (folders[1] / "lock").symlink_to(tmp_path / "elsewhere")
    theirs = (folders[2] / f"{parcel(2).key.hex()}.chunk").stat().st_ino
    monkeypatch.setattr(
        spool_module, "is_own_file", lambda about: is_own_file(about) and about.st_ino != theirs
    )
    spool = Spool.open(tmp_path)
    assert (len(spool), spool.damaged) == (0, 0)
    assert not (tmp_path / "elsewhere").exists()
    assert len(list(tmp_path.glob("*/*.chunk"))) == 3


def test_what_waited_for_a_week_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In roots that nobody opens any more, too, but not what a living process keeps."""
    here, beside, other = tmp_path / ("a" * 32), tmp_path / ("b" * 32), tmp_path / "other"
    gone = tmp_path / ("c" * 32)
    living = Spool.open(beside)
    living.add(parcel(9))
    for root in (here, beside, gone, other):
        spool = Spool.open(root)
        spool.add(parcel(1))
        if root != gone:
            spool.add(parcel(2))
        spool.close()
    long_ago_s = time.time() - MAX_AGE_S - 60
    for number in (1, 9):
        for path in tmp_path.glob(f"*/*/{parcel(number).key.hex()}.chunk"):
            os.utime(path, (long_ago_s, long_ago_s))
    spool = Spool.open(here)
    assert taken(spool) == [parcel(2)]
    assert spool.outdated == 3
    assert [record.message for record in caplog.records] == ["3 chunks waited over 7 days: dropped"]
    assert living.first() == parcel(9)
    assert len(list(beside.glob("*/*.chunk"))) == 2
    assert not gone.exists()
    assert len(list(other.glob("*/*.chunk"))) == 2, "it has no name of a root"
