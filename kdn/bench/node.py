"""`kdn bench node`: a node's batch read beside nginx and Redis, its bounds, fairness and defences.

The same plain-socket client reads the same random bytes from all three over loopback; the servers
take turns, repeat after repeat, and the median counts. A second part holds a node to an egress
limit and sets its fair scheduler beside first-in-first-out and a random choice by queue length. In
a third, one tenant attacks a node and another tells what it notices.

Not measured: TLS, disks (everything is in memory after the first read), a real network.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

from rich.console import Console

from kdn.bench import options
from kdn.bench.node_attack import TENANTS, Attacked, Neighbourhood, measure_attack
from kdn.bench.node_fairness import Fairness, FairnessLoad, measure_fairness
from kdn.bench.node_load import (
    Crowd,
    SlowReaders,
    Speed,
    check_all,
    crowd,
    full_speed,
    slow_readers,
)
from kdn.bench.node_orders import ORDERS, RIVALS
from kdn.bench.node_report import plot, print_report
from kdn.bench.node_servers import (
    KDN_NODE,
    Server,
    absent,
    make_objects,
    start_kdn,
    start_nginx,
    start_redis,
)
from kdn.bench.options import JsonFile, PlotFile
from kdn.bench.report import hardware, report_console, write_json

KIB = 1024
SPEED_BAR = 0.7
SPREAD_BAR = 0.1


@dataclass(frozen=True)
class NodeWorkload:
    """How much of everything; a test runs less of it."""

    sizes_bytes: tuple[int, ...] = (64 * KIB, 256 * KIB, 1024 * KIB)
    set_bytes: int = 32 * KIB * KIB
    """Objects of each size, all together."""
    repeats: int = 7
    window_s: float = 0.5
    clients: int = 200
    slow_bytes: int = 64 * KIB * KIB
    """Asked for by each slow reader."""
    slow_s: float = 2.0
    load: FairnessLoad = field(default_factory=FairnessLoad)
    orders: tuple[str, ...] = ORDERS
    neighbourhood: Neighbourhood = field(default_factory=Neighbourhood)


def run(
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    repeats: Annotated[int, options.count(1, "Turns of every server.")] = NodeWorkload.repeats,
    seed: Annotated[int, options.seed("Of the bytes stored and the light client.")] = 0,
) -> None:
    """A node beside nginx and Redis over loopback, and how fairly it sends."""
    results = bench(NodeWorkload(repeats=repeats), seed, Console(stderr=True))
    if json_file:
        write_json(json_file, results)
    if plot_file:
        plot(plot_file, results)
    print_report(report_console(), results)


def bench(workload: NodeWorkload, seed: int, console: Console) -> dict[str, Any]:
    """Everything, as it goes to JSON."""
    facts = {name: fact for name, fact in hardware("cpu").items() if name != "torch"}
    notes = list(absent().values())
    for note in notes:
        console.print(note, style="yellow")
    sets = {
        size: make_objects(size, max(workload.set_bytes // size, 1), seed)
        for size in workload.sizes_bytes
    }
    with tempfile.TemporaryDirectory(prefix="kdn-bench-") as folder:
        with servers(Path(folder), sets) as running:
            speeds = measure_speed(running, sets, workload, console)
            console.print(f"{workload.clients} clients at once, then as many that stop reading")
            middle = sets[sorted(sets)[len(sets) // 2]]
            many = crowd(running[0], middle, workload.clients, batches=2, batch=4)
            slow = slow_readers(
                running[0], middle, workload.clients, workload.slow_bytes, workload.slow_s
            )
        fairness = {}
        for order in workload.orders:
            console.print(f"one light client beside {workload.load.heavy} heavy ones: {order}")
            fairness[order] = fairness_of(order, Path(folder), sets, workload.load, seed)
        console.print("one tenant beside another that attacks the node")
        attacked = attack_of(Path(folder), workload.neighbourhood, seed)
    return document(speeds, many, slow, fairness, attacked, workload) | {
        "notes": notes, "hardware": facts, "commit": facts["commit"], "seed": seed,
    }  # fmt: skip


@contextmanager
def servers(folder: Path, sets: Mapping[int, Mapping[str, bytes]]) -> Iterator[list[Server]]:
    """All that are installed, the node first, each with all objects, every byte checked once."""
    objects = {key: data for group in sets.values() for key, data in group.items()}
    missing = absent()
    with ExitStack() as stack:
        running = [stack.enter_context(start_kdn(folder / "kdn"))]
        if "redis" not in missing:
            running.append(stack.enter_context(start_redis(folder / "redis")))
        if "nginx" not in missing:
            running.append(stack.enter_context(start_nginx(folder / "nginx", objects)))
        for server in running:
            server.put(objects)
            for group in sets.values():
                check_all(server, group)
        yield running


SpeedsBySize = dict[str, dict[int, list[Speed]]]
"""Server to size to repeats."""


def measure_speed(
    running: Sequence[Server],
    sets: Mapping[int, Mapping[str, bytes]],
    workload: NodeWorkload,
    console: Console,
) -> SpeedsBySize:
    speeds: SpeedsBySize = {server.name: {size: [] for size in sets} for server in running}
    for repeat in range(workload.repeats):
        console.print(f"reading at full speed, {repeat + 1} of {workload.repeats}")
        for size, objects in sets.items():
            for server in running:
                speeds[server.name][size].append(full_speed(server, objects, workload.window_s))
    return speeds


def fairness_of(
    order: str, folder: Path, sets: Mapping[int, Mapping[str, bytes]], load: FairnessLoad, seed: int
) -> Fairness:
    settings = {"egress_bits_per_s": load.bits_per_s, "frame_bytes": load.frame_bytes}
    program = ("kdn.bench.node_orders", order) if order in RIVALS else KDN_NODE
    small, large = sets[min(sets)], sets[max(sets)]
    with start_kdn(folder / order, settings, program=program) as server:
        for objects in (small, large):
            server.put(objects)
        return measure_fairness(server, small, large, load, seed)


def attack_of(folder: Path, neighbourhood: Neighbourhood, seed: int) -> Attacked:
    with start_kdn(folder / "attack", neighbourhood.settings, TENANTS) as server:
        return measure_attack(server, neighbourhood, seed)


def document(
    speeds: SpeedsBySize,
    many: Crowd,
    slow: SlowReaders,
    fairness: Mapping[str, Fairness],
    attacked: Attacked,
    workload: NodeWorkload,
) -> dict[str, Any]:
    """The figures, and whether they pass."""
    by_size = {
        name: {size: _spread(repeats) for size, repeats in sizes.items()}
        for name, sizes in speeds.items()
    }
    medians = {
        name: {size: figures["median"] for size, figures in sizes.items()}
        for name, sizes in by_size.items()
    }
    told: dict[str, Any] = {
        "bytes_per_s": {name: geometric_mean(sizes.values()) for name, sizes in medians.items()},
        "bytes_per_s_by_size": by_size,
        "clients": asdict(many),
        "slow_readers": asdict(slow) | {"growth_bytes_per_reader": slow.growth_bytes_per_reader},
        "fairness": {
            "load": asdict(workload.load) | {"frame_s": workload.load.frame_s},
            **{order: asdict(one) | {"spread": one.spread} for order, one in fairness.items()},
        },
        "attack": {
            "load": asdict(workload.neighbourhood)
            | {"rss_bar_bytes": workload.neighbourhood.rss_bar_bytes},
            **asdict(attacked),
            "ratio": attacked.ratio,
        },
    }
    passes = {"many clients": many.errors == 0, **attacked.passes(workload.neighbourhood)}
    if "redis" in medians:
        ratios = {size: medians["kdn"][size] / redis for size, redis in medians["redis"].items()}
        told["of_redis"] = {"all": told["bytes_per_s"]["kdn"] / told["bytes_per_s"]["redis"]}
        told["of_redis"] |= ratios
        passes["speed"] = told["of_redis"]["all"] >= SPEED_BAR
    if "fair" in fairness:
        fair = fairness["fair"]
        passes["light client"] = fair.loaded_p99_s <= fair.limit_s
        passes["heavy clients"] = fair.spread <= SPREAD_BAR
    return told | {"passes": passes}


def _spread(repeats: Sequence[Speed]) -> dict[str, float]:
    values = [speed.bytes_per_s for speed in repeats]
    cpu = median(speed.cpu_s_per_gb for speed in repeats)
    return {
        "median": median(values), "min": min(values), "max": max(values), "cpu_s_per_gb": cpu,
    }  # fmt: skip
