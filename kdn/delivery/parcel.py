"""An encoded chunk on its way to a place, and the file it waits in. All integers are little-endian.

    file = magic "KDNS" | version (u16) | bytes of key, etag, parent, replacing (u8 each)
         | seconds saved (f64) | bytes of data (u64) | checksum (u64)
         | key | etag | parent | replacing | data

The checksum is the XXH3-64 of everything else in the file, in order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise

from xxhash import xxh3_64

from kdn.errors import ChecksumError, FormatError, TruncatedError
from kdn.store.base import Hints

MAGIC = b"KDNS"
VERSION = 2
_HEAD = struct.Struct("<4sHBBBBdQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True)
class Parcel:
    """What a put into a store takes."""

    key: bytes
    etag: bytes
    data: bytes
    hints: Hints
    replacing: bytes | None = None
    """The etag of a stream that nobody can use, which gives way to this one."""


def pack(parcel: Parcel) -> bytes:
    names = (parcel.key, parcel.etag, parcel.hints.parent or b"", parcel.replacing or b"")
    sizes, size_bytes = map(len, names), len(parcel.data)
    head = _HEAD.pack(MAGIC, VERSION, *sizes, parcel.hints.saved_s, size_bytes)
    body = b"".join((*names, parcel.data))
    return head + _CHECKSUM.pack(_digest(head, body)) + body


def unpack(file: bytes) -> Parcel:
    size = _HEAD.size + _CHECKSUM.size
    if len(file) < size:
        raise TruncatedError(f"expected at least {size} bytes, found {len(file)}")
    magic, version, *sizes, saved_s, size_bytes = _HEAD.unpack_from(file)
    if (magic, version) != (MAGIC, VERSION):
        raise FormatError(f"expected {MAGIC!r}, version {VERSION}, found {magic!r}, {version}")
    body = memoryview(file)[size:]
    if len(body) != sum(sizes) + size_bytes:
        raise TruncatedError(f"expected {sum(sizes) + size_bytes} bytes, found {len(body)}")
    (expected,) = _CHECKSUM.unpack_from(file, _HEAD.size)
    if _digest(file[: _HEAD.size], body) != expected:
        raise ChecksumError("a spooled chunk differs from what was written")
    ends = accumulate((*sizes, size_bytes), initial=0)
    key, etag, parent, replacing, data = (bytes(body[start:end]) for start, end in pairwise(ends))
    return Parcel(key, etag, data, Hints(parent or None, saved_s), replacing or None)


def _digest(head: bytes, body: bytes | memoryview) -> int:
    digest = xxh3_64(head)
    digest.update(body)
    return digest.intdigest()
