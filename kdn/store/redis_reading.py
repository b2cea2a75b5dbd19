"""Reading objects from Redis: the jobs for it, and what they make of answers.

The record is read before the bytes that follow it, and after them: if it is the same, with a nonce
that no other put has, so was the object in between. (A transaction would do, too, but a server that
is full refuses those.) From the beginning of an object on, one command reads both, and how many
bytes it gives says whether the string has all that was asked for. The parts of a long object are
read one after the other, under names that only its record tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from kdn.errors import FormatError
from kdn.store.redis_record import (
    MAX_OBJECT_BYTES,
    PART_BYTES,
    RECORD_BYTES,
    Keys,
    Record,
    parse_record,
)
from kdn.store.redis_wire import Command, Job, Reply, Skipped, Target
from kdn.store.streaming import Receiver


def range_of(name: bytes, start: int, end: int) -> Command:
    """Packed at once: most commands are this one."""
    first, last = b"%d" % start, b"%d" % (end - 1)
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
        len(name), name, len(first), first, len(last), last,
    )  # fmt: skip


class Found(NamedTuple):
    """What is under a name. A string that is not as long as its record says has no record."""

    record: Record | None = None
    seen: bytes | None = None
    """The first bytes, up to the end of a record; none of what is no string. None: there is
    nothing."""


def found_in(key: bytes, told: Reply, size_bytes: Reply) -> Found:
    """From the first bytes and the length of a string."""
    if not isinstance(told, bytes):
        return Found(seen=b"")
    if not told:
        return Found()
    seen = told[:RECORD_BYTES]
    record = parsed(key, seen)
    if record is None or size_bytes != RECORD_BYTES + record.first_bytes:
        return Found(seen=seen)
    return Found(record, seen)


class LookupJob(Job):
    """What is under an object's name, and its first bytes, as far as that string has them."""

    def __init__(self, keys: Keys, key: bytes, head_bytes: int = 0) -> None:
        end = RECORD_BYTES + min(head_bytes, PART_BYTES)
        name = keys.of(key)
        commands = [range_of(name, 0, end), (b"STRLEN", name)]
        super().__init__(name, commands, max_string_bytes=end)
        self._object = key
        self.found = Found()
        self.head = b""

    @property
    def is_miss(self) -> bool:
        return self.found.record is None

    def answered(self) -> None:
        told, size_bytes = self.replies[-2:]
        self.found = found_in(self._object, told, size_bytes)
        self.head = told[RECORD_BYTES:] if isinstance(told, bytes) else b""


class LengthJob(Job):
    """Whether a part of an object is there."""

    def __init__(self, name: bytes, record: Record, part: int) -> None:
        super().__init__(name, [(b"STRLEN", name)])
        self.record = record
        self._expected_bytes = record.part_bytes(part)

    @property
    def is_miss(self) -> bool:
        return self.replies[-1:] != [self._expected_bytes]


def parsed(key: bytes, data: bytes) -> Record | None:
    try:
        return parse_record(key, data)
    except FormatError:
        return None


_DATA = 2
"""The reply with an object's bytes, after its record and the length of its string."""


class _Asked(Enum):
    RECORD = auto()
    BOTH = auto()
    """The record, bytes that follow it, and the record again."""
    TOGETHER = auto()
    """The record with the bytes right after it."""
    PART = auto()


class SpanJob(Job):
    """Bytes [start, end) of an object, to a receiver, as far as one string has them. It is run
    again until it `is_whole` or `is_gone`."""

    streams = True

    def __init__(
        self,
        keys: Keys,
        key: bytes,
        start: int,
        end: int | None,
        etag: bytes | None,
        receiver: Receiver,
        number: int = 0,
    ) -> None:
        super().__init__(keys.of(key))
        self.record: Record | None = None
        self.is_gone = False
        self._keys, self._object, self._etag = keys, key, etag
        self._start = self._position = start
        self._end = MAX_OBJECT_BYTES if end is None else min(end, MAX_OBJECT_BYTES)
        self._receiver, self.number = receiver, number
        self._asked = _Asked.RECORD
        self._accepted = False

    @property
    def is_whole(self) -> bool:
        record = self.record
        return record is not None and self._position >= min(self._end, record.entry.size_bytes)

    @property
    def is_miss(self) -> bool:
        return self.is_gone

    @property
    def progress(self) -> int:
        return self._position

    @property
    def travelling_bytes(self) -> int:
        part = self._position // PART_BYTES
        end = min(self._end, (part + 1) * PART_BYTES)
        return 2 * RECORD_BYTES + max(0, end - self._position)

    def commands(self) -> Sequence[Command]:
        """From where the last attempt got to: a receiver takes every byte once."""
        self.is_gone = self._accepted = False
        part, start = divmod(self._position, PART_BYTES)
        end = max(start, min(self._end - part * PART_BYTES, PART_BYTES))
        self.max_string_bytes = max(RECORD_BYTES, end - start)
        if not part and not start and end:
            self._asked = _Asked.TOGETHER
            self.max_string_bytes = RECORD_BYTES + end
            return [range_of(self.key, 0, RECORD_BYTES + end)]
        if part and self.record is not None:
            self._asked = _Asked.PART
            return [range_of(self._keys.of_part(self.record, part), start, end)]
        record = range_of(self.key, 0, RECORD_BYTES)
        if part or start == end:
            self._asked = _Asked.RECORD
            return [record, (b"STRLEN", self.key)]
        self._asked = _Asked.BOTH
        data = range_of(self.key, RECORD_BYTES + start, RECORD_BYTES + end)
        return [record, (b"STRLEN", self.key), data, record]

    def target(self, before: list[Reply], size_bytes: int) -> Target | None:
        """A string's bytes are the object's if its record has come, and if there are as many as
        it should have there."""
        if self._asked is _Asked.BOTH:
            if len(before) != _DATA:
                return None
            self._accept(found_in(self._object, *before).record)
            if not self._accepted:
                return Skipped()
        elif self._asked is _Asked.TOGETHER:
            return None if before else _Together(self, size_bytes)
        elif self._asked is _Asked.RECORD:
            return None
        if size_bytes != self._expected_bytes():
            self.is_gone = True
            return Skipped()
        return self

    def take(self, before: list[Reply], data: memoryview) -> bool:
        """What `target` and `_Together` do, in one go."""
        if self._asked is not _Asked.TOGETHER or before or len(data) < RECORD_BYTES:
            return False
        self.began(bytes(data[:RECORD_BYTES]), len(data) - RECORD_BYTES)
        start = RECORD_BYTES
        while self._accepted and start < len(data):
            room = self.room(len(data) - start)
            end = min(start + len(room), len(data))
            room[: end - start] = data[start:end]
            self.taken(end - start)
            start = end
        return True

    def began(self, told: bytes, size_bytes: int) -> Target:
        """Where bytes go that follow this record, of which there are so many."""
        self._accept(parsed(self._object, told))
        if self._accepted and size_bytes != self._expected_bytes():
            self.is_gone, self._accepted = True, False
        return self if self._accepted else Skipped()

    def _expected_bytes(self) -> int:
        assert self.record is not None
        part, start = divmod(self._position, PART_BYTES)
        end = min(self._end - part * PART_BYTES, self.record.part_bytes(part))
        return max(0, end - start)

    def _accept(self, record: Record | None) -> None:
        """Bytes of two objects are never joined: what began with one record goes on with it."""
        began = self.record if self._position > self._start else None
        fits = record is not None and self._etag in (None, record.entry.etag)
        if began is not None and record is not None and record.nonce != began.nonce:
            fits = False
        self.is_gone, self._accepted = not fits, fits
        self.record = record if fits else self.record

    def answered(self) -> None:
        if self._asked is _Asked.RECORD:
            self._accept(found_in(self._object, *self.replies[-2:]).record)
        elif self._asked is _Asked.PART:
            self.is_gone |= not isinstance(self.replies[-1], bytes)
        elif self._asked is _Asked.TOGETHER:
            self.is_gone |= not (self._accepted and isinstance(self.replies[-1], bytes))
        else:
            first, _, data, again = self.replies[-4:]
            unchanged = self._accepted and isinstance(data, bytes) and again == first
            self.is_gone |= not unchanged

    # where the bytes go

    def room(self, num_bytes: int) -> memoryview:
        return self._receiver.room(self.number, self._position, num_bytes)

    def taken(self, num_bytes: int) -> None:
        position, self._position = self._position, self._position + num_bytes
        self._receiver.taken(self.number, position, num_bytes)


class _Together:
    """A string that begins with a record: it tells where the rest goes."""

    def __init__(self, job: SpanJob, size_bytes: int) -> None:
        self._job, self._left_bytes = job, size_bytes
        self._record = bytearray(min(RECORD_BYTES, size_bytes))
        self._room = memoryview(self._record)
        self._rest: Target | None = None

    def room(self, num_bytes: int) -> memoryview:
        return self._room if self._rest is None else self._rest.room(num_bytes)

    def taken(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._rest is not None:
            self._rest.taken(num_bytes)
            return
        self._room = self._room[num_bytes:]
        if not self._room:
            told = bytes(self._record)
            self._rest = self._job.began(told, self._left_bytes)


class Gathered:
    """A receiver of one ask, which keeps its bytes. Memory is taken for what comes, never for what
    is promised."""

    def __init__(self) -> None:
        self._blocks: list[bytearray] = []
        self._left = memoryview(b"")

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        if not len(self._left):
            self._blocks.append(bytearray(num_bytes))
            self._left = memoryview(self._blocks[-1])
        return self._left

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        self._left = self._left[num_bytes:]

    def gone(self, number: int) -> None:
        pass

    def data(self) -> memoryview:
        return memoryview(self._blocks[0] if len(self._blocks) == 1 else b"".join(self._blocks))
