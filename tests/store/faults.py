"""A file system that forgets what was not synced, and fails when told to.

`VolatileFiles` stands in for the disk store's `Files`. It holds files in memory, and of each file
and folder both what a program sees and what a power loss leaves. What was not synced may be lost or
not, each change by itself: `survivors` gives every combination. A rename between folders is two
changes, so that a file may end up in both or in neither.

A `Fuse` is asked before every call (a "step") and may blow at the n-th: as a power cut, after which
nothing works any more, or as an error of the system, once or from then on.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from threading import Lock

from kdn.store.disk_files import Files
from kdn.store.disk_index import Index, Row


class PowerCut(BaseException):
    """Not an Exception: nothing may catch it and go on."""


class Fuse:
    """Blows at step `at` (counted from 0; None: never), and stays blown if `lasting`."""

    def __init__(
        self, at: int | None = None, error: BaseException | None = None, lasting: bool = True
    ) -> None:
        self.at = at
        self.error = error or PowerCut()
        self.lasting = lasting
        self.steps: list[str] = []

    def step(self, what: str) -> None:
        now = len(self.steps)
        self.steps.append(what)
        if self.at is not None and (now == self.at or (self.lasting and now > self.at)):
            raise self.error

    @property
    def blown(self) -> bool:
        return self.at is not None and len(self.steps) > self.at


class _File:
    def __init__(self, data: bytes = b"", synced: bool = False) -> None:
        self.data = bytearray(data)
        self.durable: bytes | None = data if synced else None


Names = dict[str, _File]


class _Folder:
    def __init__(self, names: Names | None = None) -> None:
        self.names: Names = names or {}
        self.durable: Names = dict(self.names)
        self.pending: list[tuple[tuple[str, _File | None], ...]] = []

    def change(self, *changes: tuple[str, _File | None]) -> None:
        _apply(self.names, changes)
        self.pending.append(changes)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.names), []

    def survivors(self) -> Iterator[Names]:
        for kept in product((False, True), repeat=len(self.pending)):
            names = dict(self.durable)
            for changes, keep in zip(self.pending, kept, strict=True):
                if keep:
                    _apply(names, changes)
            yield names


def _apply(names: Names, changes: Sequence[tuple[str, _File | None]]) -> None:
    for name, file in changes:
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


class VolatileFiles(Files):
    """Only the folders that hold files are modelled; those above them are taken to be there."""

    def __init__(self, fuse: Fuse | None = None) -> None:
        self.fuse = fuse or Fuse()
        self.folders: dict[Path, _Folder] = {}
        self._unsynced_folders: set[Path] = set()
        self._open: dict[int, _File] = {}
        self._next_fd = 1000
        self._lock = Lock()  # guards everything: calls come from many threads

    def survivors(self) -> list[VolatileFiles]:
        """Every state that a power loss now may leave, each once."""
        states: dict[object, VolatileFiles] = {}
        folders = [path for path in self.folders if path not in self._unsynced_folders]
        for choice in product(*(self.folders[folder].survivors() for folder in folders)):
            for tear in (_lost, _torn, _kept):
                after = VolatileFiles()
                for folder, names in zip(folders, choice, strict=True):
                    files = {name: _File(tear(file), synced=True) for name, file in names.items()}
                    after.folders[folder] = _Folder(files)
                states.setdefault(after._fingerprint(), after)
        return list(states.values())

    def after_kill(self) -> VolatileFiles:
        """What a new process finds after the death of this one: all that was written."""
        after = VolatileFiles()
        for path, folder in self.folders.items():
            files = {name: _File(bytes(file.data), True) for name, file in folder.names.items()}
            after.folders[path] = _Folder(files)
        return after

    def _fingerprint(self) -> object:
        return tuple(
            (path, tuple(sorted((name, bytes(file.data)) for name, file in folder.names.items())))
            for path, folder in self.folders.items()
        )

    def flip(self, path: Path, offset: int) -> None:
        """Damage a file for good."""
        file = self.folders[path.parent].names[path.name]
        file.data[offset] ^= 1
        file.durable = bytes(file.data)

    # Files

    def make_folder(self, path: Path) -> bool:
        if path.name not in ("objects", "damaged") or path in self.folders:
            return False
        self.folders[path] = _Folder()
        self._unsynced_folders.add(path)
        return True

    def tighten_folder(self, path: Path, ours: re.Pattern[str]) -> None:
        pass

    def list(self, folder: Path) -> list[str]:
        with self._lock:
            self.fuse.step(f"list {folder.name}")
            return sorted(self.folders[folder].names)

    def create(self, path: Path) -> int:
        with self._lock:
            self.fuse.step("create")
            folder = self.folders[path.parent]
            if path.name in folder.names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            file = _File()
            folder.change((path.name, file))
            return self._opened(file)

    def write(self, fd: int, parts: Sequence[bytes | memoryview]) -> int:
        with self._lock:
            self.fuse.step("write")
            data = b"".join(parts)
            taken = max(1, len(data) - 7) if data else 0  # nobody promises to take all at once
            self._open[fd].data += data[:taken]
            return taken

    def open(self, path: Path) -> int:
        with self._lock:
            self.fuse.step("open")
            return self._opened(self._named(path))

    def read(self, fd: int, size_bytes: int, start: int) -> bytes:
        with self._lock:
            self.fuse.step("read")
            return bytes(self._open[fd].data[start : start + size_bytes])

    def size_and_time(self, fd: int) -> tuple[int, int]:
        with self._lock:
            self.fuse.step("stat")
            return len(self._open[fd].data), 0

    def sync(self, fd: int) -> None:
        with self._lock:
            self.fuse.step("sync")
            self._open[fd].durable = bytes(self._open[fd].data)

    def close(self, fd: int) -> None:
        with self._lock:
            if fd:
                del self._open[fd]

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            self.fuse.step("rename")
            file, source, target = self._named(old), old.parent, new.parent
            if source == target:
                self.folders[source].change((old.name, None), (new.name, file))
            else:
                self.folders[target].change((new.name, file))
                self.folders[source].change((old.name, None))

    def unlink(self, path: Path) -> None:
        with self._lock:
            self.fuse.step("unlink")
            self._named(path)
            self.folders[path.parent].change((path.name, None))

    def sync_folder(self, folder: Path) -> None:
        with self._lock:
            self._unsynced_folders -= {p for p in self.folders if p.parent == folder}
            if folder in self.folders:
                self.fuse.step(f"sync {folder.name}")
                self.folders[folder].sync()

    def lock(self, path: Path) -> int:
        return 0

    def _opened(self, file: _File) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = file
        return self._next_fd

    def _named(self, path: Path) -> _File:
        file = self.folders[path.parent].names.get(path.name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return file


def _lost(file: _File) -> bytes:
    return file.durable or b""


def _torn(file: _File) -> bytes:
    if file.durable == bytes(file.data):
        return file.durable
    return bytes(file.data[: len(file.data) // 2])


def _kept(file: _File) -> bytes:
    return bytes(file.data)


# the index: SQLite writes it by itself, so its states are copied as they come

IndexState = dict[str, bytes]
"""The files of an index: name to content."""


def copy_index(folder: Path) -> IndexState:
    return {path.name: path.read_bytes() for path in folder.glob("index.sqlite*")}


def restore_index(folder: Path, state: IndexState) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    for name, data in state.items():
        (folder / name).write_bytes(data)


class TracedIndex(Index):
    """An index whose changes are steps, and which keeps a copy of its files after each.

    A power loss may take it back to any earlier one (it is not synced at every commit). An error
    of the system at its step loses the change, as `Index.change` does when SQLite fails.
    """

    fuse: Fuse
    states: list[IndexState]
    _folder: Path

    def change(self, put: object = (), remove: object = ()) -> None:
        try:
            self.fuse.step("index")
        except OSError:
            return
        super().change(put, remove)  # type: ignore[arg-type]
        self.states.append(copy_index(self._folder))


def traced(fuse: Fuse, states: list[IndexState]) -> Callable[[Path], tuple[TracedIndex, list[Row]]]:
    """For `open_disk(open_index=...)`; every state of the index is appended to `states`."""

    def open_index(path: Path) -> tuple[TracedIndex, list[Row]]:
        index, rows = TracedIndex.open(path)
        index.fuse, index.states, index._folder = fuse, states, path.parent
        states.append(copy_index(path.parent))
        return index, rows

    return open_index
