"""What a tenant notices of another that attacks the node (`node_attacker.py`).

The neighbour reads contexts of several chunks, mostly ones that it has read before, and publishes
what it misses. All that comes back fits into its share of the node's memory. Told are the seconds
that its reads take and how many chunks hit, alone and under attack, and the node's memory.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

from kdn.bench.node_attacker import Attack, attacking
from kdn.bench.node_fairness import quantile
from kdn.bench.node_servers import Server, make_chunk
from kdn.bench.node_wire import DEADLINE_S, KdnDialect, WireError, ask
from kdn.config import NodeSettings
from kdn.node.server import FRAME_BYTES
from kdn.protocol import frames

TENANTS = ("neighbour", "attacker")
SETTLE_S = 1.0
MIB = 1 << 20
ITSELF_BYTES = 256 * MIB
"""Python and its libraries (90 MiB at start), indexes, objects on their way to the disk."""


@dataclass(frozen=True)
class Neighbourhood:
    """A node that two tenants share, and what the one does that does no harm."""

    memory_bytes: int = 128 * MIB
    disk_bytes: int = 512 * MIB
    clients: int = 4
    contexts: int = 16
    """That are read again and again: so few that of 10,000 reads none is late enough for one of
    them to have left the tenant's half of the memory."""
    chunks: int = 16
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

    @property
    def settings(self) -> dict[str, object]:
        """Of the node; all others are its defaults."""
        return {"memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes}

    @property
    def rss_bar_bytes(self) -> int:
        """What the node may hold by its settings, and some for itself. Bodies that are announced
        and not sent take nothing."""
        node = NodeSettings()
        sends_bytes = node.max_sends * FRAME_BYTES
        requests_bytes = node.max_questions_bytes + node.max_answers_bytes + sends_bytes
        return ITSELF_BYTES + self.memory_bytes + requests_bytes


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

    def passes(self, plan: Neighbourhood) -> dict[str, bool]:
        return {
            "latency under attack": self.ratio <= plan.ratio_bar and not self.failures,
            "hits under attack": self.attacked_hits >= self.alone_hits - plan.hits_bar,
            "memory under attack": self.rss_peak_bytes <= plan.rss_bar_bytes,
        }


def measure_attack(server: Server, plan: Neighbourhood, seed: int) -> Attacked:
    """`server`: with TENANTS. Alone and attacked take turns, so that a disturbance of the machine
    does not hit only one of them."""
    rng = Random(seed)
    known = [[rng.randbytes(16) for _ in range(plan.chunks)] for _ in range(plan.contexts)]
    clients = [
        NeighbourClient(server.address, plan, known, Random(rng.random()))
        for _ in range(plan.clients)
    ]
    alone, attacked, done = Reads(), Reads(), Counter[str]()
    for client in clients:
        client.read_all()
    before = server.rss_bytes()
    for _ in range(plan.rounds):
        alone.add(work_all(clients, plan))
        with attacking(server.address, TENANTS[1], plan.attack) as counts:
            time.sleep(SETTLE_S)
            attacked.add(work_all(clients, plan))
        done.update(counts)
    for client in clients:
        client.close()
    return Attacked(
        alone_p50_s=quantile(alone.latencies_s, 0.5),
        alone_p99_s=quantile(alone.latencies_s, 0.99),
        attacked_p50_s=quantile(attacked.latencies_s, 0.5),
        attacked_p99_s=quantile(attacked.latencies_s, 0.99),
        alone_put_p99_s=quantile(alone.puts_s or [0.0], 0.99),
        attacked_put_p99_s=quantile(attacked.puts_s or [0.0], 0.99),
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

    def add(self, other: Reads) -> None:
        for name in ("latencies_s", "puts_s", "asked", "hits", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def work_all(clients: Sequence[NeighbourClient], plan: Neighbourhood) -> Reads:
    """A round of all clients at once."""
    samples = -(-plan.samples // (plan.rounds * len(clients)))
    with ThreadPoolExecutor(len(clients)) as pool:
        parts = pool.map(lambda client: client.work(samples, plan.seconds / plan.rounds), clients)
        together = Reads()
        for part in parts:
            together.add(part)
    return together


class NeighbourClient:
    """One client of the neighbour, on one connection."""

    def __init__(
        self, address: tuple[str, int], plan: Neighbourhood, known: list[list[bytes]], rng: Random
    ) -> None:
        self._address, self._plan, self._known, self._rng = address, plan, known, rng
        self._dialect = KdnDialect(TENANTS[0])
        self._data = rng.randbytes(plan.chunk_bytes)
        self._connection: socket.socket | None = None

    def _new_context(self) -> list[bytes]:
        return [self._rng.randbytes(16) for _ in range(self._plan.chunks)]

    def read_all(self) -> None:
        """Everything that comes back, twice: now it is there."""
        for _ in range(2):
            for context in self._known:
                self._read(context, Reads())

    def work(self, samples: int, seconds: float) -> Reads:
        """Until there are so many reads or the time is over. Pauses are random."""
        give_up_s, seen = time.perf_counter() + seconds, Reads()
        while len(seen.latencies_s) < samples and time.perf_counter() < give_up_s:
            time.sleep(self._rng.expovariate(1 / self._plan.pause_s))
            new = self._rng.random() < self._plan.new_part
            self._read(self._new_context() if new else self._rng.choice(self._known), seen)
        return seen

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

    def _ask(self, request: bytes, expected: tuple[int, ...], seen: Reads) -> memoryview | None:
        try:
            if self._connection is None:
                self._connection = socket.create_connection(self._address, DEADLINE_S)
            status, body = ask(self._connection, request)
        except (OSError, WireError):
            self.close()
            status, body = 0, memoryview(b"")
        if status in expected:
            return body
        seen.failures += 1
        return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
