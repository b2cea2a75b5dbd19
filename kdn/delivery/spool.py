"""Encoded chunks that wait on disk for a node to come back: bounded, and safe across restarts.

One file per chunk, written aside, synced, and renamed, for its owner's eyes only. What does not
verify when it is read is removed and counted; files of other names are left alone. All integers are
little-endian.

    file = magic "KDNS" | version (u16) | bytes of key, etag, parent (u8 each) | zero (u8)
         | seconds saved (f64) | bytes of data (u64) | checksum (u64) | key | etag | parent | data

The checksum is the XXH3-64 of everything else in the file, in order.
"""

from __future__ import annotations

import re
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64

from kdn.errors import ChecksumError, FormatError, TruncatedError
from kdn.files import private_file, private_folder, write_whole
from kdn.store.base import Hints

MAGIC = b"KDNS"
VERSION = 1
_HEAD = struct.Struct("<4sHBBBBdQ")
_CHECKSUM = struct.Struct("<Q")
_SUFFIX, _ASIDE = ".chunk", ".part"
_OURS = re.compile(r"(?:[0-9a-f]{2})+\.(?:chunk|part)")


@dataclass(frozen=True)
class Parcel:
    """An encoded chunk, ready to be put into a store."""

    key: bytes
    etag: bytes
    data: bytes
    hints: Hints


def pack(parcel: Parcel) -> bytes:
    parent = parcel.hints.parent or b""
    head = _HEAD.pack(
        MAGIC, VERSION, len(parcel.key), len(parcel.etag), len(parent), 0, parcel.hints.saved_s,
        len(parcel.data),
    )  # fmt: skip
    body = parcel.key + parcel.etag + parent + parcel.data
    return head + _CHECKSUM.pack(_digest(head, body)) + body


def unpack(file: bytes) -> Parcel:
    size = _HEAD.size + _CHECKSUM.size
    if len(file) < size:
        raise TruncatedError(f"expected at least {size} bytes, found {len(file)}")
    magic, version, key, etag, parent, zero, saved_s, data = _HEAD.unpack_from(file)
    if (magic, version, zero) != (MAGIC, VERSION, 0):
        raise FormatError(f"expected {MAGIC!r}, version {VERSION}, found {magic!r}, {version}")
    body = memoryview(file)[size:]
    if len(body) != key + etag + parent + data:
        raise TruncatedError(f"expected {key + etag + parent + data} bytes, found {len(body)}")
    (expected,) = _CHECKSUM.unpack_from(file, _HEAD.size)
    if _digest(file[: _HEAD.size], body) != expected:
        raise ChecksumError("a spooled chunk differs from what was written")
    names = bytes(body[: key + etag + parent])
    hints = Hints(names[key + etag :] or None, saved_s)
    return Parcel(names[:key], names[key : key + etag], bytes(body[len(names) :]), hints)


def _digest(head: bytes, body: bytes | memoryview) -> int:
    digest = xxh3_64(head)
    digest.update(body)
    return digest.intdigest()


class Spool:
    """Not shared between processes. Its methods block: call them in a thread."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 30) -> None:
        self.damaged = 0
        """Files that could not be read and were removed."""
        self.size_bytes = 0
        self._folder = folder
        self._max_bytes = max_bytes
        private_folder(folder, _OURS)
        found: list[tuple[int, str, int]] = []
        for path in folder.iterdir():
            about = path.lstat()
            if not _OURS.fullmatch(path.name) or not stat.S_ISREG(about.st_mode):
                continue
            if path.suffix == _ASIDE:
                path.unlink()
            else:
                private_file(path)
                found.append((about.st_mtime_ns, path.name, about.st_size))
        self._sizes = {name: size for _, name, size in sorted(found)}  # oldest first
        self.size_bytes = sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return _name(key) in self._sizes

    def add(self, parcel: Parcel) -> bool:
        """Keep it; False if there is no room. When this returns, it survives a power loss."""
        if parcel.key in self:
            return True
        content = pack(parcel)
        if self.size_bytes + len(content) > self._max_bytes:
            return False
        path = self._folder / _name(parcel.key)
        write_whole(path, content, path.with_suffix(_ASIDE))
        self._sizes[path.name] = len(content)
        self.size_bytes += len(content)
        return True

    def first(self) -> Parcel | None:
        """The oldest that can be read."""
        while self._sizes:
            name = next(iter(self._sizes))
            try:
                parcel = unpack((self._folder / name).read_bytes())
                if _name(parcel.key) == name:
                    return parcel
            except (FormatError, OSError):
                pass
            self.damaged += 1
            self._remove(name)
        return None

    def remove(self, key: bytes) -> None:
        self._remove(_name(key))

    def defer(self, key: bytes) -> None:
        """Let all others go first."""
        name = _name(key)
        if name in self._sizes:
            self._sizes[name] = self._sizes.pop(name)

    def _remove(self, name: str) -> None:
        self.size_bytes -= self._sizes.pop(name, 0)
        with suppress(OSError):
            (self._folder / name).unlink(missing_ok=True)


def _name(key: bytes) -> str:
    return key.hex() + _SUFFIX
