"""Chunks on disk: whole or not there, bounded, verified, each with one owner."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kdn.delivery import spool as spool_module
from kdn.delivery.parcel import Parcel, pack
from kdn.delivery.spool import Spool
from kdn.errors import StoreError
from kdn.files import lock_file
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
