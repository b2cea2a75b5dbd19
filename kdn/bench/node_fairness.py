"""How fairly a node with an egress limit shares it: one light client beside heavy ones.

Heavy clients keep many requests waiting each; the light one asks for an object now and then. Told
are the light one's latency beside what it has alone, and what share each heavy one got, with equal
numbers of waiting requests and with unequal ones.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from threading import Event, Thread

from kdn.bench.node_servers import Server
from kdn.bench.node_wire import (
    BUFFER_BYTES,
    DEADLINE_S,
    BatchConnection,
    Objects,
    drive,
    read_batch,
)

SETTLE_S = 0.5
"""Until every heavy client's requests wait."""


@dataclass(frozen=True)
class FairnessLoad:
    """What is put on a node. A frame is what it sends in one turn."""

    bits_per_s: int = 400 * 10**6
    frame_bytes: int = 256 * 2**10
    depth: int = 64
    heavy: int = 4
    uneven_depths: tuple[int, ...] = (16, 32, 64, 128)
    samples: int = 300
    rounds: int = 3
    loaded_s: float = 15.0
    uneven_s: float = 3.0
    pause_s: float = 0.01

    @property
    def frame_s(self) -> float:
        return 8 * self.frame_bytes / self.bits_per_s


@dataclass(frozen=True)
class Fairness:
    """Of one order of service. Latencies are the light client's; shares the heavy ones'."""

    unloaded_p50_s: float
    unloaded_p99_s: float
    loaded_p50_s: float
    loaded_p99_s: float
    limit_s: float
    samples: int
    link_use: float
    """What part of the limit was really sent."""
    shares: list[float]
    uneven_shares: list[float]

    @property
    def spread(self) -> float:
        """How much more than the least the most favoured heavy client got."""
        return spread(self.shares)


def measure_fairness(
    server: Server, small: Objects, large: Objects, load: FairnessLoad, seed: int
) -> Fairness:
    """`small`: what the light client reads; `large`: what the heavy ones do. Alone and beside take
    turns, so that a disturbance of the machine does not hit only one of them."""
    light = Light(server, small, Random(seed), load.pause_s)
    samples, seconds = -(-load.samples // load.rounds), load.loaded_s / load.rounds
    alone_s: list[float] = []
    beside_s: list[float] = []
    sent = _Sent([0] * load.heavy)
    try:
        for _ in range(load.rounds):
            alone_s += light.ask(samples, seconds)
            with Heavy(server, large, [load.depth] * load.heavy) as heavy:
                time.sleep(SETTLE_S)
                with sent.count(heavy):
                    beside_s += light.ask(samples, seconds)
    finally:
        light.close()
    uneven = _Sent([0] * len(load.uneven_depths))
    with Heavy(server, large, load.uneven_depths) as heavy:
        time.sleep(SETTLE_S)
        with uneven.count(heavy):
            time.sleep(load.uneven_s)
    light_bytes = len(beside_s) * len(next(iter(small.values())))
    return Fairness(
        unloaded_p50_s=quantile(alone_s, 0.5),
        unloaded_p99_s=quantile(alone_s, 0.99),
        loaded_p50_s=quantile(beside_s, 0.5),
        loaded_p99_s=quantile(beside_s, 0.99),
        limit_s=2 * quantile(alone_s, 0.99) + load.heavy * load.frame_s,
        samples=len(beside_s),
        link_use=8 * (sum(sent.each_bytes) + light_bytes) / sent.seconds / load.bits_per_s,
        shares=shares_of(sent.each_bytes),
        uneven_shares=shares_of(uneven.each_bytes),
    )


@dataclass
class _Sent:
    """What heavy clients were sent while it was counted."""

    each_bytes: list[int]
    seconds: float = 0.0

    @contextmanager
    def count(self, heavy: Heavy) -> Iterator[None]:
        began_s, before = time.perf_counter(), heavy.received_bytes()
        yield
        after = heavy.received_bytes()
        self.seconds += time.perf_counter() - began_s
        for client, (start, end) in enumerate(zip(before, after, strict=True)):
            self.each_bytes[client] += end - start


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of them does not exceed."""
    return sorted(values)[max(math.ceil(part * len(values)) - 1, 0)]


def shares_of(each_bytes: Sequence[int]) -> list[float]:
    return [part / max(sum(each_bytes), 1) for part in each_bytes]


def spread(shares: Sequence[float]) -> float:
    return max(shares) / min(shares) - 1 if min(shares) > 0 else math.inf


class Light:
    """A client that asks for one object now and then."""

    def __init__(self, server: Server, objects: Objects, rng: Random, pause_s: float) -> None:
        self._rng, self._pause_s = rng, pause_s
        self._connection = server.connect(objects, client="light")
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def ask(self, samples: int, seconds: float) -> list[float]:
        """Seconds from asking to the last byte, until there are so many or the time is over.
        Pauses are random, so that asking does not fall into step with the link."""
        give_up_s = time.perf_counter() + seconds
        latencies_s: list[float] = []
        while not latencies_s or (len(latencies_s) < samples and time.perf_counter() < give_up_s):
            time.sleep(self._rng.expovariate(1 / self._pause_s))
            latencies_s.append(read_batch(self._connection, self._buffer))
        return latencies_s

    def close(self) -> None:
        self._connection.close()


class Heavy:
    """Client i keeps `depths[i]` requests waiting, each on a connection of its own; all of them in
    one thread."""

    def __init__(self, server: Server, objects: Objects, depths: Sequence[int]) -> None:
        self._stop = Event()
        self._error: BaseException | None = None
        self._groups = [
            [
                server.connect(objects, client=f"heavy-{index}", first=number)
                for number in range(depth)
            ]
            for index, depth in enumerate(depths)
        ]
        self._thread = Thread(target=self._run, daemon=True)

    @property
    def _everybody(self) -> list[BatchConnection]:
        return [connection for group in self._groups for connection in group]

    def _run(self) -> None:
        try:
            drive(self._everybody, self._stop.is_set)
        except Exception as error:
            if not self._stop.is_set():
                self._error = error

    def received_bytes(self) -> list[int]:
        """What each client was sent so far."""
        if self._error is not None:
            raise self._error
        return [sum(connection.raw_bytes for connection in group) for group in self._groups]

    def __enter__(self) -> Heavy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """What still waits is not waited for: it would take seconds, and nobody wants it."""
        self._stop.set()
        for connection in self._everybody:
            connection.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)
        for connection in self._everybody:
            connection.close()
