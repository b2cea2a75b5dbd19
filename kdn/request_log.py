"""What was decided for each request, as lines of JSON in a file that never grows beyond a bound.

A line is added in no time: it goes to a queue, and a thread writes it. A disk that is slow, full or
broken costs lines and nothing else. The file is this user's alone. All processes of a user append
to the same one; when it holds half of what it may, one of them renames it (`requests.jsonl.1`, in
the place of an older one) and all go on with a new one.

No line holds text, tokens, names or secrets. `kdn/session/decisions.py` makes them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdn.cache.folder import cache_folder
from kdn.files import FILE_MODE, FOLDER_MODE, OTHERS, is_own_file
from kdn.tracing import clean_id

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Lines that wait to be written; more are dropped."""
MAX_LINE_BYTES = 16 << 10
"""A longer line is not written: whatever it is about, it is not compact."""
MAX_FOUND = 10_000
CLOSE_S = 2.0
Record = Mapping[str, Any]


def default_path() -> Path:
    return cache_folder() / "requests.jsonl"


class RequestLog:
    """`add` from any thread; `close` waits for a moment until all is written."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.dropped = 0
        """Lines that were not written."""
        self._path, self._max_bytes = path, max_bytes
        self._waiting: queue.Queue[Record | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # guards _thread
        self._fd = -1
        self._trouble = ""  # the last one, which is logged once

    def add(self, record: Record) -> None:
        """Write it soon. It must not change any more."""
        try:
            self._waiting.put_nowait({"time": round(time.time(), 3), **record})
        except queue.Full:
            self.dropped += 1
            return
        # Also in a forked child, which has none of its parent's threads.
        if self._thread is None or not self._thread.is_alive():
            self._start()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            with suppress(queue.Full):
                self._waiting.put_nowait(None)
            thread.join(CLOSE_S)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="kdn-log", daemon=True)
                self._thread.start()

    # in its thread

    def _run(self) -> None:
        is_over = False
        while not is_over:
            records = [self._waiting.get()]
            while not self._waiting.empty():
                records.append(self._waiting.get())
            is_over = None in records
            lines = [_line(record) for record in records if record is not None]
            self._write([line for line in lines if 0 < len(line) <= MAX_LINE_BYTES])
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, lines: list[bytes]) -> None:
        try:
            self._open(sum(map(len, lines)))
            os.write(self._fd, b"".join(lines))
            self._trouble = ""
        except OSError as error:
            self.dropped += len(lines)
            if self._trouble != str(error):
                self._trouble = str(error)
                logger.warning("requests are not logged in %s: %s", self._path, error)

    def _open(self, more_bytes: int) -> None:
        """The file as it is now: another process may have begun a new one."""
        if self._fd >= 0 and not self._is_current():
            os.close(self._fd)
            self._fd = -1
        if self._fd < 0:
            self._fd = _opened(self._path)
        if os.fstat(self._fd).st_size + more_bytes > self._max_bytes // 2:
            self._begin_anew()

    def _is_current(self) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        return False

    def _begin_anew(self) -> None:
        """One process at a time: whoever has the lock of the file that is full."""
        with suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_current() and os.fstat(self._fd).st_size:
                os.rename(self._path, older(self._path))
            os.close(self._fd)
            self._fd = -1
            self._fd = _opened(self._path)


def older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def find(path: Path, request_id: str) -> list[dict[str, Any]]:
    """Every line of one request, the oldest first. vLLM adds a part of its own to the ids that it
    is given: `ID-...` is found by ID, too."""
    wanted = clean_id(request_id)
    found = []
    for record in _records(path, wanted):
        own = str(record.get("request", ""))
        if own == wanted or own.startswith(f"{wanted}-"):
            found.append(record)
            if len(found) == MAX_FOUND:
                break
    return found


def newest(path: Path, count: int) -> list[str]:
    """Ids of the last requests, the newest first."""
    every = [str(record["request"]) for record in _records(path) if record.get("request")]
    return list(dict.fromkeys(reversed(every)))[:count]


def _records(path: Path, part: str = "") -> Iterator[dict[str, Any]]:
    """Of both files, those lines that hold `part`. What is no record is skipped."""
    for one in (older(path), path):
        with suppress(FileNotFoundError), one.open("rb") as lines:
            for line in iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""):
                if part.encode() in line:
                    with suppress(ValueError):
                        record = json.loads(line)
                        if isinstance(record, dict):
                            yield record


def _opened(path: Path) -> int:
    """To append to, for this user alone. OSError if it is another's."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, FILE_MODE)
    try:
        about = os.fstat(fd)
        if not is_own_file(about):
            raise PermissionError("it is not a file of this user's")
        if about.st_mode & OTHERS:
            os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _line(record: Record) -> bytes:
    try:
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError):  # a mistake of ours: it costs this line
        return b""
