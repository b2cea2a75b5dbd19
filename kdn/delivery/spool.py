"""Encoded chunks that wait on disk for a place to come back: bounded, and safe across restarts.

    ROOT/OWNER/lock        held by the process that OWNER, a random name, stands for
    ROOT/OWNER/KEY.chunk   a chunk that was accepted (parcel.py)
    ROOT/OWNER/KEY.part    one that is being written

Many processes may share a root. Each of them adds, reads and removes chunks in a folder of its own.
The kernel releases the folder's lock when the process dies, however it dies. So a folder whose lock
can be taken has lost its owner: whoever takes the lock moves the chunks into its own folder.

A chunk is written aside, synced, and renamed, for its owner's eyes only. What does not verify when
it is read is removed and counted; files of other names or users are left alone. A folder that other
users may write to is refused: what lies in it is sent in this user's name.

What has waited for a week is dropped when a spool is opened, also in other roots beside this one: a
new token, secret or address makes a new root, and nobody would open the old one again.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from threading import Lock

from kdn.defaults import SPOOL_BYTES
from kdn.delivery.parcel import Parcel, pack, unpack
from kdn.errors import FormatError, StoreError
from kdn.files import (
    is_own_file,
    is_own_folder,
    lock_file,
    private_file,
    private_folder,
    sync_folder,
    write_whole,
)

logger = logging.getLogger(__name__)

MAX_AGE_S = 7 * 24 * 3600.0

_LOCK, _CHUNK, _PART = "lock", ".chunk", ".part"
_ROOT = re.compile(r"[0-9a-f]{32}")
_OWNER = re.compile(r"[0-9a-f]{16}")
_OURS = re.compile(r"(?:[0-9a-f]{2})+\.(?:chunk|part)")
_IN_FOLDER = re.compile(rf"{_LOCK}|{_OURS.pattern}")
_TRIES = 10


class Spool:
    """Its methods block, except those that only list keys: call them in threads. They are
    thread-safe."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        """For `open`."""
        self.damaged = 0
        """Files that did not verify and were removed."""
        self.outdated = 0
        """Chunks that had waited too long when this was opened."""
        self._root, self._max_bytes = root, max_bytes
        self._alone = Lock()  # guards all below, and the files in the folder
        self._sizes: dict[str, int] = {}  # by file name, the oldest first
        self._lock: int | None = None  # None once it is closed
        self._folder = root
        self._settle()

    @classmethod
    def open(cls, root: Path, max_bytes: int = SPOOL_BYTES) -> Spool:
        """One with a folder of its own, and with the chunks that dead processes left in `root`. All
        processes together keep at most `max_bytes` there, and one chunk more when two are equally
        fast. StoreError if `root` cannot be used."""
        try:
            spool = cls(root, max_bytes)
        except OSError as error:
            raise StoreError(f"cannot spool in {root}: {error}") from error
        spool.outdated = sum(map(_drop_old, _beside(root)))
        if spool.outdated:
            days = MAX_AGE_S / (24 * 3600)
            logger.warning("%d chunks waited over %g days: dropped", spool.outdated, days)
        spool.adopt()
        return spool

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return _name(key) in self._sizes

    def keys(self) -> list[bytes]:
        return [bytes.fromhex(name.removesuffix(_CHUNK)) for name in list(self._sizes)]

    def add(self, parcel: Parcel) -> bool:
        """Keep it; False if there is no room. When this returns, it survives a power loss."""
        with self._alone:
            if parcel.key in self:
                return True
            content = pack(parcel)
            used = sum(sum(_chunks_in(folder).values()) for folder in _folders(self._root))
            if self._lock is None or used + len(content) > self._max_bytes:
                return False
            try:
                self._write(_name(parcel.key), content)
            except FileNotFoundError:  # somebody has emptied the root
                self._settle()
                self._write(_name(parcel.key), content)
            return True

    def first(self) -> Parcel | None:
        """The oldest that can be read. OSError if the disk fails: the others go first then."""
        with self._alone:
            while self._sizes:
                name = next(iter(self._sizes))
                try:
                    parcel = unpack((self._folder / name).read_bytes())
                    if _name(parcel.key) == name:
                        return parcel
                except FileNotFoundError:
                    del self._sizes[name]
                    continue
                except FormatError as error:
                    logger.warning("%s is removed: %s", name, error)
                except OSError:
                    self._sizes[name] = self._sizes.pop(name)
                    raise
                self.damaged += 1
                self._remove(name)
            return None

    def remove(self, key: bytes) -> None:
        with self._alone:
            self._remove(_name(key))

    def defer(self, key: bytes) -> None:
        """Let all others go first."""
        with self._alone:
            if (size := self._sizes.pop(_name(key), None)) is not None:
                self._sizes[_name(key)] = size

    def adopt(self) -> int:
        """Take over the chunks of processes that are gone: how many."""
        with self._alone:
            before = len(self._sizes)
            for folder in _folders(self._root) if self._lock is not None else ():
                try:
                    self._take_over(folder)
                except OSError as error:
                    logger.info("cannot take over %s: %s", folder, error)
            return len(self._sizes) - before

    def close(self) -> None:
        """Leave what is still there to others: here it is empty afterwards, and stays so."""
        with self._alone:
            if self._lock is None:
                return
            if not self._sizes:
                _discard(self._folder)
            os.close(self._lock)
            self._lock, self._sizes = None, {}

    def _settle(self) -> None:
        """In a folder of its own. Between its making and its locking, another process may take it
        for one that was left behind, and remove it."""
        for _ in range(_TRIES):
            folder = self._root / token_hex(8)
            with suppress(FileNotFoundError):
                for one, names in ((self._root, _OWNER), (folder, _IN_FOLDER)):
                    private_folder(one, names)
                    if not is_own_folder(about := one.lstat()):
                        found = f"mode {about.st_mode:o} of user {about.st_uid}"
                        raise StoreError(f"{one}: expected a folder of this user's, found {found}")
            if (lock := _take(folder)) is not None:
                if self._lock is not None:
                    os.close(self._lock)
                self._folder, self._lock, self._sizes = folder, lock, {}
                return
        raise StoreError(f"expected a folder of its own in {self._root}, found none to keep")

    def _write(self, name: str, content: bytes) -> None:
        path = self._folder / name
        write_whole(path, content, path.with_suffix(_PART))
        self._sizes[name] = len(content)

    def _take_over(self, folder: Path) -> None:
        """If its owner is gone. Of two chunks with one key, either is right."""
        if folder == self._folder or (lock := _take(folder)) is None:
            return
        try:
            for name, size in (found := _chunks_in(folder)).items():
                private_file(folder / name)
                os.rename(folder / name, self._folder / name)
                self._sizes[name] = size
            if found:
                sync_folder(self._folder)
            _discard(folder)
        finally:
            os.close(lock)

    def _remove(self, name: str) -> None:
        self._sizes.pop(name, None)
        with suppress(OSError):
            (self._folder / name).unlink()


def _name(key: bytes) -> str:
    return key.hex() + _CHUNK


def _folders(root: Path, names: re.Pattern[str] = _OWNER) -> list[Path]:
    """Those in it that can be believed."""
    found = []
    with suppress(FileNotFoundError):
        for path in (root / name for name in sorted(os.listdir(root)) if names.fullmatch(name)):
            with suppress(FileNotFoundError):
                if is_own_folder(path.lstat()):
                    found.append(path)
    return found


def _beside(root: Path) -> list[Path]:
    """This root, and those that `session/spooling.py` has made beside it."""
    with suppress(OSError):
        return [root, *(one for one in _folders(root.parent, _ROOT) if one.name != root.name)]
    return [root]


def _drop_old(root: Path) -> int:
    """What owners who are gone left there long ago: how many chunks."""
    dropped, oldest_s = 0, time.time() - MAX_AGE_S
    try:
        for folder in _folders(root):
            if (lock := _take(folder)) is None:
                continue
            try:
                paths = [folder / name for name in _chunks_in(folder)]
                old = [path for path in paths if path.stat().st_mtime < oldest_s]
                for path in old:
                    path.unlink()
                dropped += len(old)
                if len(old) == len(paths):
                    _discard(folder)
            finally:
                os.close(lock)
        with suppress(OSError):
            root.rmdir()  # if it is empty
    except OSError as error:
        logger.info("cannot drop what is old in %s: %s", root, error)
    return dropped


def _chunks_in(folder: Path, suffix: str = _CHUNK) -> dict[str, int]:
    """Their sizes by name, the oldest first. Another process may be removing them."""
    found: list[tuple[int, str, int]] = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if not _OURS.fullmatch(entry.name) or not entry.name.endswith(suffix):
                continue
            with suppress(FileNotFoundError):
                if is_own_file(about := entry.stat(follow_symlinks=False)):
                    found.append((about.st_mtime_ns, entry.name, about.st_size))
    return {name: size for _, name, size in sorted(found)}


def _take(folder: Path) -> int | None:
    """Its lock, held until it is closed; None if another has it, or the folder is gone."""
    path = folder / _LOCK
    try:
        lock = lock_file(path)
    except (BlockingIOError, FileNotFoundError, NotADirectoryError):
        return None
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    os.close(lock)  # the one before has removed the folder
    return None


def _discard(folder: Path) -> None:
    """Remove a folder that has no chunks any more, unless something else is in it."""
    for name in (*_chunks_in(folder, _PART), _LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
