"""The file that a chunk waits in: its bytes, and what is refused."""

from __future__ import annotations

import struct

import pytest

from kdn.delivery.parcel import Parcel, pack, unpack
from kdn.errors import ChecksumError, FormatError, TruncatedError
from kdn.store.base import Hints

PARCEL = Parcel(b"k" * 16, b"e" * 16, bytes(range(250)) * 4, Hints(b"p" * 16, 1.5), b"r" * 16)


def test_a_file_has_exactly_these_bytes() -> None:
    parcel = Parcel(b"k", b"et", b"data", Hints(b"par", 0.5), replacing=b"repl")
    content = pack(parcel)
    assert content.hex() == (
        "4b444e53" "0200" "01" "02" "03" "04" "000000000000e03f" "0400000000000000"
        "cb240cd502b11a6d" + b"ketparrepldata".hex()
    )  # fmt: skip
    assert unpack(content) == parcel


def test_what_is_not_there_stays_so() -> None:
    parcel = Parcel(b"k", b"e", b"", Hints())
    assert unpack(pack(parcel)) == parcel


@pytest.mark.parametrize("place", [0, 4, 6, 9, 10, 20, 26, 34, 60, 500])
def test_any_changed_byte_is_found(place: int) -> None:
    content = bytearray(pack(PARCEL))
    content[place] ^= 4
    with pytest.raises(FormatError):
        unpack(bytes(content))


def test_each_kind_of_damage_has_its_own_error() -> None:
    content = pack(PARCEL)
    with pytest.raises(TruncatedError):
        unpack(content[:20])
    with pytest.raises(TruncatedError):
        unpack(content[:-1])
    with pytest.raises(ChecksumError):
        unpack(content[:-1] + b"x")
    with pytest.raises(FormatError, match="version 2, found b'KDNS', 1"):
        unpack(content[:4] + struct.pack("<H", 1) + content[6:])
