"""Streams on their way from the rank that fetches them to the others of its host.

A load is one file that the first appends to and each of the others reads as it grows: records of
the chunk's number in the order, how many levels follow, their size and a checksum, then the bytes.
The last record says that this was all. If the first cannot go on (no memory is left), it empties
the file: then the others have to fetch the rest themselves. For that a byte is before all records:
its page of memory stays, with room for the record that says so. If not even a file can be made,
they are refused at once.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from kdn.engines.vllm.rank_folder import RankFolder, load_name
from kdn.errors import ChecksumError, FormatError
from kdn.protocol.limits import MAX_CHUNK_BYTES

logger = logging.getLogger(__name__)

LOAD_BYTES = 2 << 30
"""Of one load. What comes after that the others fetch themselves."""
_RECORD = struct.Struct("<8sIIQQ")
_MAGIC = b"\x89KDNrank"
_BEGINNING = b"\n"
_END, _EMPTIED = 0, 0xFFFFFFFF
"""In the place of a number of levels."""


class Record(NamedTuple):
    number: int
    """Of the chunk, in the order."""
    levels: int
    data: npt.NDArray[np.uint8]


class State(Enum):
    WAITING = "the first has not begun"
    GROWING = "there may be more"
    ENDED = "that was all"
    LEFT = "the first cannot go on"


class StreamsOut:
    """Used by one thread at a time."""

    def __init__(self, folder: RankFolder, number: int, readers: Sequence[int]) -> None:
        self._folder = folder
        self._names = [load_name(number, reader) for reader in readers]
        self._held_bytes = 0
        try:
            self._fd = folder.create(self._names, _BEGINNING)
        except OSError as error:
            logger.warning("other ranks of this host go without this load: %s", error)
            self._fd = -1
            folder.refuse(self._names)

    def put(self, number: int, levels: int, parts: Sequence[bytes | memoryview]) -> None:
        """All later ones are dropped once one has failed."""
        if self._fd < 0:
            return
        size, digest = sum(map(len, parts)), xxh3_64()
        for part in parts:
            digest.update(part)
        head = _RECORD.pack(_MAGIC, number, levels, size, digest.intdigest())
        try:
            if self._held_bytes + size > self._folder.room_bytes(LOAD_BYTES, self._held_bytes):
                raise OSError("a load as large as all the room for it")
            self._held_bytes += size
            for part in (head, *parts):
                _write_all(self._fd, part)
        except OSError:
            self._empty()

    def _empty(self) -> None:
        with suppress(OSError):
            os.ftruncate(self._fd, len(_BEGINNING))
            os.pwrite(self._fd, _RECORD.pack(_MAGIC, 0, _EMPTIED, 0, 0), len(_BEGINNING))
        self.close()

    def end(self) -> None:
        if self._fd < 0:
            return
        try:
            _write_all(self._fd, _RECORD.pack(_MAGIC, 0, _END, 0, 0))
        except OSError:
            self._empty()
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def forget(self) -> None:
        """Who has not begun to read by now will not."""
        self.close()
        self._folder.remove(self._names)


class StreamsIn:
    """Used by one thread at a time."""

    def __init__(self, folder: RankFolder, number: int) -> None:
        self.state = State.WAITING
        self._folder, self._name = folder, load_name(number, folder.rank)
        self._fd, self._at = -1, len(_BEGINNING)

    def has_more(self) -> bool:
        """Cheap, to be asked again and again."""
        if self._fd < 0:
            fd = self._folder.fetch(self._name)
            if fd is None:
                return False
            self._fd, self.state = fd, State.GROWING
        size = os.fstat(self._fd).st_size
        return size != self._at and self.state is State.GROWING

    def read(self, most: int) -> list[Record]:
        """The next records that are whole. FormatError if the file is not what a rank wrote."""
        found: list[Record] = []
        while self.state is State.GROWING and len(found) < most:
            record = self._next()
            if record is None:
                break
            found.append(record)
        return found

    def _next(self) -> Record | None:
        size = os.fstat(self._fd).st_size
        if size < self._at:
            self.state = State.LEFT
        if size < self._at + _RECORD.size:
            return None
        told = os.pread(self._fd, _RECORD.size, self._at)
        if len(told) < _RECORD.size:
            return None  # emptied meanwhile: seen next time
        magic, number, levels, length, checksum = _RECORD.unpack(told)
        if magic != _MAGIC or length > MAX_CHUNK_BYTES:
            raise FormatError(f"expected a record of {_MAGIC!r}, found {magic!r} of {length} bytes")
        if levels in (_END, _EMPTIED):
            self.state = State.ENDED if levels == _END else State.LEFT
            return None
        if size < self._at + _RECORD.size + length:
            return None
        data = self._read(self._at + _RECORD.size, length)
        if data is None:
            return None
        if xxh3_64(data.data).intdigest() != checksum:
            raise ChecksumError("a stream from another rank is damaged")
        self._at += _RECORD.size + length
        return Record(number, levels, data)

    def _read(self, start: int, length: int) -> npt.NDArray[np.uint8] | None:
        data = np.empty(length, dtype=np.uint8)
        view, done = data.data, 0
        while done < length:
            count = os.preadv(self._fd, [view[done:]], start + done)
            if not count:
                return None  # emptied meanwhile
            done += count
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(fd, view) :]
