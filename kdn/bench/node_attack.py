"""What a tenant notices of another that attacks the node (`node_attacker.py`).

The neighbour reads contexts of several chunks, mostly ones that it has read before, and publishes
what it misses. All that comes back fits into its share of the node's memory. Told are the seconds
that its reads take and how many chunks hit, alone and under attack, and the node's memory.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

from kdn.bench.node_attacker import Attack, attacking
from kdn.bench.node_fairness import quantile
from kdn.bench.node_servers import Server, make_chunk
from kdn.bench.node_wire import DEADLINE_S, Kdn, WireError, ask
from kdn.protocol import frames

TENANTS = ("neighbour", "attacker")
SETTLE_S = 1.0
MIB = 1 << 20


@dataclass(frozen=True)
class Neighbourhood:
    """A node that two tenants share, and what the one does that does no harm."""

    memory_bytes: int = 128 * MIB
    disk_bytes: int = 512 * MIB
    contexts: int = 32
    """That are read again and again."""
    chunks: int = 8
    chunk_bytes: int = 64 << 10
    new_part: float = 0.2
    """Of all reads: of contexts that nobody has read before."""
    samples: int = 900
    rounds: int = 3
    seconds: float = 45.0
    pause_s: float = 0.01
    attack: Attack = field(default_factory=Attack)
    ratio_bar: float = 2.0
    hits_bar: float = 0.05
    rss_bar_bytes: int = 1024 * MIB

    @property
    def settings(self) -> dict[str, object]:
        """Of the node."""
        return {"memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes}


@dataclass(frozen=True)
class Attacked:
    """Alone and under attack."""

    alone_p50_s: float
    alone_p99_s: float
    attacked_p50_s: float
    attacked_p99_s: float
    alone_put_p99_s: float
    attacked_put_p99_s: float
    alone_hits: float
    attacked_hits: float
    samples: int
    failures: int
    """Requests of the neighbour that were refused or failed under attack."""
    rss_before_bytes: int
    rss_peak_bytes: int
    attack: dict[str, int]
    """What the attacker did, counted."""

    @property
    def ratio(self) -> float:
        return self.attacked_p99_s / self.alone_p99_s


def measure_attack(server: Server, plan: Neighbourhood, seed: int) -> Attacked:
    """`server`: with TENANTS. Alone and attacked take turns, so that a disturbance of the machine
    does not hit only one of them."""
    mine = replace(server, dialect=Kdn(TENANTS[0]))
    neighbour = Neighbour(mine, plan, Random(seed))
    alone, attacked, done = Reads(), Reads(), Counter[str]()
    samples, seconds = -(-plan.samples // plan.rounds), plan.seconds / plan.rounds
    neighbour.read_all()
    before = server.rss_bytes()
    for _ in range(plan.rounds):
        neighbour.work(samples, seconds, alone)
        with attacking(server.address, TENANTS[1], plan.attack) as counts:
            time.sleep(SETTLE_S)
            neighbour.work(samples, seconds, attacked)
        done.update(counts)
    return Attacked(
        alone_p50_s=quantile(alone.latencies_s, 0.5),
        alone_p99_s=quantile(alone.latencies_s, 0.99),
        attacked_p50_s=quantile(attacked.latencies_s, 0.5),
        attacked_p99_s=quantile(attacked.latencies_s, 0.99),
        alone_put_p99_s=quantile(alone.puts_s, 0.99),
        attacked_put_p99_s=quantile(attacked.puts_s, 0.99),
        alone_hits=alone.hits / alone.asked,
        attacked_hits=attacked.hits / attacked.asked,
        samples=len(attacked.latencies_s),
        failures=attacked.failures,
        rss_before_bytes=before,
        rss_peak_bytes=server.peak_rss_bytes(),
        attack=dict(done),
    )


@dataclass
class Reads:
    """What was seen of a number of reads."""

    latencies_s: list[float] = field(default_factory=list)
    puts_s: list[float] = field(default_factory=list)
    asked: int = 0
    hits: int = 0
    failures: int = 0


class Neighbour:
    """One client of a tenant, on one connection."""

    def __init__(self, server: Server, plan: Neighbourhood, rng: Random) -> None:
        assert isinstance(server.dialect, Kdn)
        self._server, self._dialect = server, server.dialect
        self._plan, self._rng = plan, rng
        self._data = rng.randbytes(plan.chunk_bytes)
        self._known = [self._new_context() for _ in range(plan.contexts)]
        self._connection: socket.socket | None = None

    def _new_context(self) -> list[bytes]:
        return [self._rng.randbytes(16) for _ in range(self._plan.chunks)]

    def read_all(self) -> None:
        """Everything that comes back, twice: now it is there."""
        for _ in range(2):
            for context in self._known:
                self._read(context, Reads())

    def work(self, samples: int, seconds: float, seen: Reads) -> None:
        """Until there are so many reads or the time is over. Pauses are random."""
        give_up_s, before = time.perf_counter() + seconds, len(seen.latencies_s)
        while (
            len(seen.latencies_s) - before < samples and time.perf_counter() < give_up_s
        ) or not seen.puts_s:
            time.sleep(self._rng.expovariate(1 / self._plan.pause_s))
            new = self._rng.random() < self._plan.new_part
            self._read(self._new_context() if new else self._rng.choice(self._known), seen)

    def _read(self, context: list[bytes], seen: Reads) -> None:
        """Read a context, then publish what was missing. What fails is counted, and counts as a
        miss that took as long as it did."""
        keys = [key.hex() for key in context]
        request, _ = self._dialect.ask(keys, "neighbour")
        began_s = time.perf_counter()
        body = self._ask(request, (200,), seen)
        seen.latencies_s.append(time.perf_counter() - began_s)
        here = {frame.key for frame, _ in frames.split(body or b"") if frame.status == frames.OK}
        seen.asked += len(context)
        seen.hits += len(here)
        self._publish((key for key in context if key not in here), seen)

    def _publish(self, keys: Iterable[bytes], seen: Reads) -> None:
        for key in keys:
            request = self._dialect.put(
                key.hex(), make_chunk(key, self._data), "Kdn-Saved-Seconds: 0.1"
            )
            began_s = time.perf_counter()
            self._ask(request, (200, 201), seen)
            seen.puts_s.append(time.perf_counter() - began_s)

    def _ask(self, request: bytes, expected: tuple[int, ...], seen: Reads) -> bytes | None:
        try:
            if self._connection is None:
                self._connection = socket.create_connection(self._server.address, DEADLINE_S)
            status, body = ask(self._connection, request)
        except (OSError, WireError):
            self.close()
            status, body = 0, b""
        if status in expected:
            return body
        seen.failures += 1
        return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
