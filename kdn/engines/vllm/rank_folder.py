"""A folder in the host's shared memory through which the ranks of one engine hand bytes on.

Only its user can open it (as with the host's decoded chunks, `session/host_folder.py`), and it is
opened once, so that whoever renames things around it gains nothing. Each rank holds a lock in it as
long as it lives: the others see who is there. What ranks on other hosts do is not seen here, so
"all that are there" means those of this host.

Every file is meant for one reader, whose rank ends its name, and is gone as soon as that one has
opened it. Its writer removes what was not fetched after a while. The last rank takes the folder
away; those of engines that were killed are removed by the next one that starts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from kdn.errors import FormatError, UnsupportedError
from kdn.files import (
    FILE_MODE,
    FOLDER_MODE,
    OTHERS,
    OTHERS_WRITE,
    allowed_bytes,
    is_own_file,
    write_in_memory,
)

logger = logging.getLogger("vllm.kdn")

UNLOCKED_S, STALE_S = 5.0, 600.0
"""A rank has so long to lock its lock file; and, from when the folder is made, to make that."""
MAX_SHARE = 0.25
"""Of the file system: others keep things in shared memory, too."""
LOCK_TRIES, LOCK_PAUSE_S = 10, 0.01
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_OURS = re.compile(
    r"\.kdn-rank-(?P<lock>\d+)|(?:load|part)-[0-9a-f]+-(?P<reader>\d+)|"
    r"\.[0-9a-f]{16}(?:-(?P<writer>\d+))?\.aside"
)


class RankFolder:
    """Any thread of the rank that opened it may use it."""

    def __init__(self, place: Path, engine: str, rank: int, count: int) -> None:
        """`engine` names all its ranks alike, and no other engine. UnsupportedError if that is not
        so, or if the folder is not this user's alone."""
        self.rank, self.count = rank, count
        name = blake2b(engine.encode(), digest_size=8).hexdigest()
        self.path = place / f"{_beginning()}{name}"
        _remove_stale(place, self.path, time.time())
        self.path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=FOLDER_MODE)
        try:
            self._fd = os.open(self.path, _FOLDER)
        except (NotADirectoryError, PermissionError) as error:
            raise self._refusal() from error
        self._lock, self._is_told = -1, False
        try:
            about = os.fstat(self._fd)
            if about.st_uid != os.geteuid() or about.st_mode & OTHERS:
                raise self._refusal()
            os.utime(self._fd)  # so that nobody takes it for one of a killed engine meanwhile
            self._lock = self._take_lock()
            # What is for this rank, or half-written by it, is of an earlier engine of that name.
            self._remove(lambda found: str(rank) in (found["reader"], found["writer"]))
        except BaseException:
            self.close()
            raise

    def _refusal(self) -> UnsupportedError:
        return UnsupportedError(f"{self.path} is not a folder that only this user can open")

    def _take_lock(self) -> int:
        """Somebody who just looks whether we are there has it for a moment."""
        fd = os.open(_lock_name(self.rank), _LOCK, FILE_MODE, dir_fd=self._fd)
        for _ in range(LOCK_TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            time.sleep(LOCK_PAUSE_S)
        os.close(fd)
        raise UnsupportedError(
            f"another engine of the same engine_id has a rank {self.rank}: {self.path}"
        )

    # who is there

    def is_alive(self, rank: int) -> bool:
        """Whether that rank is on this host and lives."""
        if rank == self.rank:
            return True
        return self._fd >= 0 and _is_locked(_lock_name(rank), self._fd)

    def alive(self) -> list[int]:
        """If somebody has removed the folder, this rank alone."""
        if not self.is_there:
            return [self.rank]
        return [rank for rank in range(self.count) if self.is_alive(rank)]

    @property
    def is_there(self) -> bool:
        """Not so if somebody has removed it, to free the memory: then ranks do not meet."""
        if self._fd < 0:
            return False
        is_there = os.fstat(self._fd).st_nlink > 0
        if not is_there and not self._is_told:
            self._is_told = True
            logger.warning(
                "kdn: rank %d fetches for itself, and nothing is published: its folder was "
                "removed: restart the engine (%s)",
                self.rank, self.path,
            )  # fmt: skip
        return is_there

    def room_bytes(self, most: int, held_bytes: int, num_ranks: int = 1) -> int:
        """Just now, for a load or for what one of so many ranks gives, if so much of that is here
        already."""
        return min(most, allowed_bytes(self._fd, MAX_SHARE / num_ranks, held_bytes))

    # files

    def create(self, names: Sequence[str], begins_with: bytes = b"") -> int:
        """A file, to be written to, under a name for each of its readers: each sees what is
        written, and the memory is free when all have read it and the writer has closed it."""
        aside = self._aside()
        fd = os.open(aside, _CREATE, FILE_MODE, dir_fd=self._fd)
        try:
            os.write(fd, begins_with)
            for name in names:
                os.link(aside, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self.remove(names)
            os.ftruncate(fd, 0)  # for who has opened it already
            os.close(fd)
            raise
        finally:
            self.remove([aside])
        return fd

    def refuse(self, names: Sequence[str]) -> None:
        """Instead of a file, what cannot be read: its reader need not wait. It takes no memory and
        is not opened, so that it can be made when a file cannot."""
        for name in names:
            with suppress(OSError):
                os.symlink("refused", name, dir_fd=self._fd)

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """A file that appears whole, or not at all."""
        write_in_memory(self._fd, name, parts, aside=self._aside())

    def _aside(self) -> str:
        return f".{secrets.token_hex(8)}-{self.rank}.aside"

    def fetch(self, name: str) -> int | None:
        """A file for this rank, opened, and its name gone; None if it is not there yet. FormatError
        if it is none that ranks write."""
        try:
            fd = os.open(name, _READ, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.remove([name])
            raise FormatError(f"{name} cannot be read: {error}") from error
        self.remove([name])
        about = os.fstat(fd)
        if not is_own_file(about) or about.st_mode & OTHERS_WRITE:
            os.close(fd)
            raise FormatError(f"{name} was not written by a rank")
        return fd

    def has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._fd)

    def _remove(self, is_gone: Callable[[re.Match[str]], bool]) -> None:
        for name in os.listdir(self._fd):
            found = _OURS.fullmatch(name)
            if found and is_gone(found):
                self.remove([name])

    def close(self) -> None:
        """Once. The last to leave removes it."""
        if self._fd < 0:
            return
        if self._lock >= 0:
            self.remove([_lock_name(self.rank)])
            os.close(self._lock)
            if not any(self.is_alive(rank) for rank in range(self.count) if rank != self.rank):
                self._remove(lambda found: True)
                with suppress(OSError):
                    os.rmdir(self.path)
        fd, self._fd, self._lock = self._fd, -1, -1
        os.close(fd)


def load_name(number: int, reader: int) -> str:
    return f"load-{number:x}-{reader}"


def part_name(key: bytes, writer: int) -> str:
    """Its reader is the first rank; its writer tells several parts of a chunk apart."""
    return f"part-{key.hex()}{writer:04x}-0"


def _beginning() -> str:
    return f"kdn-{os.geteuid()}-ranks-"


def _lock_name(rank: int) -> str:
    return f".kdn-rank-{rank}"


def _is_locked(name: str, folder: int) -> bool:
    """Also if that cannot be told, as with too many open files: nobody who lives is given up."""
    try:
        fd = os.open(name, _READ, dir_fd=folder)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _remove_stale(place: Path, own: Path, now_s: float) -> None:
    """Folders of this user's engines none of whose ranks lives any more. An engine's own stays:
    another of its ranks may be in it in a moment."""
    for path in place.glob(f"{_beginning()}*"):
        with suppress(OSError):
            if path != own and _is_stale(path, now_s):
                shutil.rmtree(path, ignore_errors=True)


def _is_stale(path: Path, now_s: float) -> bool:
    fd = os.open(path, _FOLDER)
    try:
        about, names = os.fstat(fd), os.listdir(fd)
        locks = [name for name in names if (m := _OURS.fullmatch(name)) and m["lock"]]
        is_ours = about.st_uid == os.geteuid() and all(map(_OURS.fullmatch, names))
        is_old = now_s - about.st_mtime > (UNLOCKED_S if locks else STALE_S)
        return is_ours and is_old and not any(_is_locked(name, fd) for name in locks)
    finally:
        os.close(fd)
