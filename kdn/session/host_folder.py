"""A folder of this user's alone, in a place that others may share: what lies in it is believed.

It is opened and looked at anew for each operation, which then works relative to what was opened:
whoever may rename or link things around it gains nothing. A MARKER says that it is kdn's; a folder
without one that is not empty is refused. Of its files, only those of kdn's names that belong to the
user are ever counted or removed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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

MARKER = ".kdn-decoded-chunks"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHANGE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_QUIETLY = getattr(os, "O_NOATIME", 0)
"""Reading does not mark a file as used; `touch` does."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NOT_OURS = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO)
"""Links, and what others put there; not, say, too many open files."""
_PART = re.compile(r"\.[0-9a-f]{16}\.part")

OnChange = Callable[[str, bool], None]
"""Hears the name of each file that this process puts there (True) or removes (False)."""


class HostFolder:
    """`kdn-UID` in `place`. Any thread and any process of its user may use it."""

    def __init__(
        self, place: Path, ours: re.Pattern[str], on_change: OnChange | None = None
    ) -> None:
        """`ours`: the names of its files. UnsupportedError if it is another's."""
        self.path = place / f"kdn-{os.geteuid()}"
        self._ours, self._on_change = ours, on_change
        self.make()

    def make(self) -> None:
        """It and its marker, if they are not there."""
        if not self.path.is_dir():
            self.path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=FOLDER_MODE)
        with self.opened() as here:
            here.mark()

    @contextmanager
    def opened(self) -> Iterator[Here]:
        """The folder itself, whatever becomes of its name. UnsupportedError if others could read
        or fill it, OSError if it is not there."""
        try:
            fd = os.open(self.path, _READ | os.O_DIRECTORY)
        except (NotADirectoryError, PermissionError) as error:  # a link is no directory, either
            raise self._refusal() from error
        try:
            about = os.fstat(fd)
            if about.st_uid != os.geteuid() or about.st_mode & OTHERS:
                raise self._refusal()
            here = Here(self.path, fd, self._ours, self._on_change)
            try:
                yield here
            finally:
                here.leave()
        finally:
            os.close(fd)

    def _refusal(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.path} is not a folder that only this user can open: remove it, or name another "
            "place"
        )


class Here:
    """The folder while it is open."""

    def __init__(
        self, path: Path, fd: int, ours: re.Pattern[str], on_change: OnChange | None = None
    ) -> None:
        self._path, self._fd, self._ours, self._on_change = path, fd, ours, on_change

    def leave(self) -> None:
        """It is being closed: who still asks gets an error, not another folder of that number."""
        self._fd = -1

    @property
    def changed_ns(self) -> int:
        """When a file last came or went."""
        return os.fstat(self._fd).st_mtime_ns

    def mark(self) -> None:
        with suppress(FileNotFoundError):
            os.stat(MARKER, dir_fd=self._fd, follow_symlinks=False)
            return
        if any(name != MARKER for name in os.listdir(self._fd)):  # another may just have made it
            raise UnsupportedError(
                f"{self._path} is not empty and has no {MARKER}, so it is not kdn's: remove it, or "
                "name another place"
            )
        with suppress(FileExistsError):
            os.close(os.open(MARKER, _CREATE, FILE_MODE, dir_fd=self._fd))

    def about(self, name: str) -> os.stat_result | None:
        """None if there is no such file, or if somebody else may have written it."""
        try:
            about = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return about if _is_believed(about) else None

    @contextmanager
    def open(self, name: str, *, change: bool = False) -> Iterator[int]:
        """For reading, or to `change` it. FormatError if somebody else may have written it."""
        fd, _ = self.take(name, change=change)
        try:
            yield fd
        finally:
            os.close(fd)

    def take(self, name: str, *, change: bool = False) -> tuple[int, os.stat_result]:
        """The same, to be closed by the caller, and what it is. Each call to the system gives the
        interpreter away, and beside an engine it takes long to get it back: these are two."""
        flags = (_CHANGE if change else _READ) | _QUIETLY
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            raise FormatError(f"a held chunk that cannot be opened: {error}") from error
        try:
            about = os.fstat(fd)
            if not _is_believed(about):
                raise FormatError("a held chunk that somebody else may have written")
        except BaseException:
            os.close(fd)
            raise
        return fd, about

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Whole, or not at all."""
        write_in_memory(self._fd, name, parts, aside=f".{secrets.token_hex(8)}.part")
        self._tell(name, True)

    def remove(self, name: str) -> None:
        """If it is a file of this user's."""
        with suppress(FileNotFoundError):
            if is_own_file(os.stat(name, dir_fd=self._fd, follow_symlinks=False)):
                os.unlink(name, dir_fd=self._fd)
                self._tell(name, False)

    def _tell(self, name: str, is_there: bool) -> None:
        if self._on_change is not None:
            self._on_change(name, is_there)

    def touch(self, name: str, used_ns: int, written_ns: int | None = None) -> None:
        """It was used then, and written then if that is told: else at the same time."""
        written_ns = used_ns if written_ns is None else written_ns
        os.utime(name, ns=(used_ns, written_ns), dir_fd=self._fd, follow_symlinks=False)

    def files(self) -> Iterator[tuple[int, int, str]]:
        """Time of last use, size, name; what a process left half-written counts, too."""
        for name, about in self.entries():
            yield about.st_mtime_ns, about.st_size, name

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Every file of ours, and what processes left half-written."""
        with os.scandir(self._fd) as entries:
            for entry in entries:
                if self._ours.fullmatch(entry.name) or _PART.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        if is_own_file(about):
                            yield entry.name, about

    def allowed_bytes(self, share: float, held_bytes: int) -> int:
        """What may lie here if so much does already: this share of the file system, if it has so
        much left."""
        return allowed_bytes(self._fd, share, held_bytes)


def is_half_written(name: str) -> bool:
    return _PART.fullmatch(name) is not None


def _is_believed(about: os.stat_result) -> bool:
    return is_own_file(about) and not about.st_mode & OTHERS_WRITE
