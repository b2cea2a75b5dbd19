"""Files and folders for one user alone, and files that appear whole and stay.

What kdn keeps is as private as the texts it was made from. Folders are made with mode 0700 and
files with 0600, whatever the umask. A folder that was there before is taken from the others if
everything in it is kdn's; one with other things in it, or of another user, keeps its mode: what kdn
puts into it is private by itself.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
FOLDER_MODE, FILE_MODE = 0o700, 0o600
RESERVE, MAX_RESERVE_BYTES = 0.25, 16 << 30
"""Of a file system, left to others: an engine's own queues in shared memory die if it is full."""


def private_folder(path: Path, ours: re.Pattern[str]) -> None:
    """Make it, durably, or take it; all names in it that match `ours` are kdn's."""
    missing = [one for one in (path, *path.absolute().parents) if not one.is_dir()]
    for one in reversed(missing):
        with suppress(FileExistsError):  # another process is as fast
            one.mkdir(mode=FOLDER_MODE)
    for one in missing:
        with suppress(PermissionError):  # a folder that we may not read
            sync_folder(one.absolute().parent)
    if not missing:  # it may be one unsynced yet; on its place in the system we have no claim
        with suppress(OSError):
            sync_folder(path.absolute().parent)
    tighten_folder(path, ours)


def tighten_folder(path: Path, ours: re.Pattern[str]) -> None:
    """Shut others out of a folder of ours."""
    about = path.stat()
    if not about.st_mode & OTHERS:
        return
    if about.st_uid != os.geteuid() or about.st_mode & stat.S_ISVTX:
        logger.warning("%s belongs to others as well: only the files in it are private", path)
    elif not all(ours.fullmatch(name) for name in os.listdir(path)):
        logger.info("%s holds other things: its mode is left as it is", path)
    else:
        _tighten(path, about, FOLDER_MODE)


def is_own_file(about: os.stat_result) -> bool:
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()


def is_own_folder(about: os.stat_result) -> bool:
    """Whether what lies in it can be believed: only this user puts things there."""
    own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
    return own and not about.st_mode & OTHERS_WRITE


def allowed_bytes(fd: int, share: float, held_bytes: int) -> int:
    """That may be held in this file's file system, by whoever may have this share of it and holds
    so much already: no more than leaves others their reserve."""
    disk = os.fstatvfs(fd)
    size = disk.f_blocks * disk.f_frsize
    reserve = min(int(RESERVE * size), MAX_RESERVE_BYTES)
    return min(int(share * size), held_bytes + max(0, disk.f_bavail * disk.f_frsize - reserve))


def private_file(path: Path) -> None:
    """Make an empty one, or shut others out of the one that is there. For files that a library is
    going to open: it would make them as the umask says."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        # By its name: opening and closing it would release locks that SQLite has on it.
        about = path.stat()
        if about.st_mode & OTHERS and about.st_uid == os.geteuid():
            _tighten(path, about, FILE_MODE)


def private_database(path: Path) -> None:
    """A file for SQLite, which gives its mode to those it makes beside it."""
    private_file(path)
    for suffix in ("-wal", "-shm", "-journal"):
        if (beside := path.with_name(path.name + suffix)).exists():
            private_file(beside)


def write_whole(path: Path, data: bytes, aside: Path, mode: int = FILE_MODE) -> None:
    """Write `aside`, and rename it when it is complete. When this returns, it survives a power
    loss; when it fails, `path` is what it was, or already this."""
    with suppress(FileNotFoundError):
        aside.unlink()  # of one who died, with any mode
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def lock_file(path: Path) -> int:
    """Held until closed, also by a death of the process; BlockingIOError if another has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def sync_folder(path: Path) -> None:
    """Names that came, went or changed in it survive a power loss from here on."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _tighten(path: Path, about: os.stat_result, mode: int) -> None:
    found = stat.S_IMODE(about.st_mode)
    try:
        os.chmod(path, mode)
    except OSError as error:  # there are file systems without modes
        logger.warning("%s is open to others (%o), and stays so: %s", path, found, error)
    else:
        logger.warning("%s was open to others (%o): now it is not (%o)", path, found, mode)


def write_in_memory(
    folder: int, name: str, parts: Iterable[bytes | memoryview], *, aside: str
) -> None:
    """A file for this user alone that appears whole, or not at all, in the folder of this
    descriptor: written `aside`, and renamed. In shared memory there is nothing to make durable."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(aside, flags, FILE_MODE, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            for part in parts:
                file.write(part)
        os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=folder)
        raise
