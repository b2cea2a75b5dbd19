"""Pieces of the centre's objects, kept in the region's own store.

A reader asks for the levels it wants, so of many objects a region has a part. Each byte range that
was fetched is an object of its own in the region's store, under a key of its own collection:

    key  = tenant | "q" | collection | key of the object | start (5 bytes, big-endian)
    data = magic "KDNP" | bytes of the parent (u8, 255: none) | size of the object (u64)
         | seconds saved (f64) | parent, and zeros up to 64 bytes
         | the bytes [start, start + n) of the object

All integers of the data are little-endian. The etag is the object's. So the store's checksums guard
pieces as they guard all else, its shares and its eviction hold for them, and what is damaged or
evicted is simply fetched again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from kdn.errors import FormatError
from kdn.region.flight import Flight
from kdn.store.base import MAX_KEY_BYTES, Entry, Hints

LETTER = b"q"
PREFIX_BYTES = 8
"""Of a tenant's keys (`depot/tenants.py`); the letter of the collection follows."""
START_BYTES = 5
MAX_OBJECT_BYTES = 1 << 8 * START_BYTES
MAGIC, NO_PARENT = b"KDNP", 255
_FIXED = struct.Struct("<4sBQd")
HEAD_BYTES = _FIXED.size + MAX_KEY_BYTES
assert HEAD_BYTES == 85


def piece_key(key: bytes, start: int) -> bytes:
    return key[:PREFIX_BYTES] + LETTER + key[PREFIX_BYTES:] + start.to_bytes(START_BYTES, "big")


def split_key(piece: bytes) -> tuple[bytes, int]:
    """The key of the object, and where the piece begins in it."""
    key = piece[:PREFIX_BYTES] + piece[PREFIX_BYTES + 1 : -START_BYTES]
    return key, int.from_bytes(piece[-START_BYTES:], "big")


def pack_head(entry: Entry) -> bytes:
    parent, saved_s = entry.hints.parent, entry.hints.saved_s
    size = NO_PARENT if parent is None else len(parent)
    head = _FIXED.pack(MAGIC, size, entry.size_bytes, saved_s) + (parent or b"")
    return head.ljust(HEAD_BYTES, b"\0")


def parse_head(key: bytes, etag: bytes, head: bytes) -> Entry:
    """The object that a piece is of."""
    if len(head) != HEAD_BYTES or head[:4] != MAGIC:
        raise FormatError("expected the head of a piece")
    _, size, size_bytes, saved_s = _FIXED.unpack_from(head)
    parent = None if size == NO_PARENT else head[_FIXED.size : _FIXED.size + size]
    return Entry(key, etag, size_bytes, Hints(parent, saved_s))


@dataclass
class Partial:
    """What is here of one object, and what is on its way."""

    key: bytes
    etag: bytes
    entry: Entry | None = None
    """None until the head of a piece was read, after a start."""
    rest: dict[int, int] = field(default_factory=dict)
    """Pieces at rest: where each begins and ends."""
    flights: list[Flight] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Everything is at rest here."""
        size_bytes = sum(end - start for start, end in self.rest.items())
        return self.entry is not None and size_bytes == self.entry.size_bytes

    def resting(self, position: int) -> tuple[int, int] | None:
        """The piece that has this byte."""
        for start, end in self.rest.items():
            if start <= position < end:
                return start, end
        return None

    def flying(self, position: int) -> Flight | None:
        for flight in self.flights:
            if flight.start <= position < flight.end:
                return flight
        return None

    def gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of [start, end) is neither here nor on its way."""
        here = sorted([*self.rest.items(), *((f.start, f.end) for f in self.flights)])
        for first, last in here:
            if last <= start:
                continue
            if first >= end:
                break
            if first > start:
                yield start, first
            start = max(start, last)
        if start < end:
            yield start, end
