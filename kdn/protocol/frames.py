"""Frames of a batch answer (`docs/protocol.md`, "Frames"): write their heads, and read them.

A frame says whose bytes follow and how many, so a reader takes or skips exactly that many and a
miss never shifts another's bytes. Data is never copied here: a frame is written as its head, then
the data as it lies in the store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from kdn.errors import ChecksumError, FormatError, LimitError, TruncatedError

MAGIC = b"KDNF"
CONTENT_TYPE = "application/vnd.kdn.frames"
MAX_DATA_BYTES = 1 << 20
MAX_KEY_BYTES = 48
MAX_ETAG_BYTES = 32
FLAG_LAST = 1

OK, MISS, GONE, OTHER_ETAG, FAILED = 200, 404, 410, 412, 503
STATUSES = (OK, MISS, GONE, OTHER_ETAG, FAILED)

_FIXED = struct.Struct("<4sIHBBBBHQQIfQ")
_CHECKSUM = struct.Struct("<Q")
FIXED_BYTES = _FIXED.size + _CHECKSUM.size


class Frame(NamedTuple):
    """The head of a frame that answers key or span `number` of the request. `length` bytes of data
    follow it, whatever the status."""

    number: int
    status: int
    key: bytes
    etag: bytes = b""
    parent: bytes = b""
    object_bytes: int = 0
    start: int = 0
    length: int = 0
    saved_s: float = 0.0
    checksum: int = 0
    last: bool = True

    @property
    def head_bytes(self) -> int:
        return FIXED_BYTES + len(self.key) + len(self.etag) + len(self.parent)


def pack(frame: Frame) -> bytes:
    """The head's bytes."""
    names = frame.key + frame.etag + frame.parent
    fixed = _FIXED.pack(
        MAGIC, frame.number, frame.status, FLAG_LAST if frame.last else 0, len(frame.key),
        len(frame.etag), len(frame.parent), 0, frame.object_bytes, frame.start, frame.length,
        frame.saved_s, frame.checksum,
    )  # fmt: skip
    return fixed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fixed + names)) + names


def parse(data: bytes | memoryview) -> Frame:
    """The verified head at the beginning of `data`."""
    view = memoryview(data).cast("B")
    if len(view) < FIXED_BYTES:
        raise TruncatedError(f"expected a frame of at least {FIXED_BYTES} bytes, found {len(view)}")
    (
        magic, index, status, flags, key_bytes, etag_bytes, parent_bytes, zero, object_bytes, start,
        length, saved_s, checksum,
    ) = _FIXED.unpack_from(view)  # fmt: skip
    if magic != MAGIC:
        raise FormatError(f"expected frame magic {MAGIC!r}, found {bytes(magic)!r}")
    end = FIXED_BYTES + key_bytes + etag_bytes + parent_bytes
    if len(view) < end:
        raise TruncatedError(f"expected a frame head of {end} bytes, found {len(view)}")
    names = bytes(view[FIXED_BYTES:end])
    (found,) = _CHECKSUM.unpack_from(view, _FIXED.size)
    expected = xxhash.xxh3_64_intdigest(bytes(view[: _FIXED.size]) + names)
    if found != expected:
        raise ChecksumError(f"frame head checksum: expected {expected:016x}, found {found:016x}")
    if length > MAX_DATA_BYTES:
        raise LimitError(f"frame data: expected at most {MAX_DATA_BYTES} bytes, found {length}")
    if status not in STATUSES or flags > FLAG_LAST or zero or not key_bytes:
        raise FormatError(
            f"expected a known status, flags 0 or 1, zero and a key, "
            f"found {status}, {flags}, {zero}, {key_bytes} bytes"
        )
    etag_end = key_bytes + etag_bytes
    return Frame(
        index, status, names[:key_bytes], names[key_bytes:etag_end], names[etag_end:],
        object_bytes, start, length, saved_s, checksum, bool(flags & FLAG_LAST),
    )  # fmt: skip


def split(body: bytes | memoryview) -> Iterator[tuple[Frame, memoryview]]:
    """The frames of a whole body, data verified."""
    view = memoryview(body).cast("B")
    while len(view):
        frame = parse(view)
        end = frame.head_bytes + frame.length
        if len(view) < end:
            raise TruncatedError(f"expected a frame of {end} bytes, found {len(view)}")
        data = view[frame.head_bytes : end]
        found = xxhash.xxh3_64_intdigest(data)
        if found != frame.checksum:
            raise ChecksumError(
                f"frame data checksum: expected {frame.checksum:016x}, found {found:016x}"
            )
        yield frame, data
        view = view[end:]
