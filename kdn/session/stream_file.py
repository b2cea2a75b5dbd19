"""A file of the host's memory that holds one stream, and reading from it.

A small head of our own comes first: where each level ends in the file, and a checksum of each.
Then the stream follows as it is stored, with as many levels as there were. A file appears whole and
is never written to again; it is only cut, at the end of a level, when room is short. So it is not
mapped: what is cut off while it is read would kill the reader (SIGBUS). It is read straight into
the buffer that a decoder has for it, and what is missing by then is a short read, a miss. Files are
not pinned, either: a decoder's own staging buffers are.

A level is checked with xxh3 when a process first reads it. From then on it is read as it is, for
as long as the file is the same: it lies in memory, and nobody writes to it. The header's SHA-256
digests, five to twenty times slower, were checked before the file was written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kdn.codec.format import Buffer, Copy, LevelSource
from kdn.codec.header import MAX_HEADER_BYTES, MAX_LEVELS, Header
from kdn.errors import ChecksumError, FormatError, LimitError, TruncatedError

MAGIC = b"\x89KDNheld"
START_BYTES = 4096
"""Holds head and header of nearly every stream; longer ones are read again, whole."""
_FIXED = struct.Struct("<8sII")
_SUM = struct.Struct("<Q")
NOT_HERE = 0
"""In place of the checksum of a level that never was in the file."""


@dataclass(frozen=True)
class FileHead:
    """The head of a file, parsed and verified."""

    stream_at: int
    """Where the stream begins in the file."""
    header_bytes: int
    """Size of the stream's own header."""
    level_ends: tuple[int, ...]
    """Where each level ends in the file, including levels that are no longer there."""
    sums: tuple[int, ...]

    @classmethod
    def of(cls, header: Header, data: memoryview, levels: int) -> FileHead:
        """Of a file for the first levels of the stream `data`."""
        count, ends = header.info.num_levels, header.level_ends
        starts = [header.level_start(level) for level in range(levels)]
        sums = [xxh3_64_intdigest(data[a:b]) for a, b in zip(starts, ends, strict=False)]
        sums += [NOT_HERE] * (count - levels)
        return cls(_head_bytes(count), header.size_bytes, ends_in_file(header), tuple(sums))

    def pack(self, header: Buffer) -> bytes:
        """The file's first bytes. They vouch for the stream's header, too."""
        count = len(self.sums)
        head = _FIXED.pack(MAGIC, count, self.header_bytes)
        head += struct.pack(f"<{2 * count}Q", *self.level_ends, *self.sums)
        return head + _SUM.pack(_digest(head, header))

    def levels_in(self, size_bytes: int) -> int:
        """How many of the first levels a file of that size holds."""
        return sum(end <= size_bytes for end in self.level_ends)


def ends_in_file(header: Header) -> tuple[int, ...]:
    """Where each level of a stream will end."""
    at = _head_bytes(header.info.num_levels)
    return tuple(at + end for end in header.level_ends)


def parse_head(start: bytes) -> FileHead:
    """From a file's first bytes. TruncatedError if `start` ends before the stream's header, see
    `start_size`; another FormatError if it is none that we wrote."""
    count, header_bytes = _sizes(start)
    at = _head_bytes(count)
    if len(start) < at + header_bytes:
        raise TruncatedError(f"expected {at + header_bytes} bytes, found {len(start)}")
    numbers = struct.unpack_from(f"<{2 * count}Q", start, _FIXED.size)
    head, header = memoryview(start)[: at - _SUM.size], memoryview(start)[at : at + header_bytes]
    if _SUM.unpack_from(start, len(head))[0] != _digest(head, header):
        raise ChecksumError("the head of a held stream is damaged")
    return FileHead(at, header_bytes, numbers[:count], numbers[count:])


def start_size(start: bytes) -> int:
    """How many bytes a file's head and its stream's header have."""
    count, header_bytes = _sizes(start)
    return _head_bytes(count) + header_bytes


def read_start(file: int) -> bytes:
    """Head and header, and whatever comes after them in START_BYTES."""
    start = os.pread(file, START_BYTES, 0)
    size = start_size(start)
    return start if size <= len(start) else os.pread(file, size, 0)


def _sizes(start: bytes) -> tuple[int, int]:
    if len(start) < _FIXED.size:
        raise TruncatedError(f"expected a held stream, found {len(start)} bytes")
    magic, count, header_bytes = _FIXED.unpack_from(start)
    if magic != MAGIC:
        raise FormatError(f"expected {MAGIC!r}, found {magic!r}")
    if not 1 <= count <= MAX_LEVELS or header_bytes > MAX_HEADER_BYTES:
        raise LimitError(f"a held stream of {count} levels, with {header_bytes} bytes of header")
    return count, header_bytes


def _head_bytes(num_levels: int) -> int:
    return _FIXED.size + 16 * num_levels + _SUM.size


def _digest(head: Buffer, header: Buffer) -> int:
    return xxh3_64_intdigest(header, seed=xxh3_64_intdigest(head))


class HeldLevels(LevelSource):
    """The first levels of a stream, in an open file: read when they are wanted, all that are wanted
    or none. TruncatedError if they are not there any more, ChecksumError if they are not what was
    written. For any thread, as long as the file is open."""

    def __init__(
        self, header: Header, head: FileHead, levels: int, file: int, checked: list[int]
    ) -> None:
        """`levels`: so many are in the file, as far as is known. `checked`: one number, so many of
        them were checked by this process."""
        self._header, self._head, self._count = header, head, levels
        self._file, self._checked = file, checked
        self._here: dict[int, memoryview] = {}

    def read_into(self, buffer: memoryview, first: int, last: int) -> None:
        """The interpreter's lock is free meanwhile."""
        starts = [self._header.level_start(level) for level in range(first, last)]
        ends = self._header.level_ends[first:last]
        assert len(buffer) == ends[-1] - starts[0]
        self._read(buffer, self._head.stream_at + starts[0])
        for level, start, end in zip(range(first, last), starts, ends, strict=True):
            part = buffer[start - starts[0] : end - starts[0]]
            if xxh3_64_intdigest(part) != self._head.sums[level]:
                raise ChecksumError(f"level {level} of a held stream is damaged")
        if first <= self._checked[0]:
            self._checked[0] = max(self._checked[0], last)

    def copies(self, levels: int) -> list[Copy] | None:
        """Where they lie in the file, if they were checked before."""
        if levels > min(self._checked[0], self._count):
            return None
        first, size = self._header.size_bytes, self._header.level_end(levels - 1)
        return [Copy(self._file, self._head.stream_at + first, size - first)]

    def _read(self, buffer: memoryview, at: int) -> None:
        try:
            while buffer:
                count = os.preadv(self._file, [buffer], at)
                if not count:
                    raise TruncatedError("levels of a held stream have gone meanwhile")
                buffer, at = buffer[count:], at + count
        except OSError as error:
            raise TruncatedError(f"a held stream has gone meanwhile: {error}") from error

    def __getitem__(self, level: int) -> memoryview:
        if level not in self:
            raise KeyError(level)
        if level not in self._here:  # two threads may both do it: once is enough, twice right
            data = bytearray(self._header.level_end(level) - self._header.level_start(level))
            self.read_into(memoryview(data), level, level + 1)
            self._here[level] = memoryview(data).toreadonly()
        return self._here[level]

    def __contains__(self, level: object) -> bool:
        return isinstance(level, int) and 0 <= level < self._count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def __len__(self) -> int:
        return self._count
