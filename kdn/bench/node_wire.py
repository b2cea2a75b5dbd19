"""The client that reads from a kdn node, nginx and Redis alike: plain sockets, one thread.

A dialect says how to ask for a batch of objects and where a reply's body begins and ends; the rest
is shared: a connection keeps a window of batches asked for, receives into one reused buffer, checks
the size of every reply, and compares the first ones byte by byte with what was stored.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol

import xxhash

from kdn.errors import FormatError
from kdn.protocol import frames

BUFFER_BYTES = 1 << 20
MAX_HEAD_BYTES = 1 << 16
DEADLINE_S = 20.0
Objects = Mapping[str, bytes]
"""Key in hex to content."""


class WireError(FormatError):
    """A server did not answer as it should."""


class Dialect(Protocol):
    """How one server is asked, and answers."""

    name: str
    batch_bytes: int
    """Asked for at once: what this server is fastest with (tried: 1 to 8 MiB of the node, whose
    requests cost more than its bytes; 1 and 4 MiB of the others)."""

    def ask(self, keys: Sequence[str], client: str) -> tuple[bytes, int]:
        """The request for these objects, and how many replies it brings."""

    def head(self, data: bytes) -> tuple[int, int] | None:
        """(bytes of the head, bytes after it) of the reply that begins here; None if more of it
        is needed to tell."""

    def payload(self, reply: bytes, keys: Sequence[str]) -> list[bytes]:
        """The objects in what follows the head of a reply."""


class KdnDialect:
    """One batch read for all objects: one reply of frames. With the token of a tenant, if there are
    any."""

    name = "kdn"
    batch_bytes = 4 << 20

    def __init__(self, token: str = "") -> None:
        self._authorization = f"Authorization: Bearer {token}\r\n" if token else ""

    def request(self, method: str, path: str, *headers: str, length: int = 0) -> bytes:
        """The head of any request; a body of `length` bytes is to follow."""
        lines = "".join(f"{header}\r\n" for header in headers)
        return (
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\n{self._authorization}"
            f"Content-Length: {length}\r\n{lines}\r\n"
        ).encode()

    def put(self, key: str, data: bytes, *headers: str) -> bytes:
        """Stores one chunk."""
        checksum = f"Kdn-Checksum: {xxhash.xxh3_64_hexdigest(data)}"
        path = f"/v1/chunks/{key}"
        return self.request("PUT", path, checksum, *headers, length=len(data)) + data

    def ask(self, keys: Sequence[str], client: str) -> tuple[bytes, int]:
        body = json.dumps({"spans": [{"key": key} for key in keys]}).encode()
        return self.request("POST", "/v1/read", f"Kdn-Client: {client}", length=len(body)) + body, 1

    def head(self, data: bytes) -> tuple[int, int] | None:
        return http_head(data)

    def payload(self, reply: bytes, keys: Sequence[str]) -> list[bytes]:
        parts: list[list[bytes]] = [[] for _ in keys]
        for frame, data in frames.split(reply):
            if frame.status != frames.OK or frame.key.hex() != keys[frame.number]:
                raise WireError(f"kdn: status {frame.status} for {keys[frame.number]}")
            parts[frame.number].append(bytes(data))
        return [b"".join(part) for part in parts]


class NginxDialect:
    """A GET for each object, all sent at once."""

    name = "nginx"
    batch_bytes = 1 << 20

    def ask(self, keys: Sequence[str], client: str) -> tuple[bytes, int]:
        gets = [f"GET /{key} HTTP/1.1\r\nHost: bench\r\n\r\n" for key in keys]
        return "".join(gets).encode(), len(keys)

    def head(self, data: bytes) -> tuple[int, int] | None:
        return http_head(data)

    def payload(self, reply: bytes, keys: Sequence[str]) -> list[bytes]:
        return [reply]


class RedisDialect:
    """A GET for each object, all sent at once."""

    name = "redis"
    batch_bytes = 1 << 20

    def ask(self, keys: Sequence[str], client: str) -> tuple[bytes, int]:
        return b"".join(redis_command(b"GET", key.encode()) for key in keys), len(keys)

    def head(self, data: bytes) -> tuple[int, int] | None:
        end = data.find(b"\r\n")
        if end < 0:
            return None
        if data[:1] != b"$" or data[1:2] == b"-":
            raise WireError(f"redis: expected a value, found {data[:end][:80]!r}")
        return end + 2, int(data[1:end]) + 2

    def payload(self, reply: bytes, keys: Sequence[str]) -> list[bytes]:
        return [reply[:-2]]


def redis_command(*words: bytes) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


def http_head(data: bytes) -> tuple[int, int] | None:
    found = http_answer(data)
    if found is None:
        return None
    status, head_bytes, body_bytes = found
    if status != 200:
        raise WireError(f"expected status 200, found {data[:80]!r}")
    return head_bytes, body_bytes


def http_answer(data: bytes) -> tuple[int, int, int] | None:
    """(status, bytes of the head, bytes after it) of any answer; None if more is needed to tell."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    first, *lines = data[:end].decode("latin-1").split("\r\n")
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            return int(first.split(" ")[1]), end + 4, int(value)
    raise WireError(f"expected a Content-Length, found none in {first[:80]!r}")


@dataclass
class _Expected:
    """A reply that is on its way: which objects it brings."""

    keys: Sequence[str]
    asked_s: float


class BatchConnection:
    """One client's connection: `window` batches are asked for at any time, `batches` in all if that
    is told, until `stopping`. The first `compare` replies are compared with `objects`."""

    def __init__(
        self,
        address: tuple[str, int],
        dialect: Dialect,
        objects: Objects,
        *,
        batch: int = 1,
        window: int = 1,
        batches: int | None = None,
        client: str = "bench",
        first: int = 0,
        compare: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._dialect = dialect
        self._objects = objects
        self._client = client
        self._clock = clock
        keys = list(objects)
        self._keys: Iterator[str] = islice(cycle(keys), first % len(keys), None)
        self._batch, self._window, self._batches_left = batch, window, batches
        self._expected: deque[_Expected] = deque()
        self._replies_left: deque[int] = deque()  # of each batch asked for
        self._head = b""
        self._left_bytes = 0  # of the reply being received
        self._compare_next = compare  # so many more replies are compared
        self._kept = bytearray()  # of the reply being received, if it is to be compared
        self.stopping = False
        self.received_bytes = 0  # of whole replies' objects
        self.raw_bytes = 0  # of everything
        self.replies = 0
        self.latencies_s: list[float] = []  # of batches
        self.socket = socket.create_connection(address, timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def idle(self) -> bool:
        return not self._expected

    def fill(self) -> None:
        """Ask until the window is full."""
        while len(self._replies_left) < self._window and not self.stopping:
            if self._batches_left is not None:
                if not self._batches_left:
                    return
                self._batches_left -= 1
            keys = list(islice(self._keys, self._batch))
            request, replies = self._dialect.ask(keys, self._client)
            asked_s = self._clock()
            self.socket.sendall(request)
            self._replies_left.append(replies)
            each = len(keys) // replies
            for at in range(0, len(keys), each):
                self._expected.append(_Expected(keys[at : at + each], asked_s))

    def receive(self, buffer: memoryview) -> None:
        """Take what is there, once."""
        count = self.socket.recv_into(buffer)
        if not count:
            raise WireError(f"{self._dialect.name} closed the connection")
        self.raw_bytes += count
        view = buffer[:count]
        while len(view):
            view = self._take_body(view) if self._left_bytes else self._take_head(view)

    def _take_head(self, view: memoryview) -> memoryview:
        """The head may come in pieces; it is short."""
        if not self._expected:
            raise WireError(f"{self._dialect.name} sent what nobody asked for")
        before = len(self._head)
        self._head += bytes(view[:MAX_HEAD_BYTES])
        found = self._dialect.head(self._head)
        if found is None:
            if len(self._head) > MAX_HEAD_BYTES:
                raise WireError(f"{self._dialect.name} sent an endless head")
            return view[MAX_HEAD_BYTES:]
        head_bytes, self._left_bytes = found
        if self._left_bytes < self._payload_bytes():
            raise WireError(
                f"{self._dialect.name}: expected {self._payload_bytes()} bytes of objects, "
                f"found a reply of {self._left_bytes}"
            )
        self._head = b""
        return view[head_bytes - before :]

    def _take_body(self, view: memoryview) -> memoryview:
        part = view[: self._left_bytes]
        if self._compare_next:
            self._kept += part
        self._left_bytes -= len(part)
        if not self._left_bytes:
            self._finish()
        return view[len(part) :]

    def _payload_bytes(self) -> int:
        return sum(len(self._objects[key]) for key in self._expected[0].keys)

    def _finish(self) -> None:
        self.received_bytes += self._payload_bytes()
        self.replies += 1
        reply = self._expected.popleft()
        if self._compare_next:
            self._compare(bytes(self._kept), reply.keys)
            self._compare_next -= 1
            self._kept = bytearray()
        self._replies_left[0] -= 1
        if not self._replies_left[0]:
            self._replies_left.popleft()
            self.latencies_s.append(self._clock() - reply.asked_s)
            self.fill()

    def _compare(self, reply: bytes, keys: Sequence[str]) -> None:
        found = self._dialect.payload(reply, keys)
        if found != [self._objects[key] for key in keys]:
            raise WireError(f"{self._dialect.name} sent other bytes than were stored")

    def close(self) -> None:
        self.socket.close()


def drive(connections: Sequence[BatchConnection], until: Callable[[], bool] | None = None) -> None:
    """Serve all connections until told, then let what was asked for arrive; or until all batches
    have."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        for connection in connections:
            connection.fill()
        while any(not connection.idle for connection in connections):
            if until is not None and until():
                for connection in connections:
                    connection.stopping = True
            ready = selector.select(DEADLINE_S)
            if not ready:
                raise WireError(f"nothing came for {DEADLINE_S} s")
            for key, _ in ready:
                key.data.receive(buffer)


def read_batch(connection: BatchConnection, buffer: memoryview) -> float:
    """Ask for one batch and wait for it: seconds it took."""
    done = len(connection.latencies_s)
    connection.stopping = False
    connection.fill()
    connection.stopping = True
    while len(connection.latencies_s) == done:
        connection.receive(buffer)
    return connection.latencies_s[-1]


def ask(connection: socket.socket, request: bytes) -> tuple[int, memoryview]:
    """One request on an open connection: the status and the body, whatever they are."""
    connection.sendall(request)
    head = b""
    while (found := http_answer(head)) is None:
        head += _receive(connection, MAX_HEAD_BYTES)
    status, head_bytes, body_bytes = found
    body = memoryview(bytearray(body_bytes))
    have = len(head) - head_bytes
    body[:have] = head[head_bytes:]
    while have < body_bytes:
        count = connection.recv_into(body[have:])
        if not count:
            raise WireError("the connection was closed")
        have += count
    return status, body


def _receive(connection: socket.socket, most_bytes: int) -> bytes:
    part = connection.recv(most_bytes)
    if not part:
        raise WireError("the connection was closed")
    return part


def call(address: tuple[str, int], request: bytes, dialect: Dialect) -> bytes:
    """One request on a connection of its own; what follows the reply's head."""
    with socket.create_connection(address, timeout=DEADLINE_S) as connection:
        connection.sendall(request)
        data = bytearray()
        while (found := dialect.head(bytes(data))) is None or len(data) < sum(found):
            part = connection.recv(BUFFER_BYTES)
            if not part:
                raise WireError(f"{dialect.name} closed the connection")
            data += part
        return bytes(data[found[0] :])
