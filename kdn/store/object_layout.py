"""Where in a bucket the object of a key lies, and what its first bytes say.

    objects/<9 bytes of the key>/<the next byte>/<key>     all in hexadecimal

Paths sort as keys do, so a list by prefix is one range of the bucket. Nine bytes say whose an
object is and what kind (`depot/tenants.py`); by the tenth, objects of one owner are spread over 256
folders, for file systems and for servers that share work by prefixes.

An object is laid out as a file on disk (`disk_format.py`): a header that says and verifies
everything, then the bytes. So one ranged get of the beginning answers a lookup, and any part can be
verified. A header of an object up to 14 MiB is within the first HEAD_BYTES.
"""

from __future__ import annotations

import math

from kdn.errors import FormatError, LimitError, TruncatedError
from kdn.protocol.limits import MAX_PROFILE_BYTES
from kdn.store.base import MAX_KEY_BYTES
from kdn.store.disk_format import Header, declared_header_bytes, decode_header, header_bytes

FOLDER = "objects"
OWNER_CHARS = 18
SHARD_CHARS = 2
HEAD_BYTES = 2048
MAX_OBJECT_BYTES = MAX_PROFILE_BYTES
MAX_HEADER_BYTES = header_bytes(MAX_OBJECT_BYTES, 3 * 255)


def path_of(key: bytes) -> str:
    name = key.hex()
    owner = name[:OWNER_CHARS]
    shard = name[OWNER_CHARS : OWNER_CHARS + SHARD_CHARS] or "-"  # sorts before all others
    return f"{FOLDER}/{owner}/{shard}/{name}"


def key_of(path: str) -> bytes | None:
    """None for what is not ours."""
    try:
        key = bytes.fromhex(path.rsplit("/", 1)[-1])
    except ValueError:
        return None
    return key if key and len(key) <= MAX_KEY_BYTES and path_of(key) == path else None


def folder_of(prefix: bytes) -> str:
    """All objects whose key begins so are in here, and as few others as folders can tell apart."""
    name = prefix.hex()
    if len(name) < OWNER_CHARS:
        return FOLDER
    shard = name[OWNER_CHARS : OWNER_CHARS + SHARD_CHARS]
    return f"{FOLDER}/{name[:OWNER_CHARS]}" + (f"/{shard}" if shard else "")


def before(prefix: bytes) -> str | None:
    """A path before which no object has a key that begins so; None if nothing is."""
    name = prefix.hex()
    return f"{FOLDER}/{name}" if 0 < len(name) < OWNER_CHARS else None


def needed_bytes(head: bytes, size_bytes: int) -> int:
    """How long the header is that begins so, of an object that takes `size_bytes` in the bucket.
    FormatError if it cannot be."""
    declared = declared_header_bytes(head)
    if declared > MAX_HEADER_BYTES:
        raise LimitError(f"expected a header of at most {MAX_HEADER_BYTES}, found {declared}")
    if declared > size_bytes:
        raise TruncatedError(f"expected a header of {declared} bytes, found {size_bytes}")
    return declared


def checked_header(head: bytes, key: bytes, size_bytes: int) -> Header:
    """The header of exactly this key's object, of which all is there. FormatError otherwise."""
    header = decode_header(head)
    entry = header.entry
    if entry.key != key:
        raise FormatError(f"expected key {key.hex()}, found {entry.key.hex()}")
    if entry.size_bytes > MAX_OBJECT_BYTES:
        raise LimitError(f"expected at most {MAX_OBJECT_BYTES} bytes, found {entry.size_bytes}")
    if header.file_bytes != size_bytes:
        raise TruncatedError(f"expected {header.file_bytes} bytes in all, found {size_bytes}")
    if entry.hints.parent is not None and len(entry.hints.parent) > MAX_KEY_BYTES:
        raise LimitError(f"expected a parent of {MAX_KEY_BYTES} bytes at most")
    if not 0 <= entry.hints.saved_s < math.inf:
        raise FormatError(f"expected a number of seconds saved, found {entry.hints.saved_s}")
    return header
