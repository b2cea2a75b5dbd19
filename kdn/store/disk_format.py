"""One object in one file: a header that describes and verifies it, then its bytes.

All integers are little-endian.

    0    8  magic "KDNFILE\\0"
    8    4  version: 1, or 2 if it may be cut
    12   4  header size in bytes: everything before the object's bytes
    16   8  object size in bytes
    24   8  float64: seconds of prefill saved (a hint)
    32   1  length of the key, 1 to 64
    33   1  length of the etag, 1 to 32
    34   1  length of the parent's key (a hint), 0 to 64; 255: none
    35   1  number of sizes at which it may be cut, 0 to 32; in version 1: zero
    36   4  zero
    40   .  key, etag, parent
         .  these sizes (a hint), rising, 8 each: the object's own is among them
         .  xxh3-64 of every 65,536 bytes of the object (the last block may be shorter), 8 each
         8  xxh3-64 of the header up to here
         .  the object

The file says everything about its object, so an index of many files can be rebuilt from them. The
checksums are per block, so any range can be verified by reading only the blocks it touches; they
come first, so that one small read brings them.

An object that is cut is written anew, with the same names and a smaller size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kdn.errors import ChecksumError, FormatError, TruncatedError
from kdn.protocol.frames import MAX_ETAG_BYTES
from kdn.store.base import MAX_KEY_BYTES, Entry, Hints, may_have

MAGIC = b"KDNFILE\0"
VERSION, VERSION_WITH_CUTS = 1, 2
BLOCK_BYTES = 1 << 16
NO_PARENT = 255

_FIXED = struct.Struct("<8sIIQdBBBB4x")
_SUM_BYTES = 8
_CUT_BYTES = 8
FIXED_BYTES = _FIXED.size
assert FIXED_BYTES == 40


@dataclass(frozen=True)
class Header:
    """A verified header: the object it describes, where its bytes begin, their checksums."""

    entry: Entry
    header_bytes: int
    block_sums: tuple[int, ...]

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.entry.size_bytes


def header_bytes(size_bytes: int, names_bytes: int, num_cuts: int = 0) -> int:
    """How long the header of an object is whose key, etag and parent have `names_bytes`."""
    hints_bytes = names_bytes + _CUT_BYTES * num_cuts
    return FIXED_BYTES + hints_bytes + _SUM_BYTES * (-(-size_bytes // BLOCK_BYTES) + 1)


def pack_cuts(cuts: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(cuts)}Q", *cuts)


def parse_cuts(data: bytes) -> tuple[int, ...]:
    count = len(data) // _CUT_BYTES
    return struct.unpack_from(f"<{count}Q", data)


def encode_header(entry: Entry, data: bytes) -> bytes:
    """The header of the file that holds `data`."""
    parent, cuts = entry.hints.parent, entry.hints.cuts
    names = entry.key + entry.etag + (parent or b"")
    fixed = _FIXED.pack(
        MAGIC,
        VERSION_WITH_CUTS if cuts else VERSION,
        header_bytes(len(data), len(names), len(cuts)),
        len(data),
        entry.hints.saved_s,
        len(entry.key),
        len(entry.etag),
        NO_PARENT if parent is None else len(parent),
        len(cuts),
    )
    blocks = memoryview(data)
    sums = [
        xxh3_64_intdigest(blocks[start : start + BLOCK_BYTES])
        for start in range(0, len(data), BLOCK_BYTES)
    ]
    head = fixed + names + pack_cuts(cuts) + struct.pack(f"<{len(sums)}Q", *sums)
    return head + struct.pack("<Q", xxh3_64_intdigest(head))


def declared_header_bytes(head: bytes) -> int:
    """How many bytes of the file `decode_header` wants, said by its first FIXED_BYTES.

    Nothing is verified yet: compare it with the size of the file before reading so much.
    """
    if len(head) < FIXED_BYTES:
        raise TruncatedError(f"expected a header of {FIXED_BYTES} bytes or more, found {len(head)}")
    magic, version, declared, *_ = _FIXED.unpack_from(head)
    if magic != MAGIC:
        raise FormatError(f"expected magic {MAGIC!r}, found {magic!r}")
    if version not in (VERSION, VERSION_WITH_CUTS):
        raise FormatError(f"expected version {VERSION} or {VERSION_WITH_CUTS}, found {version}")
    return int(declared)


def decode_header(head: bytes) -> Header:
    """The inverse of `encode_header`; bytes after the header are ignored."""
    declared = declared_header_bytes(head)
    if not FIXED_BYTES + _SUM_BYTES <= declared <= len(head):
        raise TruncatedError(f"expected a header of {declared} bytes, found {len(head)}")
    _verify(memoryview(head)[: declared - _SUM_BYTES], _sums(head, declared - _SUM_BYTES, 1)[0])
    _, version, _, size_bytes, saved_s, *lengths, num_cuts = _FIXED.unpack_from(head)
    key_len, etag_len, parent_len = lengths
    no_parent = parent_len == NO_PARENT
    etag_at = FIXED_BYTES + key_len
    parent_at = etag_at + etag_len
    cuts_at = parent_at + (0 if no_parent else parent_len)
    sums_at = cuts_at + _CUT_BYTES * num_cuts
    parent = None if no_parent else head[parent_at:cuts_at]
    hints = Hints(parent, saved_s, parse_cuts(head[cuts_at:sums_at]))
    entry = Entry(head[FIXED_BYTES:etag_at], head[etag_at:parent_at], size_bytes, hints)
    # A header whose checksum fits was written by someone; these say that it was us.
    if not (1 <= key_len <= MAX_KEY_BYTES and 1 <= etag_len <= MAX_ETAG_BYTES):
        raise FormatError(f"key and etag have {key_len} and {etag_len} bytes")
    if (version == VERSION_WITH_CUTS) != bool(num_cuts) or not may_have(hints.cuts, size_bytes):
        raise FormatError(f"version {version}, {size_bytes} bytes, cut at {hints.cuts}")
    expected = header_bytes(size_bytes, cuts_at - FIXED_BYTES, num_cuts)
    if declared != expected:
        raise FormatError(f"expected a header of {expected} bytes, found {declared}")
    return Header(entry, declared, _sums(head, sums_at, -(-size_bytes // BLOCK_BYTES)))


def verify_blocks(header: Header, first_block: int, data: memoryview) -> None:
    """Check `data`, which begins with block `first_block`; ChecksumError if a byte is wrong."""
    for start in range(0, len(data), BLOCK_BYTES):
        expected = header.block_sums[first_block + start // BLOCK_BYTES]
        _verify(data[start : start + BLOCK_BYTES], expected)


def _sums(head: bytes, start: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", head, start)


def _verify(data: memoryview, expected: int) -> None:
    found = xxh3_64_intdigest(data)
    if found != expected:
        raise ChecksumError(f"expected bytes with xxh3-64 {expected:016x}, found {found:016x}")
