"""What the disk store does in its threads: objects as files of one folder, and their index.

    FOLDER/lock            held by the one process that has the folder open
    FOLDER/index.sqlite    table of contents (disk_index.py), rebuilt when lost
    FOLDER/objects/        KEY-ETAG in hexadecimal, one complete object each (disk_format.py)
    FOLDER/objects/*.part  objects being written, removed at the next start
    FOLDER/damaged/        objects found damaged, the latest few

Only their owner may look into these folders. Files of other names are not ours and left alone.

The files are the truth; the index only saves reading them all at start. So durability is a matter
of the order of file system calls alone, and no transaction spans files and index:

- put: write a .part file, sync it, rename it, sync the folder, then the index. A name without .part
  is therefore always a complete object. Acknowledged means that the folder was synced.
- evict: unlink, then the index. Not synced: what comes back after a power loss is a whole object
  again. A later put syncs the folder, so that an evicted object never survives a newer one.
- cut: write what is left as a .part file, sync it, rename it over the object, sync the folder, then
  the index: which may say more than is there, never less, so that the store knows its size.
- delete: unlink, sync the folder, then the index.
- start: a row without a file is dropped. A file without a row is adopted from its own header. The
  etag is in the name, so a row can not be taken for that of an earlier object of its key. Thus any
  state of the index, older, newer, damaged or gone, leads to the same store.

Where a file may be left that nobody shall see (the disk refused to unlink or sync), its key is
`unclean`: nothing is put under it, nor a deletion confirmed, before the file is known to be gone.
Hence no two objects of one key, which after a restart could be taken for each other.

Content is verified when it is read, block by block. Anyone may read at any time; of those that
change the files of one key, the caller lets only one in at once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from kdn.errors import FormatError, StoreError
from kdn.store.base import Entry
from kdn.store.disk_files import Files, named_errors
from kdn.store.disk_format import Header, encode_header
from kdn.store.disk_index import USED, Index, Row, entry_of, row_of
from kdn.store.disk_reading import ObjectReader, file_name

logger = logging.getLogger(__name__)

PART = ".part"
MAX_DAMAGED = 16
_NAME = re.compile("((?:[0-9a-f]{2})+)-((?:[0-9a-f]{2})+)")
_OBJECTS = re.compile(rf"{_NAME.pattern}|[0-9]+\{PART}")
_FOLDER = re.compile(r"lock|index\.sqlite(?:-\w+)?|objects|damaged")


class ObjectFolder(ObjectReader):
    def __init__(self, folder: Path, files: Files, index: Index) -> None:
        super().__init__(folder, files)
        self._damaged = folder / "damaged"
        self._index = index
        self._serial = count()
        self._unclean: dict[bytes, set[str]] = {}  # names of files, by key

    def write(self, row: Row, data: bytes) -> None:
        """When this returns, the object survives a power loss. When it fails, it is not there; the
        beginning of it that was there before may still be (`has`)."""
        entry = entry_of(row)
        self.clean(entry.key)
        part = self._objects / f"{next(self._serial)}{PART}"
        with named_errors(f"write {len(data)} bytes to {self._folder}"):
            written = [part.name]
            try:
                self._write_synced(part, [encode_header(entry, data), data])
                written.append(file_name(entry))
                self._files.rename(part, self._objects / file_name(entry))
                self._files.sync_folder(self._objects)
            except BaseException:
                self._give_up(entry.key, *written)
                with suppress(StoreError):
                    self.clean(entry.key)
                raise
        self._index.change(put=[row])

    def has(self, entry: Entry) -> bool:
        """Whether there is a file of it that nobody has given up."""
        name = file_name(entry)
        return name not in self._unclean.get(entry.key, ()) and (self._objects / name).exists()

    def evict(self, entry: Entry) -> None:
        with named_errors(f"evict {file_name(entry)}"):
            self._unlink(self._objects / file_name(entry))
        self._index.change(remove=[entry.key])

    def cut(self, entry: Entry, kept_bytes: int, used: int) -> Row:
        """Keep only the beginning of an object. Readers have the old file or the new one.
        FormatError if it may not be cut there, or is damaged: then nothing has changed."""
        span = self.read(entry, 0, kept_bytes)
        if span is None:
            raise FormatError("its file is gone")
        kept = replace(span.entry, size_bytes=min(kept_bytes, span.entry.size_bytes))
        if kept.size_bytes not in kept.hints.cuts:
            raise FormatError(f"expected to cut at {kept.hints.cuts}, found {kept_bytes}")
        if kept != span.entry:  # else it was cut before, and the index had not heard of it
            self._shorten(kept, bytes(span.data))
        row = row_of(kept, used)
        self._index.change(put=[row])
        return row

    def _shorten(self, kept: Entry, data: bytes) -> None:
        part = self._objects / f"{next(self._serial)}{PART}"
        with named_errors(f"cut {file_name(kept)}"):
            try:
                self._write_synced(part, [encode_header(kept, data), data])
                self._files.rename(part, self._objects / file_name(kept))
                self._files.sync_folder(self._objects)
            except BaseException:
                with suppress(OSError):
                    self._unlink(part)
                raise

    def delete(self, key: bytes, entry: Entry | None) -> bool:
        """When this returns, the bytes are gone for good; True if they were an object."""
        was_here = entry is not None or key in self._unclean
        if entry is not None:
            self._give_up(key, file_name(entry))
        self.clean(key)
        with named_errors(f"delete damaged copies of {key.hex()}"):
            copies = [name for name in self._files.list(self._damaged) if _is_of(name, key)]
            for name in copies:
                self._unlink(self._damaged / name)
            if copies:
                self._files.sync_folder(self._damaged)
        if was_here:
            self._index.change(remove=[key])
        return was_here

    def clean(self, key: bytes) -> None:
        """Make sure that no file of an object that was given up remains."""
        names = self._unclean.get(key)
        if names is None:
            return
        with named_errors(f"remove {', '.join(names)}"):
            for name in names:
                self._unlink(self._objects / name)
            self._files.sync_folder(self._objects)
        del self._unclean[key]

    def _give_up(self, key: bytes, *names: str) -> None:
        """From now on nobody shall see these files, whether or not they can be removed."""
        self._unclean.setdefault(key, set()).update(names)

    def set_aside(self, key: bytes, name: str) -> None:
        """Move a damaged file to where nobody reads it, if the disk still lets us."""
        self._give_up(key, name)
        with suppress(OSError):
            self._files.rename(self._objects / name, self._damaged / name)
            self._files.sync_folder(self._damaged)
        with suppress(StoreError):
            self.clean(key)
        with suppress(OSError):
            others = sorted(set(self._ours(self._damaged, _NAME)) - {name})
            for other in others[: max(0, len(others) + 1 - MAX_DAMAGED)]:
                self._files.unlink(self._damaged / other)
        self._index.change(remove=[key])

    def forget(self, key: bytes) -> None:
        """Drop the row of an object whose file somebody else removed."""
        self._index.change(remove=[key])

    def correct(self, row: Row) -> None:
        """Write down what the file says where the index said otherwise."""
        self._index.change(put=[row])

    def close(self, used: Sequence[Row]) -> None:
        """Remember when rows were used and release the index."""
        self._index.change(put=used)
        self._index.close()

    def heal(self, rows: Sequence[Row]) -> tuple[list[Row], int]:
        """Make index and files agree: what is here, least recently used first, and how many files
        were found damaged. Reads names, and of files that have no row their headers."""
        with named_errors(f"list {self._objects}"):
            names = set(self._ours(self._objects, _OBJECTS))
        expected = {f"{row[0].hex()}-{row[1].hex()}": row for row in rows}
        missing = [expected.pop(name)[0] for name in expected.keys() - names]
        here = list(expected.values())
        strangers = names - expected.keys()
        entries, damaged = self._adopt(strangers, {row[0] for row in here} if strangers else set())
        newest = here[-1][USED] if here else 0
        adopted = [row_of(entry, newest + order) for order, entry in enumerate(entries, 1)]
        if missing or adopted:
            logger.info("index: %d rows dropped, %d files adopted", len(missing), len(adopted))
            self._index.change(put=adopted, remove=missing)
        return here + adopted, damaged

    def _adopt(self, names: set[str], known: set[bytes]) -> tuple[list[Entry], int]:
        """Files without a row: their entries, oldest first, and how many were damaged."""
        found: list[tuple[int, Entry]] = []
        damaged = 0
        for name in sorted(names):
            key, etag = _parse(name)
            try:
                if name.endswith(PART) or key in known:
                    self._files.unlink(self._objects / name)
                    continue
                header, time_ns = self._read_header_of(name, key, etag)
                found.append((time_ns, header.entry))
                known.add(key)
            except FormatError as error:
                logger.warning("%s is damaged and set aside: %s", name, error)
                damaged += 1
                self.set_aside(key, name)
            except OSError as error:
                # Not ours to judge: perhaps the next start can read it.
                logger.warning("%s cannot be read and is left alone: %s", name, error)
                self._give_up(key, name)
        return [entry for _, entry in sorted(found, key=lambda item: item[0])], damaged

    def _read_header_of(self, name: str, key: bytes, etag: bytes) -> tuple[Header, int]:
        fd = self._files.open(self._objects / name)
        try:
            return self._read_header(fd, key, etag)
        finally:
            self._files.close(fd)

    def _write_synced(self, path: Path, parts: list[bytes]) -> None:
        fd = self._files.create(path)
        try:
            views = [memoryview(part) for part in parts]
            while views:
                taken = self._files.write(fd, views)
                while views and taken >= len(views[0]):
                    taken -= len(views.pop(0))
                if taken:
                    views[0] = views[0][taken:]
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def _ours(self, folder: Path, ours: re.Pattern[str]) -> list[str]:
        names = self._files.list(folder)
        found = [name for name in names if ours.fullmatch(name)]
        if len(found) < len(names):
            logger.warning("%s holds %d files of others", folder, len(names) - len(found))
        return found

    def _unlink(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            self._files.unlink(path)


def open_folder(folder: Path, files: Files) -> int:
    """Make the folders, durably, and lock them; the lock is held until it is closed."""
    with named_errors(f"open {folder}"):
        for path in reversed(folder.absolute().parents):
            if files.make_folder(path):
                files.sync_folder(path.parent)
        inside = {folder: _FOLDER, folder / "objects": _OBJECTS, folder / "damaged": _NAME}
        for path, ours in inside.items():
            if not files.make_folder(path):
                files.tighten_folder(path, ours)
            files.sync_folder(path.parent)  # even if it was there: it may be one unsynced yet
        try:
            return files.lock(folder / "lock")
        except BlockingIOError:
            raise StoreError(f"{folder} is open in another process") from None


def _parse(name: str) -> tuple[bytes, bytes]:
    """Key and etag of a file's name; of one being written, the name itself and nothing."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name.encode(), b""
    return bytes.fromhex(match[1]), bytes.fromhex(match[2])


def _is_of(name: str, key: bytes) -> bool:
    return name.startswith(f"{key.hex()}-")
