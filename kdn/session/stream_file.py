"""A file of the host's memory that holds one stream, and reading from it.

A small front of our own comes first: where each level ends in the file, and a checksum of each.
Then the stream follows as it is stored, with as many levels as there were. A file appears whole and
is never written to again; it is only cut, at the end of a level, when room is short. So it is not
mapped: what is cut off while it is read would kill the reader (SIGBUS). It is read straight into
the buffer that a decoder has for it, and what is missing by then is a short read, a miss. Files are
not pinned, either: a decoder's own staging buffers are.

Every level is checked with xxh3 each time it is read, by the thread that reads it: in the
processor's cache still, that costs a fifth of what reading takes (1.2 MB: 43 us beside 200). The
header's SHA-256 digests, five to twenty times slower, were checked before the file was written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kdn.codec.format import Bitstream, Buffer
from kdn.codec.header import MAX_HEADER_BYTES, MAX_LEVELS, Header
from kdn.errors import ChecksumError, FormatError, LimitError, TruncatedError

MAGIC = b"\x89KDNheld"
HEAD_BYTES = 4096
"""Holds front and header of nearly every stream; longer ones are read again, whole."""
_FIXED = struct.Struct("<8sII")
_SUM = struct.Struct("<Q")
NOT_HERE = 0
"""In place of the checksum of a level that never was in the file."""


@dataclass(frozen=True)
class Front:
    """What a file says of itself, intact."""

    stream_at: int
    """Where the stream begins in the file."""
    header_bytes: int
    """Of the stream's own header."""
    level_ends: tuple[int, ...]
    """Where each level of the stream ends in the file, those included that are not here."""
    sums: tuple[int, ...]

    def levels_in(self, size_bytes: int) -> int:
        """How many of the first levels a file of that size holds."""
        return sum(end <= size_bytes for end in self.level_ends)

    @property
    def head_bytes(self) -> int:
        """Of front and header together."""
        return self.stream_at + self.header_bytes


def pack_front(header: Header, data: memoryview, levels: int) -> bytes:
    """What comes before `data`, a stream with so many levels."""
    count = header.info.num_levels
    starts = [header.level_start(level) for level in range(levels)]
    spans = zip(starts, header.level_ends, strict=False)
    sums = [xxh3_64_intdigest(data[start:end]) for start, end in spans]
    sums += [NOT_HERE] * (count - levels)
    at = _front_bytes(count)
    ends = [at + end for end in header.level_ends]
    front = _FIXED.pack(MAGIC, count, header.size_bytes) + struct.pack(
        f"<{2 * count}Q", *ends, *sums
    )
    return front + _SUM.pack(_digest(front, data[: header.size_bytes]))


def parse_front(head: bytes) -> Front:
    """From a file's first bytes. TruncatedError if `head` does not reach to the end of the stream's
    header, see `head_size`; another FormatError if it is none that we wrote."""
    count, header_bytes = _sizes(head)
    at = _front_bytes(count)
    if len(head) < at + header_bytes:
        raise TruncatedError(f"expected {at + header_bytes} bytes of head, found {len(head)}")
    numbers = struct.unpack_from(f"<{2 * count}Q", head, _FIXED.size)
    front, header = memoryview(head)[: at - _SUM.size], memoryview(head)[at : at + header_bytes]
    if _SUM.unpack_from(head, len(front))[0] != _digest(front, header):
        raise ChecksumError("the head of a held stream is damaged")
    return Front(at, header_bytes, numbers[:count], numbers[count:])


def head_size(head: bytes) -> int:
    """How many bytes a file's front and its stream's header have."""
    count, header_bytes = _sizes(head)
    return _front_bytes(count) + header_bytes


def read_head(file: int) -> bytes:
    """Front and header, and whatever comes after them in HEAD_BYTES."""
    head = os.pread(file, HEAD_BYTES, 0)
    size = head_size(head)
    return head if size <= len(head) else os.pread(file, size, 0)


def _sizes(head: bytes) -> tuple[int, int]:
    if len(head) < _FIXED.size:
        raise TruncatedError(f"expected a held stream, found {len(head)} bytes")
    magic, count, header_bytes = _FIXED.unpack_from(head)
    if magic != MAGIC:
        raise FormatError(f"expected {MAGIC!r}, found {magic!r}")
    if not 1 <= count <= MAX_LEVELS or header_bytes > MAX_HEADER_BYTES:
        raise LimitError(f"a held stream of {count} levels, with {header_bytes} bytes of header")
    return count, header_bytes


def _front_bytes(num_levels: int) -> int:
    return _FIXED.size + 16 * num_levels + _SUM.size


def _digest(front: Buffer, header: Buffer) -> int:
    return xxh3_64_intdigest(header, seed=xxh3_64_intdigest(front))


class HeldStream(Bitstream):
    """A stream of which the header is here, and the levels in a file. It reads them when they are
    wanted, all or none of them: TruncatedError if they are not there any more, ChecksumError if
    they are not what was written. For any thread, as long as the folder is open."""

    def __init__(
        self,
        header: Header,
        front: Front,
        levels: int,
        open_file: Callable[[], AbstractContextManager[int]],
    ) -> None:
        """`levels`: so many are in the file, as far as is known."""
        super().__init__(header, _Levels(levels, self._read_level), verified=range(levels))
        self._front, self._open_file = front, open_file

    def read_into(self, buffer: Buffer, first_level: int, end_level: int) -> int:
        """Levels [first_level, end_level), one after the other, to the beginning of `buffer`; how
        many bytes that is. The interpreter's lock is free meanwhile."""
        start = self.header.level_start(first_level)
        size = self.header.level_end(end_level - 1) - start
        view = memoryview(buffer).cast("B")[:size]
        if len(view) < size:
            raise LimitError(f"expected a buffer of {size} bytes, found {len(view)}")
        self._read(view, start)
        for level in range(first_level, end_level):
            own = view[
                self.header.level_start(level) - start : self.header.level_end(level) - start
            ]
            if xxh3_64_intdigest(own) != self._front.sums[level]:
                raise ChecksumError(f"level {level} of a held stream is damaged")
        return size

    def _read(self, view: memoryview, start: int) -> None:
        at = self._front.stream_at + start
        try:
            with self._open_file() as file:
                while view:
                    count = os.preadv(file, [view], at)
                    if not count:
                        raise TruncatedError("levels of a held stream have gone meanwhile")
                    view, at = view[count:], at + count
        except OSError as error:
            raise TruncatedError(f"a held stream has gone meanwhile: {error}") from error

    def _read_level(self, level: int) -> memoryview:
        data = bytearray(self.header.level_end(level) - self.header.level_start(level))
        self.read_into(data, level, level + 1)
        return memoryview(data).toreadonly()


class _Levels(Mapping[int, memoryview]):
    """Levels that are read when they are first asked for."""

    def __init__(self, count: int, read: Callable[[int], memoryview]) -> None:
        self._count, self._read = count, read
        self._here: dict[int, memoryview] = {}

    def __getitem__(self, level: int) -> memoryview:
        if not 0 <= level < self._count:
            raise KeyError(level)
        if level not in self._here:  # two threads may both do it: once is enough, twice right
            self._here[level] = self._read(level)
        return self._here[level]

    def __contains__(self, level: object) -> bool:
        return isinstance(level, int) and 0 <= level < self._count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def __len__(self) -> int:
        return self._count
