"""Redis of any number of shards: one server, or a Cluster, which `redis-cli` makes from three on
only. These have no replicas: they are for speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kdn.bench.servers import START_S, RedisServer, free_port, redis_server, until

SLOTS = 16384


@dataclass
class Shards:
    url: str
    servers: Sequence[RedisServer]

    def server_of(self, key: bytes) -> RedisServer:
        """Which has a key, as Clusters divide them."""
        from redis.crc import key_slot

        return self.servers[key_slot(key) * len(self.servers) // SLOTS]


@contextmanager
def start_shards(folder: Path, number: int) -> Iterator[Shards]:
    with ExitStack() as stack:
        if number == 1:
            server = stack.enter_context(redis_server(folder / "0"))
            yield Shards(server.url, [server])
            return
        servers = [stack.enter_context(_member(folder / str(at))) for at in range(number)]
        _join(servers)
        addresses = ",".join(server.address for server in servers)
        yield Shards(f"redis+cluster://{addresses}", servers)


@contextmanager
def _member(folder: Path) -> Iterator[RedisServer]:
    options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
    with redis_server(folder, *options) as server:
        yield server


def _join(servers: Sequence[RedisServer]) -> None:
    """Slots in equal parts, in order."""
    starts = [-(-SLOTS * at // len(servers)) for at in range(len(servers) + 1)]
    for at, server in enumerate(servers):
        server.ask("CLUSTER", "ADDSLOTSRANGE", starts[at], starts[at + 1] - 1)
        server.ask("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
    for other in servers[1:]:
        port = other.ask("CONFIG", "GET", "cluster-port")
        told = port.get("cluster-port") or port.get(b"cluster-port")
        servers[0].ask("CLUSTER", "MEET", "127.0.0.1", other.port, int(told))
    until(lambda: all(map(_is_whole, servers)), START_S, lambda: "the shards do not meet")


def _is_whole(server: RedisServer) -> bool:
    told = server.ask("CLUSTER", "INFO")
    text = told.decode() if isinstance(told, bytes) else str(told)
    return "cluster_state:ok" in text and "cluster_slots_ok:16384" in text
