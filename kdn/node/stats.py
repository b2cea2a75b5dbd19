"""What a node counts, as `/metrics` shows it to Prometheus. `kdn/metrics.py` says what it means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kdn.background import faults
from kdn.metrics import NODE, STORE
from kdn.node.tallies import Count, Counts, Spread, Spreads
from kdn.store.base import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class NodeStats(Collector):
    """Counters of one node since it started. They belong to its event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.hits, self.misses, self.refused_puts = Count(), Count(), Count()
        self.cut_readers, self.connections = Count(), Count()
        self.requests_s = Spreads(NODE["kdn_request_seconds"])
        self.received_bytes = Counts(NODE["kdn_received_bytes_total"])
        self._sent_bytes = Counts(NODE["kdn_sent_bytes_total"])
        self._queue_s = Spreads(NODE["kdn_queue_seconds"])
        self._flows: dict[str, tuple[Count, Spread]] = {}
        self._answered: dict[tuple[str, str, int], Spread] = {}
        self._store, self._more = Stats(), list[Metric]()

    def answered(self, labels: tuple[str, str, int], seconds: float) -> None:
        """A request ended. `labels`: method, route, status."""
        seen = self._answered.get(labels)
        if seen is None:
            seen = self._answered[labels] = self.requests_s.labels(*labels)
        seen.observe(seconds)

    def sent(self, tenant: str, num_bytes: int, waited_s: float) -> None:
        """A frame went out."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = (self._sent_bytes.labels(tenant), self._queue_s.labels(tenant))
            self._flows[tenant] = flow
        flow[0].inc(num_bytes)
        flow[1].observe(waited_s)

    def bytes_by_tenant(self) -> tuple[dict[str, int], dict[str, int]]:
        """Sent, and received."""
        return _by_tenant(self._sent_bytes), _by_tenant(self.received_bytes)

    def expose(self, store: Stats, more: Iterable[Metric] = ()) -> bytes:
        """Everything, as Prometheus reads it. `more`: what the node knows beside it."""
        self._store, self._more = store, list(more)
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        for name, one in {
            "hits_total": self.hits,
            "misses_total": self.misses,
            "refused_puts_total": self.refused_puts,
            "cut_readers_total": self.cut_readers,
            "connections": self.connections,
        }.items():
            yield NODE[f"kdn_{name}"].shown(one.value)
        for family in (self.requests_s, self.received_bytes, self._sent_bytes, self._queue_s):
            yield from family.collect()
        yield NODE["kdn_faults_total"].shown({(work,): n for work, n in list(faults.items())})
        yield from self._more
        yield from of_store(self._store)


def _by_tenant(counts: Counts) -> dict[str, int]:
    return {tenant: int(value) for (tenant,), value in counts.values().items()}


def summed(shown: Sequence[bytes]) -> bytes:
    """What several processes of one node expose, as one."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for one in shown:
        for family in text_string_to_metric_families(one.decode()):
            families.setdefault(family.name, family)
            sums = values.setdefault(family.name, {})
            for sample in family.samples:
                at = (sample.name, tuple(sample.labels.items()))
                if sample.name.endswith("_created"):
                    sums[at] = min(sums.get(at, sample.value), sample.value)
                else:
                    sums[at] = sums.get(at, 0.0) + sample.value
    registry = CollectorRegistry()
    registry.register(_Sums(families, values))
    return generate_latest(registry)


class _Sums(Collector):
    def __init__(self, families: dict[str, Metric], values: dict[str, Any]):
        self._families, self._values = families, values

    def collect(self) -> Iterable[Metric]:
        for name, family in self._families.items():
            family.samples = []
            for (sample, labels), value in self._values[name].items():
                family.add_sample(sample, dict(labels), value)
            yield family


def of_store(stats: Stats) -> Iterable[Metric]:
    """The store counts for itself; this hands its counts on."""
    costs = stats.costs
    told: dict[str, float | dict[tuple[str, ...], float]] = {
        "objects": stats.objects,
        "size_bytes": stats.size_bytes,
        "capacity_bytes": stats.capacity_bytes,
        "hits_total": stats.hits,
        "misses_total": stats.misses,
        "tier_hits_total": {(tier,): n for tier, n in stats.tiers.items()},
        "puts_total": stats.puts,
        "evictions_total": stats.evictions,
        "cuts_total": stats.cuts,
        "corruptions_total": stats.corruptions,
        # What a bill is made of, where the store is a bucket.
        "requests_total": {(kind,): n for kind, n in sorted(costs.requests.items())},
        "sent_bytes_total": costs.sent_bytes,
        "received_bytes_total": costs.received_bytes,
    }
    for name, value in told.items():
        yield STORE[f"kdn_store_{name}"].shown(value)


def about_node(data: Path) -> list[Metric]:
    """Which kdn this is, and how full the disk below its data is."""
    told = [NODE["kdn_build_info"].shown({(_version(),): 1})]
    with suppress(OSError):
        disk = os.statvfs(data)
        told += [
            NODE["kdn_disk_size_bytes"].shown(disk.f_blocks * disk.f_frsize),
            NODE["kdn_disk_free_bytes"].shown(disk.f_bavail * disk.f_frsize),
        ]
    return told


@cache
def _version() -> str:
    try:
        return version("kdn")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
