"""What travels to a Redis server and back (RESP2).

Answers are read with suspicion: every length is checked before memory is taken for it. The bytes of
long strings go from the socket straight to where their reader wants them, which is most of what
reading many megabytes costs; Python sees a few calls for each megabyte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kdn.errors import LimitError, MalformedError, StoreError

SCRATCH_BYTES = 256 << 10
LINE_BYTES = 512
"""Read at a time where a long string comes next: more would have to be copied."""
COPIED_BYTES = 128 << 10
"""Shorter strings are copied: that takes less than another call of the system for each."""
MAX_LINE_BYTES = 16 << 10
MAX_ITEMS = 1 << 16
MAX_HELD_BYTES = 64 << 20
"""Of all answers to one job, besides its longest string."""
ITEM_BYTES = 64
"""Counted for each answer besides its bytes: the Python object."""
MAX_DEPTH = 4

Command: TypeAlias = "tuple[bytes | memoryview | int, ...] | bytes"
"""Its parts, or bytes as they travel."""
Reply: TypeAlias = "bytes | int | ErrorReply | list[Reply] | None"


@dataclass(frozen=True)
class ErrorReply:
    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


class CutError(StoreError):
    """The connection ended, or could not be made."""


class Target(Protocol):
    """Where the bytes of a long string go."""

    def room(self, num_bytes: int) -> memoryview:
        """Memory for at most so many, and at least one."""
        ...

    def taken(self, num_bytes: int) -> None: ...


class Held:
    """A string that is kept until it is whole."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)
        self._left = memoryview(self.data)

    def room(self, num_bytes: int) -> memoryview:
        return self._left

    def taken(self, num_bytes: int) -> None:
        self._left = self._left[num_bytes:]


class Skipped:
    """Bytes that nobody wants."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(SCRATCH_BYTES))

    def room(self, num_bytes: int) -> memoryview:
        return self._memory[:num_bytes]

    def taken(self, num_bytes: int) -> None:
        pass


class Job:
    """Some commands about one key, sent together and answered in order by whoever has the key.

    They may be sent again, to another server, when a connection is lost: so what they do, done
    twice, must be right.
    """

    streams = False
    """The longest string of its answer goes somewhere else than to `replies`."""

    def __init__(
        self,
        key: bytes,
        commands: Sequence[Command] = (),
        *,
        writes: bool = False,
        max_string_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self.key = key
        self.writes = writes
        self.max_string_bytes = max_string_bytes
        self.replies: list[Reply] = []
        self.is_answered = False
        self.in_window_bytes = 0
        self._commands = commands

    @property
    def travelling_bytes(self) -> int:
        """About how many go or come back."""
        return max(sum(map(_num_bytes, self._commands)), self.max_string_bytes)

    @property
    def progress(self) -> int:
        """Grows with every attempt that was worth it."""
        return 0

    @property
    def is_miss(self) -> bool:
        """What a replica lacks, its master may have."""
        return False

    def commands(self) -> Sequence[Command]:
        return self._commands

    def target(self, before: list[Reply], size_bytes: int) -> Target | None:
        """Where a string goes that comes after `before` in the list it is in; None: to the
        replies."""
        return None

    def take(self, before: list[Reply], data: memoryview) -> bool:
        """The bytes of a string that has come whole, instead of a target for it. False: it wants a
        target."""
        return False

    def answered(self) -> None:
        """All replies are there; errors of the kind that is asked again may be among them."""
        return


def _num_bytes(command: Command) -> int:
    """About how many."""
    if isinstance(command, bytes):
        return len(command)
    return sum(len(part) for part in command[1:] if not isinstance(part, int))


def pack(command: Command) -> bytes:
    if isinstance(command, bytes):
        return command
    parts: list[bytes | memoryview] = [b"*%d" % len(command)]
    for part in command:
        data = b"%d" % part if isinstance(part, int) else part
        parts += (b"\r\n$%d\r\n" % len(data), data)
    parts.append(b"\r\n")
    return b"".join(parts)


class ReplyReader:
    """Answers as they arrive, put together one by one."""

    def __init__(self) -> None:
        self._bytes = bytearray(SCRATCH_BYTES)
        self._scratch = memoryview(self._bytes)
        self._start = self._end = 0  # of what is in the scratch and not yet read
        self._lists: list[tuple[int, list[Reply]]] = []  # begun: how long, and what is there
        self._target: Target | None = None  # of the string that comes
        self._held: Held | None = None
        self._left_bytes = -1  # of that string; -1: none comes; 0: its line break does
        self._job: Job | None = None
        self._held_bytes = 0
        self._waiting: deque[tuple[Job, deque[bool]]] = deque()
        self._counted: deque[bool] = deque()
        self.on_done: Callable[[Job], None] = lambda _: None

    @property
    def is_idle(self) -> bool:
        return self._job is None and self._start == self._end

    def expect(self, job: Job, counted: Sequence[bool]) -> None:
        """One answer for each of `counted`; those that are False are not the job's."""
        job.replies, job.is_answered = [], False
        self._waiting.append((job, deque(counted)))
        if self._job is None:
            self._next_job()

    def room(self) -> memoryview:
        """Memory for the next bytes: to be filled, as far as they are there, at once."""
        if self._left_bytes > 0 and self._start == self._end:
            assert self._target is not None
            return self._target.room(self._left_bytes)[: self._left_bytes]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._scratch):
            self._compact()
        job = self._job
        small = job is not None and job.streams and job.max_string_bytes > COPIED_BYTES
        return self._scratch[self._end :][: LINE_BYTES if small else SCRATCH_BYTES]

    def filled(self, num_bytes: int) -> None:
        """So many bytes are in what `room` gave."""
        if self._left_bytes > 0 and self._start == self._end:
            assert self._target is not None
            self._target.taken(num_bytes)
            self._left_bytes -= num_bytes
            return
        self._end += num_bytes
        while self._start < self._end and self._step():
            pass

    def _compact(self) -> None:
        size = self._end - self._start
        self._scratch[:size] = bytes(self._scratch[self._start : self._end])
        self._start, self._end = 0, size

    def _step(self) -> bool:
        """Whether there may be another one."""
        if self._left_bytes > 0:
            self._take_string()
            return True
        if self._left_bytes == 0:
            return self._end_string()
        return self._take_line()

    def _take_string(self) -> None:
        assert self._target is not None
        room = self._target.room(self._left_bytes)
        size = min(len(room), self._left_bytes, self._end - self._start)
        room[:size] = self._scratch[self._start : self._start + size]
        self._target.taken(size)
        self._start += size
        self._left_bytes -= size

    def _end_string(self) -> bool:
        if self._end - self._start < 2:
            return False
        if self._bytes[self._start : self._start + 2] != b"\r\n":
            raise MalformedError("redis: expected a line break after a string")
        self._start += 2
        self._left_bytes = -1
        held, self._held, self._target = self._held, None, None
        self._add(b"" if held is None else bytes(held.data))
        return True

    def _take_line(self) -> bool:
        if self._job is None:
            raise MalformedError("redis: bytes that nobody asked for")
        end = self._bytes.find(b"\r\n", self._start, self._end)
        if end < 0:
            if self._end - self._start > MAX_LINE_BYTES:
                raise LimitError(f"redis: expected a line of at most {MAX_LINE_BYTES} bytes")
            return False
        line = bytes(self._scratch[self._start : end])
        self._start = end + 2
        self._read_line(line, self._job)
        return True

    def _read_line(self, line: bytes, job: Job) -> None:
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            self._add(rest)
        elif kind == b"-":
            self._add(ErrorReply(rest.decode("utf-8", "replace")))
        elif kind == b":":
            self._add(_integer(rest))
        elif kind == b"$":
            self._begin_string(_integer(rest), job)
        elif kind == b"*":
            self._begin_list(_integer(rest))
        else:
            raise MalformedError(f"redis: expected an answer, found {line[:40]!r}")

    def _begin_string(self, size_bytes: int, job: Job) -> None:
        if size_bytes == -1:
            self._add(None)
            return
        if not 0 <= size_bytes <= job.max_string_bytes:
            raise LimitError(
                f"redis: expected at most {job.max_string_bytes} bytes, found {size_bytes}"
            )
        before = self._lists[-1][1] if self._lists else job.replies
        if job.streams and self._counted[0]:
            end = self._start + size_bytes
            is_here = end + 2 <= self._end and self._bytes[end : end + 2] == b"\r\n"
            if is_here and job.take(before, self._scratch[self._start : end]):
                self._start = end + 2
                self._add(b"")
                return
        self._target = job.target(before, size_bytes) if self._counted[0] else None
        if self._target is None:
            self._target = self._held = Held(size_bytes)
        self._left_bytes = size_bytes

    def _begin_list(self, size: int) -> None:
        if size == -1:
            self._add(None)
            return
        if not 0 <= size <= MAX_ITEMS or len(self._lists) == MAX_DEPTH:
            raise LimitError(f"redis: expected at most {MAX_ITEMS} items, found {size}")
        if size:
            self._lists.append((size, []))
        else:
            self._add([])

    def _add(self, reply: Reply) -> None:
        assert self._job is not None
        self._held_bytes += ITEM_BYTES + (len(reply) if isinstance(reply, bytes) else 0)
        if self._held_bytes > MAX_HELD_BYTES + self._job.max_string_bytes:
            raise LimitError(f"redis: expected an answer of at most {MAX_HELD_BYTES} bytes")
        while self._lists:
            size, items = self._lists[-1]
            items.append(reply)
            if len(items) < size:
                return
            self._lists.pop()
            reply = items
        job = self._job
        if self._counted.popleft() or isinstance(reply, ErrorReply):
            job.replies.append(reply)
        if not self._counted:
            job.is_answered = True
            job.answered()
            self._next_job()
            self.on_done(job)

    def _next_job(self) -> None:
        self._held_bytes = 0
        self._job, self._counted = self._waiting.popleft() if self._waiting else (None, deque())


def _integer(text: bytes) -> int:
    if len(text) > 20 or not text.removeprefix(b"-").isdigit():
        raise MalformedError(f"redis: expected a number, found {text[:40]!r}")
    return int(text)
