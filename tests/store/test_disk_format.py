"""The file of one object: golden bytes, round trips, truncation."""

from __future__ import annotations

import pytest

from kdn.errors import FormatError
from kdn.store.base import Entry, Hints
from kdn.store.disk_format import BLOCK_BYTES, decode_header, encode_header, header_bytes
from tests.store.contract import content


def test_golden_bytes() -> None:
    entry = Entry(b"\x01\x02", b"\x03", 5, Hints(b"\x04", 0.5))
    assert encode_header(entry, b"hello").hex(" ", 8) == (
        "4b444e46 494c450001000000 3c00000005000000 0000000000000000 "
        "0000e03f02010100 0000000001020304 fddc625c55e85595 9debcb0d4d995627"
    )
    assert decode_header(encode_header(entry, b"hello") + b"hello").entry == entry


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 5 * BLOCK_BYTES + 1])
@pytest.mark.parametrize("parent", [None, b"", b"p" * 64])
def test_headers_round_trip(size: int, parent: bytes | None) -> None:
    data = content("header", size)
    entry = Entry(b"k" * 64, b"e" * 32, size, Hints(parent, 1.25))
    head = encode_header(entry, data)
    header = decode_header(head + data)
    assert header.entry == entry
    assert header.header_bytes == len(head) == header_bytes(size, 96 + len(parent or b""))
    for length in range(len(head)):
        with pytest.raises(FormatError):
            decode_header(head[:length])
