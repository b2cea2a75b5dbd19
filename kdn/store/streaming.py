"""Many byte ranges in one go, handed on piece by piece as they arrive.

Any store can be read so (`Store.read_spans`); one that talks to a network hands on bytes before
their frame is complete. So a reader sees throughput as it is, loses nothing when a
connection breaks, and may ask for the rest from the very next byte. The price: pieces carry no
checksum. This is for readers who verify what they put together, as a bitstream's levels let them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kdn.errors import FormatError, StoreError, TruncatedError
from kdn.protocol import frames
from kdn.protocol.frames import FAILED, FIXED_BYTES, OK, Frame


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


class FrameSplitter:
    """The frames of a batch read (`docs/protocol.md`), fed as they arrive, to pieces.

    Heads are verified. Data is only counted, and refused where it is not the next of its span.
    """

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = asks
        self._number = 0  # of the span whose bytes come next
        self._position = asks[0].start if asks else 0
        self._head = bytearray()
        self._frame: Frame | None = None
        self._left_bytes = 0  # of the frame's data

    def feed(self, data: bytes) -> Iterator[Piece]:
        view = memoryview(data)
        while len(view):
            if self._frame is None:
                view = self._take_head(view)
            else:
                part, view = view[: self._left_bytes], view[self._left_bytes :]
                self._left_bytes -= len(part)
                if self._frame.status == OK:
                    yield Piece(self._number, self._position, part)
                    self._position += len(part)
            if self._frame is not None and not self._left_bytes:
                yield from self._end_frame(self._frame)

    def finish(self) -> None:
        """The body has ended: TruncatedError if something should have followed."""
        if self._number < len(self._asks):
            raise TruncatedError(
                f"expected frames of {len(self._asks)} spans, found {self._number}"
            )

    def _take_head(self, view: memoryview) -> memoryview:
        """Gather a head: its fixed part tells how long the names after it are."""
        size = FIXED_BYTES
        if len(self._head) >= FIXED_BYTES:
            size += sum(self._head[11:14])
        taken = size - len(self._head)
        self._head += view[:taken]
        if len(self._head) >= FIXED_BYTES + sum(self._head[11:14]):
            self._frame = self._check(frames.parse(bytes(self._head)))
            self._left_bytes = self._frame.length
            self._head.clear()
        return view[taken:]

    def _check(self, frame: Frame) -> Frame:
        if frame.number != self._number or self._number >= len(self._asks):
            raise FormatError(f"expected a frame of span {self._number}, found {frame.number}")
        ask = self._asks[self._number]
        if frame.key != ask.key:
            raise FormatError(f"expected key {ask.key.hex()}, found {frame.key.hex()}")
        if frame.status == FAILED:
            raise StoreError("the node's own store failed")
        if frame.status == OK and (frame.etag, frame.start) != (ask.etag, self._position):
            raise FormatError(f"expected bytes from {self._position} on, found {frame.start}")
        if frame.status == OK and frame.start + frame.length > ask.end:
            raise FormatError(f"expected bytes up to {ask.end}, found {frame.length} more")
        return frame

    def _end_frame(self, frame: Frame) -> Iterator[Piece]:
        self._frame = None
        if not frame.last:
            return
        if frame.status != OK:
            yield Piece(self._number, self._position, None)
        self._number += 1
        if self._number < len(self._asks):
            self._position = self._asks[self._number].start
