"""How an object lies in Redis: one string under its key, which begins with a record of it.

    kdn:{6b6579}             the record (256 bytes), then the first 8 MiB of the object
    kdn:{6b6579}:NONCE:1     the next 8 MiB, of an object that is longer; and so on

So a key is published with one `SET NX`, a beginning and its record are read in one command, and the
server cannot evict one without the other. The braces keep all parts of an object in one slot of a
Cluster. The nonce is new for every put: parts of two writers are never taken for one object.

The record, little-endian (docs/cluster.md):

    magic "KDR1", u8 bytes of the etag, 32 etag, u8 parent (0 or 1), u8 its bytes, 64 parent,
    f64 saved_s, u64 size, u64 xxh3-64 of the object, 16 nonce, zeros, u64 xxh3-64 of key and record
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from kdn.errors import ChecksumError, LimitError, MalformedError, TruncatedError
from kdn.protocol.frames import MAX_ETAG_BYTES
from kdn.protocol.limits import MAX_PROFILE_BYTES
from kdn.store.base import MAX_KEY_BYTES, Entry, Hints

MAGIC = b"KDR1"
RECORD_BYTES = 256
PART_BYTES = 8 << 20
MAX_OBJECT_BYTES = MAX_PROFILE_BYTES
NONCE_BYTES = 16
REMEMBERED = 4096
"""Records that were read last: whoever reads an object has looked it up just before. 3 MB."""
_FIELDS = struct.Struct(f"<4sB{MAX_ETAG_BYTES}sBB{MAX_KEY_BYTES}sdQQ{NONCE_BYTES}s")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True)
class Record:
    entry: Entry
    checksum: int
    nonce: bytes

    @property
    def first_bytes(self) -> int:
        """Of the object, in the string that the record begins."""
        return min(self.entry.size_bytes, PART_BYTES)

    @property
    def num_parts(self) -> int:
        """Strings, the first one counted."""
        return max(1, -(-self.entry.size_bytes // PART_BYTES))

    def part_bytes(self, part: int) -> int:
        return min(PART_BYTES, self.entry.size_bytes - part * PART_BYTES)


def new_record(entry: Entry, checksum: int) -> Record:
    return Record(entry, checksum, os.urandom(NONCE_BYTES))


def pack_record(record: Record) -> bytes:
    entry, parent = record.entry, record.entry.hints.parent
    fields = _FIELDS.pack(
        MAGIC, len(entry.etag), entry.etag, parent is not None, len(parent or b""), parent or b"",
        entry.hints.saved_s, entry.size_bytes, record.checksum, record.nonce,
    )  # fmt: skip
    padded = fields.ljust(RECORD_BYTES - _SUM.size, b"\0")
    return padded + _SUM.pack(xxh3_64_intdigest(entry.key + padded))


@lru_cache(REMEMBERED)
def parse_record(key: bytes, data: bytes) -> Record:
    """FormatError if these bytes are no record of an object with this key."""
    if len(data) < RECORD_BYTES:
        raise TruncatedError(f"expected a record of {RECORD_BYTES} bytes, found {len(data)}")
    padded, [expected] = data[: -_SUM.size], _SUM.unpack(data[-_SUM.size :])
    if len(data) != RECORD_BYTES or padded[:4] != MAGIC:
        raise MalformedError(
            f"expected a record of {RECORD_BYTES} bytes that begins with {MAGIC!r}"
        )
    if xxh3_64_intdigest(key + padded) != expected:
        raise ChecksumError("expected a record of this key, found another or a damaged one")
    _, num_etag, etag, has_parent, num_parent, parent, saved_s, size_bytes, checksum, nonce = (
        _FIELDS.unpack_from(padded)
    )
    if not 1 <= num_etag <= MAX_ETAG_BYTES or num_parent > MAX_KEY_BYTES:
        raise LimitError(f"expected names within their limits, found {num_etag}, {num_parent}")
    if size_bytes > MAX_OBJECT_BYTES or not 0 <= saved_s < math.inf:
        raise LimitError(f"expected a size and seconds saved, found {size_bytes}, {saved_s}")
    hints = Hints(parent[:num_parent] if has_parent else None, saved_s)
    return Record(Entry(key, etag[:num_etag], size_bytes, hints), checksum, nonce)


class Keys:
    """How keys of objects are written in Redis, in hexadecimal: any bytes may stand in them, and a
    brace would end what a Cluster takes for the slot's name."""

    def __init__(self, prefix: str) -> None:
        self._start = f"{prefix}:{{".encode()

    def of(self, key: bytes) -> bytes:
        return self._start + key.hex().encode() + b"}"

    def of_part(self, record: Record, part: int) -> bytes:
        """Of the second string of an object and those after it."""
        return self.of(record.entry.key) + b":%s:%d" % (record.nonce.hex().encode(), part)

    def pattern(self, prefix: bytes) -> bytes:
        """Matches the first strings of all objects whose key begins so."""
        return self._start + prefix.hex().encode() + b"*}"

    def parse(self, name: bytes) -> bytes:
        """FormatError if no object has its first string there."""
        if not name.startswith(self._start) or not name.endswith(b"}"):
            raise MalformedError(f"expected a key of an object, found {name[:80]!r}")
        text = name[len(self._start) : -1]
        try:
            key = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            raise MalformedError(f"expected hex digits, found {name[:80]!r}") from None
        if self.of(key) != name or not 1 <= len(key) <= MAX_KEY_BYTES:
            raise MalformedError(f"expected a key of an object, found {name[:80]!r}")
        return key
