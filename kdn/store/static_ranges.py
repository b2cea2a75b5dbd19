"""Ranges of files of a web server: bytes go from the socket to where their reader wants them.

One connection carries many requests, sent ahead of their answers, which come in order: so reading
parts of many files takes one round trip, as a node's batch read does. A server that ends the
connection between answers is asked again on another, from then on one request at a time. Answers
are read with suspicion: an answer of another length, range, coding or status is an error by name.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from kdn.errors import LimitError, NotAllowedError, StoreError
from kdn.store.read_connections import (
    CutError,
    ReadConnection,
    ReadConnections,
    ReadLimits,
    parse_head,
)
from kdn.store.streaming import Ask, Receiver, hand_over

MAX_HEAD_BYTES = 16 << 10
HEAD_STEP_BYTES = 512
"""Taken at once while a head is expected: what is of the body is copied once more."""
MAX_SKIPPED_BYTES = 256 << 10
"""Of a page that says that there is no such file."""
AHEAD = 64
"""Requests on one connection before their answers."""
MISSING = (404, 410, 416)
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_LENGTH = re.compile(r"\d{1,18}")


class RangeReader:
    """The answers to a sequence of asks, one after the other, their bytes to a receiver."""

    def __init__(self, asks: Sequence[Ask], receiver: Receiver, missing: Sequence[int]) -> None:
        """`missing`: statuses that say that there is no such file."""
        self.number = 0
        """Of the ask whose answer comes next, or is coming."""
        self.keeps_open = True
        """More answers may come on this connection."""
        self.began = False
        """Something of the answer has come."""
        self._asks, self._receiver, self._missing = asks, receiver, missing
        self._head = bytearray()
        self._buffer = memoryview(bytearray(HEAD_STEP_BYTES))
        self._skipped = memoryview(b"")
        self._in_body = self._is_skipped = False
        self._position = self._left_bytes = 0

    @property
    def is_complete(self) -> bool:
        return self.number == len(self._asks)

    def room(self) -> memoryview:
        """Memory for the next bytes: to be filled, as far as they are there, at once."""
        if not self._in_body:
            return self._buffer
        if self._is_skipped:
            if not len(self._skipped):
                self._skipped = memoryview(bytearray(HEAD_STEP_BYTES * 32))
            return self._skipped[: self._left_bytes]
        memory = self._receiver.room(self.number, self._position, self._left_bytes)
        return memory[: self._left_bytes]

    def filled(self, num_bytes: int) -> None:
        """So many bytes are in what `room` gave."""
        if not self._in_body:
            self.feed(self._buffer[:num_bytes])
            return
        if not self._is_skipped:
            self._receiver.taken(self.number, self._position, num_bytes)
        self._advance(num_bytes)

    def feed(self, data: bytes | memoryview) -> None:
        """Bytes that are somewhere else."""
        view = memoryview(data)
        while len(view):
            if not (self.keeps_open or self._in_body or self.began):
                return  # of an answer whose end cannot be told
            if self.is_complete:
                raise StoreError("expected nothing after the answer")
            if not self._in_body:
                view = self._take_head(view)
                continue
            part, view = view[: self._left_bytes], view[self._left_bytes :]
            if not self._is_skipped:
                hand_over(self._receiver, self.number, self._position, part)
            self._advance(len(part))

    def _take_head(self, view: memoryview) -> memoryview:
        """Gather a head; the bytes after it."""
        self.began = True
        before = len(self._head)
        self._head += view
        end = self._head.find(b"\r\n\r\n", max(0, before - 3))
        if end < 0:
            if len(self._head) > MAX_HEAD_BYTES:
                raise LimitError(f"expected a head of at most {MAX_HEAD_BYTES} bytes")
            return view[:0]
        head = bytes(self._head[:end])
        self._head.clear()
        self._begin(*parse_head(head))
        return view[end + 4 - before :]

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        ask = self._asks[self.number]
        self.keeps_open = headers.get("connection", "").lower() != "close"
        self._in_body, self._position = True, ask.start
        self._is_skipped = status in self._missing
        if self._is_skipped:
            self._receiver.gone(self.number)
            self._left_bytes = self._to_skip(headers)
        else:
            check_coding(headers)
            self._left_bytes = _body_bytes(status, headers, ask)
        self._advance(0)

    def _to_skip(self, headers: Mapping[str, str]) -> int:
        """Where it cannot be told or is long, the connection is of no use any more."""
        length = headers.get("content-length", "")
        told = "transfer-encoding" not in headers and _LENGTH.fullmatch(length)
        if told and int(length) <= MAX_SKIPPED_BYTES:
            return int(length)
        self.keeps_open = False
        return 0

    def _advance(self, num_bytes: int) -> None:
        self._position += num_bytes
        self._left_bytes -= num_bytes
        if not self._left_bytes:
            self._in_body = self.began = False
            self.number += 1


def check_coding(headers: Mapping[str, str]) -> None:
    """Nobody asked for anything but the bytes as they are."""
    found = headers.get("content-encoding", "identity").lower()
    if found != "identity":
        raise StoreError(f"expected the bytes as they are, found Content-Encoding: {found[:80]}")


def check_status(status: int, headers: Mapping[str, str]) -> None:
    """What says neither that a file is there nor that it is missing."""
    if 300 <= status < 400:
        where = headers.get("location", "nowhere")[:200]
        raise StoreError(f"expected a file, found {status}: it is said to be at {where!r}")
    if status in (401, 403, 407):
        raise NotAllowedError(f"expected a file that everybody may read, found {status}")
    if status not in (200, 206):
        raise StoreError(f"expected 200 or 206, found {status}")


def content_range(headers: Mapping[str, str]) -> tuple[int, int, int | None]:
    """Start, end and, if it is told, the size of the whole."""
    found = _RANGE.fullmatch(headers.get("content-range", "").strip())
    if found is None:
        raise StoreError(f"expected a range, found {headers.get('content-range', '')[:80]!r}")
    return int(found[1]), int(found[2]) + 1, None if found[3] == "*" else int(found[3])


def _body_bytes(status: int, headers: Mapping[str, str], ask: Ask) -> int:
    check_status(status, headers)
    length = headers.get("content-length", "")
    if not _LENGTH.fullmatch(length) or "transfer-encoding" in headers:
        raise StoreError("expected Content-Length, found none")
    wanted = (ask.start, ask.end)
    if status == 206:
        found: tuple[int, int] = content_range(headers)[:2]
    else:
        found = (0, int(length))
        if found != wanted:
            raise StoreError("expected a range, found the whole: this server serves no ranges")
    if found != wanted or int(length) != ask.end - ask.start:
        raise StoreError(f"expected bytes {ask.start} to {ask.end}, found {found}, {length} bytes")
    return int(length)


class RangeConnections(ReadConnections):
    """To one web server."""

    def __init__(
        self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, limits: ReadLimits
    ) -> None:
        super().__init__(url, headers, tls, limits)
        lines = {"Host": urlsplit(url).netloc, **headers}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._ahead = AHEAD

    async def read_ranges(
        self,
        asks: Sequence[Ask],
        receiver: Receiver,
        path: Callable[[Ask], str],
        missing: Sequence[int] = MISSING,
    ) -> None:
        """`path`: of the file that an ask is for, under the server's URL."""
        reader = RangeReader(asks, receiver, missing)
        async with asyncio.timeout(self._limits.deadline_s):
            async with asyncio.timeout(self._limits.connect_s):
                await self._places.acquire()
            try:
                while not reader.is_complete:
                    some = asks[reader.number : reader.number + self._ahead]
                    await self._read_some([self._request(ask, path) for ask in some], reader)
            finally:
                self._places.release()

    async def _read_some(self, requests: Sequence[bytes], reader: RangeReader) -> None:
        """All of them, or those before the server ended the connection."""
        first, kept = reader.number, bool(self._free)
        connection = self._free.pop() if kept else await self._connect()
        assert isinstance(connection, RangeConnection)
        reader.keeps_open = True
        try:
            await connection.fetch(requests, reader, self._limits.silence_s)
        except CutError:
            if not kept and reader.number == first:
                raise
        finally:
            self._settle(connection)
        if not kept and reader.number == first + 1 < first + len(requests):
            self._ahead = 1  # it takes no requests ahead of their answers

    def _request(self, ask: Ask, path: Callable[[Ask], str]) -> bytes:
        lines = f"GET {self._path}{path(ask)} HTTP/1.1\r\n{self._lines}"
        return f"{lines}Range: bytes={ask.start}-{ask.end - 1}\r\n\r\n".encode("ascii")

    def _new_connection(self) -> ReadConnection:
        return RangeConnection(self._lost)


class RangeConnection(ReadConnection):
    """One at a time: `fetch`, then again while it `is_idle`."""

    _ranges: RangeReader | None = None
    _until = 0

    async def fetch(self, requests: Sequence[bytes], reader: RangeReader, silence_s: float) -> None:
        """Until all answers have come, or the server ends the connection after some of them.
        CutError: nothing of the next answer has come."""
        assert self._answer is None
        if self._transport is None or self._transport.is_closing():
            raise CutError("the connection was closed")
        self._answer, self._ranges = self._loop.create_future(), reader
        self._until = reader.number + len(requests)
        self._heard_s = self._loop.time()
        self._watch(silence_s)
        try:
            self._transport.write(b"".join(requests))
            await self._answer
        except BaseException:
            self._keeps_open = False
            raise
        finally:
            assert self._timer is not None
            self._timer.cancel()
            self._answer = self._ranges = None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._head[:1] if self._ranges is None else self._ranges.room()

    def buffer_updated(self, num_bytes: int) -> None:
        self._heard_s = self._loop.time()
        reader = self._ranges
        try:
            if reader is None:
                raise StoreError("bytes that nobody asked for")
            reader.filled(num_bytes)
            if reader.number > self._until or (reader.number == self._until and reader.began):
                raise StoreError("expected nothing after the answers")
            ended = not reader.keeps_open and not reader.began
            if reader.number == self._until or ended:
                self._keeps_open = reader.keeps_open
                self._ranges = None
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(None)
        except Exception as error:  # also a mistake of the receiver's: who waits learns of it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._ranges = None  # what still comes is nobody's
        super()._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        began = self._ranges is not None and self._ranges.began
        self._num_head = int(began)  # which is how the parent tells a cut from a refusal
        super().connection_lost(error)
