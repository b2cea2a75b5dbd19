"""A connection over which a thread of the fetcher reads from a node.

The thread waits in the kernel, which fills a whole frame before it comes back: so a megabyte costs
Python a few calls. Every wait ends by a deadline, or when another thread cuts the connection.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from kdn.errors import LimitError, UnavailableError
from kdn.store.base import NodeAt
from kdn.store.read_connections import CutError, parse_head
from kdn.store.streaming import FrameReader

MAX_HEAD_BYTES = 16 << 10
MAX_DIGITS = 18
"""Of a length: Python refuses to read numbers of thousands of digits."""
FIRST_BYTES = 1024
"""Taken with the head of an answer at once: what follows the head in there is copied."""
PATIENCE_S = 0.25
"""After so long in one wait, the deadline is looked at."""
CONNECT_S = 1.0


class Connection:
    def __init__(self, node: NodeAt, tls: ssl.SSLContext | None, until_s: float) -> None:
        """OSError if the node is not there by then."""
        parts = urlsplit(node.url)
        is_secure = parts.scheme == "https"
        port = parts.port or (443 if is_secure else 80)
        limit_s = min(CONNECT_S, _left_s(until_s))
        sock = socket.create_connection((node.address or parts.hostname or "", port), limit_s)
        self.is_idle = True
        """Nothing is left to be read: it may be used again."""
        self._netloc, self._path = parts.netloc, parts.path
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_secure:
                tls = tls or ssl.create_default_context()
                sock = tls.wrap_socket(sock, server_hostname=parts.hostname)
                sock.settimeout(PATIENCE_S)
                self._flags = 0
            else:
                # Not a timeout of Python's: that would have it look before every call.
                sock.settimeout(None)
                patience = struct.pack("ll", 0, int(1e6 * PATIENCE_S))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
                self._flags = socket.MSG_WAITALL
        except BaseException:
            sock.close()
            raise
        self._sock = sock

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        question: bytes,
        reader: FrameReader,
        until_s: float,
    ) -> None:
        """Receive all frames of the answer. Whatever is raised, the connection is of no use any
        more; CutError if it was not when it was asked."""
        self.is_idle = False
        lines = [f"POST {self._path}{path} HTTP/1.1", f"Host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += ["Content-Type: application/json", f"Content-Length: {len(question)}", "", ""]
        request = "\r\n".join(lines).encode("ascii") + question
        try:
            self._sock.sendall(request)
            left_bytes, keeps_open = self._take_head(reader, until_s)
        except ConnectionError as error:
            raise CutError("the connection was closed") from error
        while left_bytes:
            room = reader.room()[:left_bytes]
            self._fill(room, until_s)
            reader.filled(len(room))
            left_bytes -= len(room)
        reader.finish()
        self.is_idle = keeps_open

    def _take_head(self, reader: FrameReader, until_s: float) -> tuple[int, bool]:
        """How many bytes are still to come, and whether another request may follow."""
        head, end = bytearray(), -1
        while end < 0:
            if len(head) > MAX_HEAD_BYTES:
                raise LimitError(f"expected a head of at most {MAX_HEAD_BYTES} bytes")
            room = memoryview(bytearray(FIRST_BYTES))
            found = self._some(room, until_s, 0)
            if not found:
                raise (UnavailableError if head else CutError)("no answer")
            head += room[:found]
            end = head.find(b"\r\n\r\n")
        status, headers = parse_head(bytes(head[:end]))
        length = headers.get("content-length", "")
        is_number = length.isdecimal() and len(length) <= MAX_DIGITS
        if status != 200 or not is_number or "transfer-encoding" in headers:
            raise UnavailableError(f"expected an answer of known length, found status {status}")
        early = memoryview(head)[end + 4 :]
        if len(early) > int(length):
            raise UnavailableError("expected nothing after the answer")
        reader.feed(early)
        return int(length) - len(early), headers.get("connection", "").lower() != "close"

    def _fill(self, room: memoryview, until_s: float) -> None:
        while room:
            found = self._some(room, until_s, self._flags)
            if not found:
                raise UnavailableError("the answer was cut off")
            room = room[found:]

    def _some(self, room: memoryview, until_s: float, flags: int) -> int:
        while True:
            _left_s(until_s)
            try:
                return self._sock.recv_into(room, 0, flags)
            except (BlockingIOError, TimeoutError):
                continue

    def cut(self) -> None:
        """From any thread: whoever waits for it learns of it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("not done by its deadline")
    return left_s
