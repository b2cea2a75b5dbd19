"""Frames: their exact bytes, and one test per way of being wrong."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kdn.errors import ChecksumError, FormatError, LimitError, TruncatedError
from kdn.protocol import frames
from kdn.protocol.frames import Frame, pack, parse, split

FRAME = Frame(
    number=3, status=200, key=b"K" * 16, etag=b"E" * 16, parent=b"P" * 2, object_bytes=1000,
    start=10, length=5, saved_s=0.5, checksum=xxhash.xxh3_64_intdigest(b"hello"), last=True,
)  # fmt: skip


def test_the_bytes_are_those_of_the_document() -> None:
    fixed = (
        b"KDNF" + struct.pack("<IH", 3, 200) + bytes([1, 16, 16, 2]) + b"\0\0"
        + struct.pack("<QQI", 1000, 10, 5) + struct.pack("<f", 0.5)
        + struct.pack("<Q", xxhash.xxh3_64_intdigest(b"hello"))
    )  # fmt: skip
    names = b"K" * 16 + b"E" * 16 + b"P" * 2
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(fixed + names))
    assert len(fixed) == 48
    assert pack(FRAME) == fixed + checksum + names
    assert FRAME.head_bytes == len(pack(FRAME)) == 90


def test_what_is_packed_is_parsed() -> None:
    assert parse(pack(FRAME) + b"hello") == FRAME
    miss = Frame(0, frames.MISS, b"k", checksum=xxhash.xxh3_64_intdigest(b""))
    assert parse(pack(miss)) == miss
    body = pack(FRAME) + b"hello" + pack(miss)
    assert [(f, bytes(data)) for f, data in split(body)] == [(FRAME, b"hello"), (miss, b"")]
    assert list(split(b"")) == []


def wrong(**values: object) -> bytes:
    """A head that is consistent in itself."""
    return pack(FRAME._replace(**values))  # type: ignore[arg-type]


def test_each_error() -> None:
    head = pack(FRAME)
    for end in (0, 10, 55, 56, 89):
        with pytest.raises(TruncatedError):
            parse(head[:end])
    with pytest.raises(TruncatedError):
        list(split(head + b"hell"))
    with pytest.raises(FormatError, match="magic"):
        parse(b"XDNF" + head[4:])
    with pytest.raises(ChecksumError, match="data"):
        list(split(head + b"hellO"))
    with pytest.raises(LimitError):
        parse(wrong(length=2**20 + 1))
    with pytest.raises(FormatError):
        parse(wrong(status=201))
    with pytest.raises(FormatError):
        parse(wrong(key=b""))


def test_every_flipped_bit_of_a_head_is_found() -> None:
    head = pack(FRAME)
    for at in range(len(head)):
        for bit in range(8):
            damaged = bytearray(head)
            damaged[at] ^= 1 << bit
            with pytest.raises(FormatError):
                parse(bytes(damaged))
