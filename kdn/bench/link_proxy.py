"""A TCP proxy that behaves like a link of one rate, for servers that cannot limit themselves.

What flows towards the reader is shaped, the way a node's egress limit does it: all connections
share one link, and a piece is passed on when its last byte would have arrived. The other direction
is only counted. Nothing is added to the latency of a single small message.

Threads, two per connection: at 1 Gbit/s they are busy for a small part of one core.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 1500, 64 * 1024
PIECE_S = 0.005
"""A piece takes no longer than this, within those bounds: a slow link has no bursts, either."""
_LATE_S = 0.01
"""A timer that fires late is made up for; a link that was idle is not."""
_CONNECT_S = 10.0

Address = tuple[str, int]


class LinkPace:
    """When bytes have passed a link that all connections share. `None` bits: at once."""

    def __init__(
        self, bits_per_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bits_per_s = bits_per_s
        self._clock = clock
        self._lock = Lock()  # guards _free_at_s: connections are pumped by threads of their own
        self._free_at_s = 0.0

    @property
    def piece_bytes(self) -> int:
        """To put on the link at once."""
        wanted = MAX_PIECE_BYTES if self.bits_per_s is None else self.bits_per_s / 8 * PIECE_S
        return int(min(max(wanted, MIN_PIECE_BYTES), MAX_PIECE_BYTES))

    def wait_s(self, num_bytes: int) -> float:
        """Put these bytes on the link; how long until the last of them is through."""
        if self.bits_per_s is None:
            return 0.0
        with self._lock:
            now_s = self._clock()
            start_s = max(self._free_at_s, now_s - _LATE_S)
            self._free_at_s = start_s + 8 * num_bytes / self.bits_per_s
            return max(0.0, self._free_at_s - now_s)


class Proxy:
    """Listens at `address` and passes on to a server."""

    def __init__(self, server: Address, pace: LinkPace) -> None:
        self._server = server
        self._pace = pace
        self._lock = Lock()  # guards the counts, the sockets and the threads
        self._counts = {"down": 0, "up": 0}
        self._sockets: list[socket.socket] = []
        self._threads: list[Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self._run(self._accept)

    @property
    def down_bytes(self) -> int:
        """Bytes that the server sent, as far as they were passed on."""
        return self._counts["down"]

    @property
    def up_bytes(self) -> int:
        return self._counts["up"]

    def close(self) -> None:
        """Cut all connections and wait for the threads."""
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in list(self._threads):
            thread.join(_CONNECT_S)

    def _run(self, target: Callable[..., None], *args: object) -> None:
        thread = Thread(target=target, args=args, daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                server = socket.create_connection(self._server, timeout=_CONNECT_S)
            except OSError:
                reader.close()
                continue
            server.settimeout(None)
            for one in (reader, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [reader, server]
            self._run(self._pump, server, reader, "down", self._pace)
            self._run(self._pump, reader, server, "up", LinkPace(None))

    def _pump(self, source: socket.socket, sink: socket.socket, way: str, pace: LinkPace) -> None:
        # Either end may leave at any time; then the other one is told, and that is all.
        with suppress(OSError):
            while piece := source.recv(pace.piece_bytes):
                if wait_s := pace.wait_s(len(piece)):
                    time.sleep(wait_s)
                sink.sendall(piece)
                with self._lock:
                    self._counts[way] += len(piece)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def shaped(server: Address, bits_per_s: float | None) -> Iterator[Proxy]:
    """A proxy in front of a server, closed at the end."""
    proxy = Proxy(server, LinkPace(bits_per_s))
    try:
        yield proxy
    finally:
        proxy.close()
