"""Every file system call of the disk store, one method each.

The store calls nothing of the file system but this (and SQLite, for its index, which may be lost).
So a test can stand in its place: count the calls, fail any one of them, or forget what was not yet
synced when the power goes.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kdn.errors import NoSpaceError, StoreError
from kdn.files import FILE_MODE, FOLDER_MODE, lock_file, sync_folder, tighten_folder

RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Files:
    """The real one. Errors are OSError; `named_errors` gives them their names."""

    def make_folder(self, path: Path) -> bool:
        """False if it was there already."""
        if os.path.isdir(path):
            return False
        os.mkdir(path, mode=FOLDER_MODE)
        return True

    def tighten_folder(self, path: Path, ours: re.Pattern[str]) -> None:
        """Shut others out of it, if all names in it match `ours`."""
        tighten_folder(path, ours)

    def list(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def create(self, path: Path) -> int:
        """A new file, open for writing; FileExistsError if it is not new."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def write(self, fd: int, parts: Sequence[bytes | memoryview]) -> int:
        """How many bytes were taken, perhaps not all."""
        return os.writev(fd, parts)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, fd: int, size_bytes: int, start: int) -> bytes:
        """Fewer bytes only where the file ends or the system feels like it."""
        return os.pread(fd, size_bytes, start)

    def read_now(self, fd: int, size_bytes: int, start: int) -> bytearray:
        """What the system has in memory; BlockingIOError, or fewer bytes, if it has not."""
        if not RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, "this system has no way to ask")
        buffer = bytearray(size_bytes)
        taken = os.preadv(fd, [buffer], start, RWF_NOWAIT)
        return buffer if taken == size_bytes else buffer[:taken]

    def size_and_time(self, fd: int) -> tuple[int, int]:
        """Bytes, and nanoseconds of the last change."""
        status = os.fstat(fd)
        return status.st_size, status.st_mtime_ns

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Replaces `new`, atomically."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def sync_folder(self, folder: Path) -> None:
        """Names that came, went or changed in it survive a power loss from here on."""
        sync_folder(folder)

    def lock(self, path: Path) -> int:
        """Held until closed, also by a death of the process; BlockingIOError if another has it."""
        return lock_file(path)


@contextmanager
def named_errors(doing: str) -> Iterator[None]:
    """What the system calls OSError, callers know as NoSpaceError or StoreError."""
    try:
        yield
    except OSError as error:
        kind = NoSpaceError if error.errno in _FULL else StoreError
        raise kind(f"cannot {doing}: {error.strerror or error}") from error
