"""A process that fetches streams for an engine: it receives and verifies, and does nothing else.

An engine's own interpreter is busy, and receiving a hundred megabytes takes some fifty milliseconds
of one. This process has an interpreter of its own, and threads that mostly wait in the kernel. Each
thread reads over one connection, straight into memory that the engine maps (`arena.py`). It checks
each level against the digest that the engine took from the sealed header. The process reports what
it verified at most once a millisecond, and the end of an order at once. It neither plans nor
retries: what it does not bring, the engine fetches itself.

`fetcher.py` starts it with two descriptors: the socket to the engine, and the arena. It ends when
the engine does. It imports neither torch nor a codec.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from kdn.codec.header import level_digest
from kdn.delivery.arena import map_arena
from kdn.delivery.fetch_connection import Connection
from kdn.delivery.fetch_messages import Hello, News, Order, Span, Stop, pack, parse_order
from kdn.errors import KdnError
from kdn.store.base import NodeAt
from kdn.store.read_connections import CutError
from kdn.store.streaming import Ask, FrameReader
from kdn.store.tls import client_tls

TELL_S = 0.001
LOOK_S = 2.0
"""So often it looks whether its engine still lives, should the socket not show it."""
PIECES = 4
"""Requests to each connection, so that none is done long before the others."""
PIECE_BYTES = 1 << 20


class Load:
    """An order under way, in pieces that each a thread works on."""

    def __init__(self, order: Order, pieces: int) -> None:
        self.order = order
        self.is_stopped = False
        self.lock = threading.Lock()  # guards what follows
        self.pieces = pieces
        self.fetched_bytes = 0
        self.verified: dict[int, int] = {}  # not told yet
        self.trouble = ""
        self.connections: set[Connection] = set()

    def news(self) -> News:
        """What has not been told yet."""
        with self.lock:
            told, self.verified = self.verified, {}
            ended = not self.pieces
            return News(
                self.order.number, self.fetched_bytes, list(told.items()), ended, self.trouble
            )

    def stop(self) -> None:
        with self.lock:
            self.is_stopped = True
            for connection in self.connections:
                connection.cut()


class Landing:
    """Where the bytes of a piece go, and where they are verified, part by part."""

    def __init__(self, fetcher: Fetcher, load: Load, numbers: Sequence[int]) -> None:
        self._fetcher, self._load, self._numbers = fetcher, load, numbers
        self._spans = [load.order.spans[number] for number in numbers]
        self._parts = [0] * len(numbers)  # verified

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        at = self._spans[number].at + start
        return self._fetcher.memory[at : at + num_bytes]

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        span, load = self._spans[number], self._load
        with load.lock:
            load.fetched_bytes += num_bytes
        found = self._parts[number]
        while found < len(span.parts) and span.parts[found][0] <= start + num_bytes:
            if not self._is_right(span, found):
                self._spans[number] = span._replace(parts=())  # the engine sees that it is missing
                return
            found += 1
        if found > self._parts[number]:
            self._parts[number] = found
            with load.lock:
                load.verified[self._numbers[number]] = found
            self._fetcher.has_news.set()

    def _is_right(self, span: Span, part: int) -> bool:
        start = span.parts[part - 1][0] if part else span.first
        end, digest = span.parts[part]
        data = self._fetcher.memory[span.at + start : span.at + end]
        return level_digest(data).hex() == digest

    def gone(self, number: int) -> None:
        pass


class Fetcher:
    def __init__(self, control: socket.socket, arena: int) -> None:
        self.has_news = threading.Event()
        self._has_ended = threading.Event()
        self._control, self._lines = control, control.makefile("rb")
        hello = parse_order(self._lines.readline())
        assert isinstance(hello, Hello)
        self.memory = memoryview(map_arena(arena, hello.arena_bytes))
        self._tls = client_tls(hello.tls_ca)
        self._headers = {"Accept-Encoding": "identity"}
        if hello.token:
            self._headers["Authorization"] = f"Bearer {hello.token}"
        if hello.client:
            self._headers["Kdn-Client"] = hello.client
        self._connections = hello.connections
        self._loads: dict[int, Load] = {}
        self._lock = threading.Lock()  # guards _loads and _free
        self._free: dict[NodeAt, list[Connection]] = {}
        self._work: queue.SimpleQueue[tuple[Load, NodeAt, list[int]]] = queue.SimpleQueue()

    def run(self) -> None:
        """Until the engine has gone."""
        every = [self._read] * self._connections + [self._tell, self._watch]
        for work in every:
            threading.Thread(target=_or_die, args=(work,), daemon=True).start()
        self._control.sendall(pack(News(0, 0)))  # it is ready
        for line in self._lines:
            message = parse_order(line)
            if isinstance(message, Order):
                self._begin(message)
            elif isinstance(message, Stop) and (load := self._loads.get(message.number)):
                load.stop()

    def _begin(self, order: Order) -> None:
        sizes = [span.end - span.start for span in order.spans]
        most = max(PIECE_BYTES, -(-sum(sizes) // (PIECES * self._connections)))
        pieces = [(node, piece) for node, own in order.shares for piece in _cut(own, sizes, most)]
        load = Load(order, len(pieces))
        with self._lock:
            self._loads[order.number] = load
        for node, piece in pieces:
            self._work.put((load, node, piece))
        self.has_news.set()

    # in threads

    def _read(self) -> None:
        while True:
            load, node, numbers = self._work.get()
            trouble = ""
            try:
                if not load.is_stopped:
                    self._fetch(load, node, numbers)
            except (KdnError, OSError) as error:
                trouble = f"{type(error).__name__}: {error}"
            with load.lock:
                load.pieces -= 1
                load.trouble = load.trouble or trouble
                if not load.pieces:
                    self._has_ended.set()
            self.has_news.set()

    def _fetch(self, load: Load, node: NodeAt, numbers: Sequence[int]) -> None:
        spans = [load.order.spans[number] for number in numbers]
        asked = [
            {"key": span.key, "start": span.start, "end": span.end, "etag": span.etag}
            for span in spans
        ]
        question = json.dumps({"collection": "chunks", "spans": asked}).encode()
        asks = [
            Ask(bytes.fromhex(span.key), span.start, span.end, bytes.fromhex(span.etag))
            for span in spans
        ]
        while True:
            connection, is_kept = self._connection(node, load.order.until_s)
            try:
                with load.lock:
                    load.connections.add(connection)
                if load.is_stopped:
                    return
                reader = FrameReader(asks, Landing(self, load, numbers))
                until_s = load.order.until_s
                connection.ask("/v1/read", self._headers, question, reader, until_s)
                return
            except CutError:
                if not is_kept:  # a node may close one that nobody used at any time
                    raise
            finally:
                with load.lock:
                    load.connections.discard(connection)
                self._settle(node, connection)

    def _connection(self, node: NodeAt, until_s: float) -> tuple[Connection, bool]:
        with self._lock:
            free = self._free.setdefault(node, [])
            if free:
                return free.pop(), True
        return Connection(node, self._tls, until_s), False

    def _settle(self, node: NodeAt, connection: Connection) -> None:
        if not connection.is_idle:
            connection.close()
            return
        with self._lock:
            self._free[node].append(connection)

    def _tell(self) -> None:
        while True:
            self.has_news.wait()
            self.has_news.clear()
            with self._lock:
                loads = list(self._loads.values())
            for load in loads:
                news = load.news()
                if news.verified or news.ended:
                    self._control.sendall(pack(news))
                if news.ended:
                    with self._lock:
                        del self._loads[news.number]
            # For the last streams of a load somebody waits.
            self._has_ended.wait(TELL_S)
            self._has_ended.clear()

    def _watch(self) -> None:
        engine = os.getppid()
        while os.getppid() == engine:
            time.sleep(LOOK_S)


def _cut(numbers: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Spans that follow one another, in pieces of about so many bytes."""
    pieces: list[list[int]] = [[]]
    size = 0
    for number in numbers:
        if pieces[-1] and size + sizes[number] / 2 > most:
            pieces.append([])
            size = 0
        pieces[-1].append(number)
        size += sizes[number]
    return [piece for piece in pieces if piece]


def _or_die(work: object) -> None:
    """A thread that ends leaves the engine waiting: then better none is here."""
    assert callable(work)
    with suppress(BrokenPipeError, ConnectionError):
        work()
    os._exit(1)


def main() -> None:
    control, arena = (int(one) for one in sys.argv[1:])
    fetcher = Fetcher(socket.socket(fileno=control), arena)
    gc.freeze()
    with suppress(ConnectionError):
        fetcher.run()
    os._exit(0)  # threads wait in the kernel


if __name__ == "__main__":
    main()
