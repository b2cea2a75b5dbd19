"""Many byte ranges in one go, handed on as they arrive.

Any store can be read so, in one of two ways. `Store.read_spans` hands on pieces; `Store.read_into`
puts bytes where their reader wants them, which a store that talks to a network does straight from
its socket, before their frame is complete. So a reader sees throughput as it is, loses nothing when
a connection breaks, and may ask for the rest from the very next byte. The price: pieces carry no
checksum. This is for readers who verify what they put together, as a bitstream's levels let them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kdn.errors import FormatError, TruncatedError, UnavailableError
from kdn.protocol import frames
from kdn.protocol.frames import FAILED, FIXED_BYTES, OK, Frame

BUFFER_BYTES = 1024
"""For heads, and for data where heads are shorter than expected."""
SKIPPED_BYTES = 64 << 10


class Ask(NamedTuple):
    """Bytes [start, end) of the object that `etag` names, and of no other."""

    key: bytes
    start: int
    end: int
    etag: bytes


class Piece(NamedTuple):
    """Some bytes of ask `number`, from `start` on. None: the object is gone, or is another."""

    number: int
    start: int
    data: bytes | memoryview | None


class Receiver(Protocol):
    """Where the bytes of many asks go. Bytes of one ask come in order."""

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        """Memory for the next bytes of ask `number`, from `start` on: for at most `num_bytes`, and
        for at least one. Nothing else happens on the event loop until they are `taken`, or none
        are."""
        ...

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        """So many of them have come."""
        ...

    def gone(self, number: int) -> None:
        """No more of this ask: its object is gone, or is another."""
        ...


@runtime_checkable
class CheckingReceiver(Receiver, Protocol):
    """One that keeps bytes for others, and so wants to know what they should be."""

    def check(self, number: int, start: int, num_bytes: int, checksum: int) -> None:
        """All of these bytes of an ask have been taken: FormatError if they have another xxh3-64
        than they had where they came from."""
        ...


class Collected:
    """A receiver that keeps the bytes of each ask; fewer, where there were fewer."""

    def __init__(self, num_asks: int) -> None:
        self.found = [b""] * num_asks
        self._room = memoryview(b"")

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        self._room = memoryview(bytearray(num_bytes))
        return self._room

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        self.found[number] += self._room[:num_bytes]

    def gone(self, number: int) -> None:
        """What came of it may be of an object that is gone: readers verify."""


def hand_over(receiver: Receiver, number: int, start: int, data: bytes | memoryview) -> None:
    """Give a receiver bytes that are at hand."""
    view = memoryview(data)
    while len(view):
        room = receiver.room(number, start, len(view))
        size = len(room)
        room[:] = view[:size]
        receiver.taken(number, start, size)
        start, view = start + size, view[size:]


class FrameReader:
    """The frames of a batch read (`docs/protocol.md`) as they arrive, their data to a receiver.

    Heads are verified. Data is only counted, and refused where it is not the next of its span;
    a `CheckingReceiver` is told what it should be.
    """

    def __init__(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        self._asks, self._receiver = asks, receiver
        self._checking = receiver if isinstance(receiver, CheckingReceiver) else None
        self._number = 0  # of the span whose bytes come next
        self._position = asks[0].start if asks else 0
        self._head = bytearray()
        self._head_bytes = FIXED_BYTES + 64  # of a head, as the last one was
        self._frame: Frame | None = None
        self._left_bytes = 0  # of the frame's data
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._skipped = memoryview(b"")

    def room(self) -> memoryview:
        """Memory for the next bytes: to be filled, as far as they are there, at once."""
        if self._frame is None:
            return self._buffer[: max(1, self._head_bytes - len(self._head))]
        if self._frame.status == OK:
            return self._receiver.room(self._number, self._position, self._left_bytes)
        if not len(self._skipped):
            self._skipped = memoryview(bytearray(SKIPPED_BYTES))
        return self._skipped[: self._left_bytes]

    def filled(self, num_bytes: int) -> None:
        """So many bytes are in what `room` gave."""
        if self._frame is None:
            self.feed(self._buffer[:num_bytes])
        else:
            self._took(self._frame, num_bytes)

    def feed(self, data: bytes | memoryview) -> None:
        """Bytes that are somewhere else."""
        view = memoryview(data)
        while len(view):
            if self._frame is None:
                view = self._take_head(view)
                continue
            part, view = view[: self._left_bytes], view[self._left_bytes :]
            if self._frame.status == OK:
                hand_over(self._receiver, self._number, self._position, part)
                self._advance(self._frame, len(part))
            else:
                self._took(self._frame, len(part))

    def finish(self) -> None:
        """The body has ended: TruncatedError if something should have followed."""
        if self._number < len(self._asks):
            raise TruncatedError(
                f"expected frames of {len(self._asks)} spans, found {self._number}"
            )

    def _took(self, frame: Frame, num_bytes: int) -> None:
        if frame.status == OK:
            self._receiver.taken(self._number, self._position, num_bytes)
        self._advance(frame, num_bytes)

    def _advance(self, frame: Frame, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if frame.status == OK:
            self._position += num_bytes
        if not self._left_bytes:
            self._end_frame(frame)

    def _take_head(self, view: memoryview) -> memoryview:
        """Gather a head: its fixed part tells how long the names after it are."""
        size = FIXED_BYTES
        if len(self._head) >= FIXED_BYTES:
            size += sum(self._head[11:14])
        taken = size - len(self._head)
        self._head += view[:taken]
        if len(self._head) >= FIXED_BYTES + sum(self._head[11:14]):
            self._frame = frame = self._check(frames.parse(bytes(self._head)))
            self._left_bytes = frame.length
            self._head_bytes = len(self._head)
            self._head.clear()
            if not frame.length:
                self._end_frame(frame)
        return view[taken:]

    def _check(self, frame: Frame) -> Frame:
        if frame.number != self._number or self._number >= len(self._asks):
            raise FormatError(f"expected a frame of span {self._number}, found {frame.number}")
        ask = self._asks[self._number]
        if frame.key != ask.key:
            raise FormatError(f"expected key {ask.key.hex()}, found {frame.key.hex()}")
        if frame.status == FAILED:
            raise UnavailableError("the node's own store failed")
        if frame.status == OK and (frame.etag, frame.start) != (ask.etag, self._position):
            raise FormatError(f"expected bytes from {self._position} on, found {frame.start}")
        if frame.status == OK and frame.start + frame.length > ask.end:
            raise FormatError(f"expected bytes up to {ask.end}, found {frame.length} more")
        return frame

    def _end_frame(self, frame: Frame) -> None:
        self._frame = None
        if self._checking is not None and frame.status == OK:
            self._checking.check(self._number, frame.start, frame.length, frame.checksum)
        if not frame.last:
            return
        if frame.status != OK:
            self._receiver.gone(self._number)
        self._number += 1
        if self._number < len(self._asks):
            self._position = self._asks[self._number].start
