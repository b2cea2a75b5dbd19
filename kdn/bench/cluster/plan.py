"""How much of everything. `--quick` is a look at whether all works, the whole is for figures."""

from __future__ import annotations

from dataclasses import dataclass

from kdn.bench.cluster.items import LARGE_BYTES, SMALL_BYTES

PARTS = ("a", "b", "c")


@dataclass(frozen=True)
class Plan:
    # a: speed
    sizes_bytes: tuple[int, ...] = (SMALL_BYTES, LARGE_BYTES)
    set_bytes: int = 96 << 20
    """Of all objects of a size: more than any node's share of RAM is not needed, but more than one
    prompt of each client is."""
    shards: tuple[int, ...] = (1, 2, 3)
    nodes: tuple[int, ...] = (1, 2, 3)
    clients: int = 50
    window_s: float = 4.0
    rounds: int = 9
    """In which kdn and the servers' own protocols take turns."""
    round_s: float = 0.6
    # b: faults
    master_kills: int = 20
    node_kills: int = 20
    s3_kills: int = 3
    cuts: int = 3
    away_s: float = 2.0
    """How long what was killed or cut stays away, if nothing takes its place."""
    calm_s: float = 1.0
    """Of load before and after each."""
    writers: int = 4
    readers: int = 8
    reshard_slots: int = 4096
    # c: regions
    regions: int = 2
    link_bits_per_s: float = 200e6
    link_delay_s: float = 0.02
    document_chunks: int = 32
    stale_s: float = 10.0
    """How long names are written and read for the histogram."""
    name_operations: int = 10_000
    name_clients: int = 8
    name_faults: int = 40


QUICK = Plan(
    set_bytes=24 << 20,
    shards=(1, 2),
    nodes=(1, 2),
    clients=20,
    window_s=1.0,
    rounds=5,
    round_s=0.3,
    master_kills=2,
    node_kills=2,
    s3_kills=1,
    cuts=1,
    away_s=1.0,
    calm_s=0.5,
    stale_s=2.0,
    name_operations=1000,
    name_faults=6,
)
