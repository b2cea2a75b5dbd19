"""Reading objects from the files of a folder, verified block by block. It changes nothing, so many
processes may do it at once, beside the one that has the folder open."""

from __future__ import annotations

from pathlib import Path

from kdn.errors import FormatError, TruncatedError
from kdn.store.base import Entry, Span, clip
from kdn.store.disk_files import Files, named_errors
from kdn.store.disk_format import (
    BLOCK_BYTES,
    Header,
    declared_header_bytes,
    decode_header,
    verify_blocks,
)

_HEAD_BYTES = 4096  # holds the header of any object up to 30 MB


class ObjectReader:
    """`folder`: that of a `DiskStore`."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._objects = folder / "objects"
        self._files = files

    def read(self, entry: Entry, start: int, end: int | None) -> Span | None:
        """Verified bytes of an object, and what its file says of it; None if that is gone,
        FormatError if it is damaged."""
        with named_errors(f"read {file_name(entry)}"):
            try:
                fd = self._files.open(self._objects / file_name(entry))
            except FileNotFoundError:
                return None
            try:
                header, _ = self._read_header(fd, entry.key, entry.etag)
                begin, stop = clip(start, end, header.entry.size_bytes)
                data = self._read_verified(fd, header, begin, stop)
            finally:
                self._files.close(fd)
        return Span(header.entry, begin, data)

    def open(self, entry: Entry) -> tuple[int, Header] | None:
        """An open file and its verified header; None if there is none, or it is damaged."""
        try:
            fd = self._files.open(self._objects / file_name(entry))
        except OSError:
            return None
        try:
            return fd, self._read_header(fd, entry.key, entry.etag)[0]
        except (OSError, FormatError):
            self._files.close(fd)
            return None

    def _read_header(self, fd: int, key: bytes, etag: bytes) -> tuple[Header, int]:
        """The verified header of an open file and the time of its last change."""
        size_bytes, time_ns = self._files.size_and_time(fd)
        head = self._read_exactly(fd, min(size_bytes, _HEAD_BYTES), 0)
        declared = declared_header_bytes(head)
        if len(head) < declared <= size_bytes:
            head = self._read_exactly(fd, declared, 0)
        header = decode_header(head)
        if header.file_bytes != size_bytes:
            raise TruncatedError(f"expected {header.file_bytes} bytes, found {size_bytes}")
        if (header.entry.key, header.entry.etag) != (key, etag):
            raise FormatError(f"expected the object its name says, found {file_name(header.entry)}")
        return header, time_ns

    def _read_verified(self, fd: int, header: Header, start: int, end: int) -> memoryview:
        """Bytes [start, end) of the object, read and verified in whole blocks."""
        first, last = blocks_of(start, end, header)
        blocks = memoryview(self._read_exactly(fd, last - first, header.header_bytes + first))
        return verified(header, blocks, first, start, end)

    def _read_exactly(self, fd: int, size_bytes: int, start: int) -> bytes:
        data = self._files.read(fd, size_bytes, start)
        while len(data) < size_bytes:
            more = self._files.read(fd, size_bytes - len(data), start + len(data))
            if not more:
                raise TruncatedError(f"expected {size_bytes} bytes at {start}, found {len(data)}")
            data += more
        return data


def file_name(entry: Entry) -> str:
    return f"{entry.key.hex()}-{entry.etag.hex()}"


def blocks_of(start: int, end: int, header: Header) -> tuple[int, int]:
    """The part of an object in whole blocks that has its bytes [start, end)."""
    if start == end:
        return start, start
    last = -(-end // BLOCK_BYTES) * BLOCK_BYTES
    return start // BLOCK_BYTES * BLOCK_BYTES, min(last, header.entry.size_bytes)


def verified(header: Header, blocks: memoryview, first: int, start: int, end: int) -> memoryview:
    """Bytes [start, end) of `blocks`, which begin at `first`. ChecksumError if one is wrong."""
    verify_blocks(header, first // BLOCK_BYTES, blocks)
    return blocks[start - first : end - first]
