"""Connections for batch reads: bytes go from the socket to where their reader wants them.

An HTTP library hands on bytes that it has copied two or three times, in pieces of its own size,
and that is most of what a fast link costs a client. Here the kernel writes them into their place;
Python sees a few calls for each megabyte. Nothing but `POST` with an answer of frames is spoken
(`docs/protocol.md`); what a node answers instead is read as a refusal. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from aiohappyeyeballs import start_connection

from kdn.errors import LimitError, StoreError, UnavailableError
from kdn.protocol.limits import MAX_JSON_BYTES
from kdn.store.http_answers import Reply
from kdn.store.streaming import FrameReader
from kdn.tracing import outgoing

MAX_HEAD_BYTES = 16 << 10
CLOSE_S = 1.0
NEXT_ADDRESS_S = 0.25
"""After so long without an answer, the next address of a name is tried beside it."""
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d\d)(?: [^\r\n]*)?")
_SINGLE = ("content-length", "transfer-encoding", "connection")
_LENGTH = re.compile(r"\d{1,18}")


class CutError(UnavailableError):
    """The connection ended before the answer began."""


@dataclass(frozen=True)
class ReadLimits:
    connections: int
    connect_s: float
    """Including the wait for one of the connections."""
    silence_s: float
    deadline_s: float


class ReadConnections:
    """To one node. They are kept, and used again."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        limits: ReadLimits,
        address: str | None = None,
    ) -> None:
        """`tls`: None trusts what the system does. `address`: of those that the URL's name has,
        the only one to use."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._url, self._path = url, parts.path
        self._host = parts.hostname or ""
        self._address = (address or self._host, parts.port or (443 if secure else 80))
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._headers = {"Host": parts.netloc, **headers, "Content-Type": "application/json"}
        for name, value in self._headers.items():
            if not value.isprintable() or not value.isascii():  # it could begin another header
                raise StoreError(f"{url}: {name} is not what may stand in a header")
        self._limits = limits
        self._places = asyncio.Semaphore(limits.connections)
        self._is_closed = False
        self._free: list[ReadConnection] = []
        self._open: set[ReadConnection] = set()

    async def read(self, path: str, question: bytes, reader: FrameReader) -> None:
        """Ask, and receive all frames of the answer."""
        lines = [f"POST {self._path}{path} HTTP/1.1"]
        every = {**self._headers, **outgoing()}
        lines += [f"{name}: {value}" for name, value in every.items()]
        lines += [f"Content-Length: {len(question)}", "", ""]
        request = "\r\n".join(lines).encode("ascii") + question
        async with asyncio.timeout(self._limits.deadline_s):
            async with asyncio.timeout(self._limits.connect_s):
                await self._places.acquire()
            try:
                await self._ask(request, reader)
            finally:
                self._places.release()

    async def _ask(self, request: bytes, reader: FrameReader) -> None:
        """A node may close a connection that nobody used at any time: then on a new one."""
        while True:
            kept = bool(self._free)
            connection = self._free.pop() if kept else await self._connect()
            try:
                refusal = await connection.ask(request, reader, self._limits.silence_s)
            except CutError:
                if kept:
                    continue
                raise
            finally:
                self._settle(connection)
            if refusal is not None:
                raise refusal.error(self._url)
            return

    async def _connect(self) -> ReadConnection:
        host, port = self._address
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.connect_s):
            # A name may have an address that nobody answers at: the next is tried soon.
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            sock = await start_connection(found, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1)
            _, connection = await loop.create_connection(
                self._new_connection,
                sock=sock,
                ssl=self._tls,
                server_hostname=self._host if self._tls else None,
            )
        self._open.add(connection)
        if self._is_closed:  # meanwhile
            connection.abort()
            raise StoreError(f"{self._url}: its client was closed")
        return connection

    def _new_connection(self) -> ReadConnection:
        return ReadConnection(self._lost)

    def _settle(self, connection: ReadConnection) -> None:
        if connection.is_idle:
            self._free.append(connection)
        else:
            connection.abort()

    def _lost(self, connection: ReadConnection) -> None:
        self._open.discard(connection)
        with suppress(ValueError):
            self._free.remove(connection)

    async def close(self) -> None:
        """Whoever still waits for an answer learns that there is none."""
        self._is_closed = True
        every = list(self._open)
        for connection in every:
            connection.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(connection.closed.wait() for connection in every))


class ReadConnection(asyncio.BufferedProtocol):
    """One at a time: `ask`, then again while it `is_idle`."""

    def __init__(self, on_lost: Callable[[ReadConnection], None]) -> None:
        self.closed = asyncio.Event()
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply | None] | None = None
        self._reader: FrameReader | None = None
        self._head = memoryview(bytearray(MAX_HEAD_BYTES))
        self._num_head = 0
        self._reply: tuple[int, Mapping[str, str]] | None = None  # its head has come
        self._refusal: bytearray | None = None
        self._left_bytes = 0
        self._keeps_open = True
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and self._answer is None and self._keeps_open

    async def ask(self, request: bytes, reader: FrameReader, silence_s: float) -> Reply | None:
        """None: all frames have come. Otherwise what the node says instead. Whatever is raised,
        the connection is of no use any more."""
        assert self._answer is None
        if self._transport is None or self._transport.is_closing():
            raise CutError("the connection was closed")
        self._answer, self._reader = self._loop.create_future(), reader
        self._num_head, self._reply, self._refusal = 0, None, None
        self._heard_s = self._loop.time()
        self._watch(silence_s)
        try:
            self._transport.write(request)
            reply = await self._answer
        except BaseException:
            self._keeps_open = False
            raise
        finally:
            assert self._timer is not None
            self._timer.cancel()
            self._answer = self._reader = None
        return reply

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _watch(self, silence_s: float) -> None:
        quiet_s = self._loop.time() - self._heard_s
        if quiet_s >= silence_s:
            self._fail(UnavailableError(f"no byte for {quiet_s:.1f} s"))
        self._timer = self._loop.call_later(max(silence_s - quiet_s, 0.01), self._watch, silence_s)

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reader is None:
            return self._head[:1]
        if self._reply is None:
            return self._head[self._num_head :]
        if self._refusal is not None:
            return self._head[: self._left_bytes]
        return self._reader.room()[: self._left_bytes]

    def buffer_updated(self, num_bytes: int) -> None:
        self._heard_s = self._loop.time()
        try:
            if self._reader is None:
                raise UnavailableError("bytes that nobody asked for")
            if self._reply is None:
                self._take_head(self._reader, num_bytes)
            else:
                self._take(self._reader, num_bytes)
            if self._reply is not None and not self._left_bytes:
                self._finish(self._reader)
        except Exception as error:  # also a mistake of the receiver's: who waits learns of it
            self._fail(error)

    def eof_received(self) -> None:
        """Nothing is sent after it: the transport closes."""

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self._on_lost(self)
        began = self._num_head or self._reply is not None
        why = "the answer was cut off" if began else "no answer"
        kind = UnavailableError if began else CutError
        self._fail(kind(f"{why}: {error!r}" if error else why))

    # an answer

    def _take_head(self, reader: FrameReader, num_bytes: int) -> None:
        self._num_head += num_bytes
        head, end, _ = bytes(self._head[: self._num_head]).partition(b"\r\n\r\n")
        if not end:
            if self._num_head == MAX_HEAD_BYTES:
                raise LimitError(f"expected a head of at most {MAX_HEAD_BYTES} bytes")
            return
        status, headers = self._reply = parse_head(head)
        length = headers.get("content-length", "")
        if not _LENGTH.fullmatch(length) or "transfer-encoding" in headers:
            raise UnavailableError("expected Content-Length, found none")
        self._left_bytes = int(length)
        self._keeps_open = headers.get("connection", "").lower() != "close"
        if status != 200:
            self._refusal = bytearray()
            if self._left_bytes > MAX_JSON_BYTES:
                raise LimitError(f"expected at most {MAX_JSON_BYTES} bytes, found {length}")
        start = len(head) + len(end)
        early = self._head[start : self._num_head]
        if len(early) > self._left_bytes:
            raise UnavailableError("expected nothing after the answer")
        self._left_bytes -= len(early)
        if self._refusal is not None:
            self._refusal += early
        else:
            reader.feed(early)

    def _take(self, reader: FrameReader, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._refusal is not None:
            self._refusal += self._head[:num_bytes]
        else:
            reader.filled(num_bytes)

    def _finish(self, reader: FrameReader) -> None:
        assert self._reply is not None
        reply = None
        if self._refusal is None:
            reader.finish()
        else:
            reply = Reply(self._reply[0], bytes(self._refusal), self._reply[1])
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)
        self._reader = None

    def _fail(self, error: Exception) -> None:
        self._keeps_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self._reader = None
        self.abort()


def parse_head(head: bytes) -> tuple[int, Mapping[str, str]]:
    """Status and headers (names in lower case) of an answer."""
    first, *lines = head.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise UnavailableError(f"expected an answer of HTTP/1.1, found {first[:100]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name in headers and name in _SINGLE):
            raise UnavailableError(f"expected a header, found {line[:100]!r}")
        headers[name] = value.strip()
    return int(status[1]), headers
