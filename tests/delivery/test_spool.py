"""Chunks on disk: whole or not there, bounded, verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdn.delivery.spool import Parcel, Spool, pack, unpack
from kdn.errors import ChecksumError, FormatError, TruncatedError
from kdn.store.base import Hints


def parcel(number: int, size: int = 1000) -> Parcel:
    key = number.to_bytes(16, "big")
    return Parcel(key, b"e" * 16, bytes(range(250)) * (size // 250), Hints(b"p" * 16, 1.5))


def test_the_bytes_of_a_file() -> None:
    content = pack(Parcel(b"k", b"et", b"data", Hints(b"par", 0.5)))
    assert content.hex() == (
        "4b444e53" "0100" "01" "02" "03" "00" "000000000000e03f" "0400000000000000"
        + content[26:34].hex() + b"ketpardata".hex()
    )  # fmt: skip
    assert unpack(content) == Parcel(b"k", b"et", b"data", Hints(b"par", 0.5))


@pytest.mark.parametrize("place", [0, 4, 6, 9, 10, 20, 26, 34, 60, 500])
def test_any_changed_byte_is_found(place: int) -> None:
    content = bytearray(pack(parcel(1)))
    content[place] ^= 4
    with pytest.raises(FormatError):
        unpack(bytes(content))


def test_errors_have_names() -> None:
    content = pack(parcel(1))
    with pytest.raises(TruncatedError):
        unpack(content[:20])
    with pytest.raises(TruncatedError):
        unpack(content[:-1])
    with pytest.raises(ChecksumError):
        unpack(content[:-1] + b"x")


def test_what_is_kept_comes_back_in_order_after_a_restart(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in (3, 1, 2):
        assert spool.add(parcel(number))
    (tmp_path / "00.part").write_bytes(b"half")
    again = Spool(tmp_path)
    assert len(again) == 3
    assert again.size_bytes == spool.size_bytes
    found = []
    while (first := again.first()) is not None:
        found.append(first)
        again.remove(first.key)
    assert found == [parcel(3), parcel(1), parcel(2)]
    assert not list(tmp_path.iterdir())
    assert again.size_bytes == 0


def test_bounded(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=2500)
    assert spool.add(parcel(1))
    assert spool.add(parcel(2))
    assert not spool.add(parcel(3))
    assert spool.add(parcel(1)), "it is there already"
    spool.remove(parcel(1).key)
    assert spool.add(parcel(3))


def test_damaged_files_are_removed_and_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in (1, 2, 3):
        spool.add(parcel(number))
    files = {path.name: path for path in tmp_path.iterdir()}
    first, second = (files[parcel(number).key.hex() + ".chunk"] for number in (1, 2))
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    second.write_bytes(pack(parcel(9)))
    assert spool.first() == parcel(3)
    assert spool.damaged == 2
    assert len(spool) == 1
