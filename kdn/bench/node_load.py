"""Loads put on servers: full speed, many clients at once, and readers that stop reading."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle, islice

from kdn.bench.node_servers import Server
from kdn.bench.node_wire import DEADLINE_S, BatchConnection, Objects, WireError, drive

CONNECTIONS = 4
WINDOW = 2
WARM_UP_S = 0.1
SLOW_BUFFER_BYTES = 32 << 10


@dataclass(frozen=True)
class Speed:
    """What one server did in one window of time."""

    bytes_per_s: float
    cpu_s_per_gb: float
    """Processor seconds of the server per 10^9 bytes."""


def check_all(server: Server, objects: Objects) -> None:
    """Read every object once and compare every byte. Warms up, too."""
    batch = _batch(server, objects)
    batches = -(-len(objects) // batch)
    options = {"batch": batch, "batches": batches, "compare": batches * batch}
    with closing(server.connect(objects, **options)) as connection:
        drive([connection])


def full_speed(server: Server, objects: Objects, seconds: float) -> Speed:
    """A few connections, each with more than one batch asked for, as fast as it goes."""
    batch = _batch(server, objects)
    with ExitStack() as stack:
        connections = []
        for index in range(CONNECTIONS):
            first = index * len(objects) // CONNECTIONS
            connection = server.connect(objects, batch=batch, window=WINDOW, first=first)
            connections.append(stack.enter_context(closing(connection)))
        meter = _Meter(server, connections, seconds)
        drive(connections, meter.done)
    return meter.speed()


class _Meter:
    """Reads the counters when the warm-up ends and when the time is over."""

    def __init__(
        self, server: Server, connections: Sequence[BatchConnection], seconds: float
    ) -> None:
        self._server, self._connections, self._seconds = server, connections, seconds
        self._marks: list[tuple[float, int, float]] = []
        self._next_s = time.perf_counter() + WARM_UP_S

    def done(self) -> bool:
        if len(self._marks) < 2 and time.perf_counter() >= self._next_s:
            raw = sum(connection.raw_bytes for connection in self._connections)
            self._marks.append((time.perf_counter(), raw, self._server.cpu_s()))
            self._next_s = self._marks[0][0] + self._seconds
        return len(self._marks) == 2

    def speed(self) -> Speed:
        """Replies may be long beside the time, so all bytes are counted as they come; of these
        as much is objects as of all that came in the end."""
        (began_s, before, cpu_before_s), (ended_s, after, cpu_after_s) = self._marks
        whole = sum(connection.received_bytes for connection in self._connections)
        raw = sum(connection.raw_bytes for connection in self._connections)
        received = max((after - before) * whole / raw, 1)
        return Speed(received / (ended_s - began_s), (cpu_after_s - cpu_before_s) / received * 1e9)


@dataclass(frozen=True)
class Crowd:
    """Many clients at once, each reading some batches, every byte compared."""

    clients: int
    errors: int
    first_error: str
    bytes_per_s: float


def crowd(server: Server, objects: Objects, clients: int, batches: int, batch: int) -> Crowd:
    connections: list[BatchConnection] = []
    first_error = ""
    began_s = time.perf_counter()
    try:
        for index in range(clients):
            connection = server.connect(
                objects, batch=batch, batches=batches, client=f"crowd-{index}", first=index,
                compare=batches,
            )  # fmt: skip
            connections.append(connection)
        drive(connections)
    except (OSError, WireError) as error:
        first_error = str(error)
    finally:
        for connection in connections:
            connection.close()
    seconds = time.perf_counter() - began_s
    received = sum(connection.received_bytes for connection in connections)
    errors = sum(len(connection.latencies_s) < batches for connection in connections)
    errors += clients - len(connections)
    return Crowd(clients, errors, first_error, received / seconds)


@dataclass(frozen=True)
class SlowReaders:
    """Memory of a node while clients ask for much, take a little, and stop reading."""

    readers: int
    asked_bytes: int
    rss_before_bytes: int
    rss_peak_bytes: int
    beside: Speed
    """What another client still got meanwhile."""

    @property
    def growth_bytes_per_reader(self) -> float:
        return (self.rss_peak_bytes - self.rss_before_bytes) / self.readers


def slow_readers(
    server: Server, objects: Objects, readers: int, each_bytes: int, seconds: float
) -> SlowReaders:
    keys = list(islice(cycle(objects), each_bytes // len(next(iter(objects.values())))))
    request, _ = server.dialect.ask(keys, "slow")
    before = peak = server.rss_bytes()
    with ExitStack() as stack:
        for _ in range(readers):
            reader = stack.enter_context(closing(_small_socket()))
            reader.connect(server.address)
            reader.sendall(request)
            reader.recv(1)
        give_up_s = time.perf_counter() + seconds
        while time.perf_counter() < give_up_s:
            time.sleep(0.05)
            peak = max(peak, server.rss_bytes())
        beside = full_speed(server, objects, seconds)
        peak = max(peak, server.rss_bytes())
    return SlowReaders(readers, each_bytes * readers, before, peak, beside)


def _small_socket() -> socket.socket:
    """Takes little of what it does not read, so that the rest is the server's to keep."""
    reader = socket.socket()
    reader.settimeout(DEADLINE_S)
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
    return reader


def _batch(server: Server, objects: Objects) -> int:
    return max(1, server.dialect.batch_bytes // len(next(iter(objects.values()))))
