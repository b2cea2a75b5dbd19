"""What a node counts, and what each count means. `/metrics` shows it to Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kdn.background import faults
from kdn.store.base import Stats
from kdn.store.costs import Costs

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
QUEUE_BUCKETS_S = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
REQUEST_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class NodeStats:
    """Counters of one node since it started, in a registry of its own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.hits = Counter(
            "kdn_hits", "Objects or spans asked for that were here.", registry=registry
        )
        self.misses = Counter(
            "kdn_misses", "Objects or spans asked for that were not here.", registry=registry
        )
        self.refused_puts = Counter(
            "kdn_refused_puts", "Bodies that failed verification.", registry=registry
        )
        self.cut_readers = Counter(
            "kdn_cut_readers", "Readers cut because they did not drain.", registry=registry
        )
        self.connections = Gauge("kdn_connections", "Open connections.", registry=registry)
        self.requests_s = Histogram(
            "kdn_request_seconds", "From the head of a request to the end of its answer.",
            ["method", "route", "status"], buckets=REQUEST_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.received_bytes = Counter(
            "kdn_received_bytes", "Bytes of request bodies.", ["tenant"], registry=registry
        )
        self._sent_bytes = Counter(
            "kdn_sent_bytes", "Bytes of response bodies.", ["tenant"], registry=registry
        )
        self._queue_s = Histogram(
            "kdn_queue_seconds", "A frame's wait for its turn to be sent.",
            ["tenant"], buckets=QUEUE_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._store = StoreCollector()
        registry.register(self._store)
        registry.register(FaultCollector())
        self._flows: dict[str, tuple[Counter, Histogram]] = {}
        self._answered: dict[tuple[str, str, int], Histogram] = {}

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

    def expose(self, store: Stats, more: Sequence[tuple[str, str, float]] = ()) -> bytes:
        """Everything, as Prometheus reads it. `more`: names, meanings and values."""
        self._store.stats, self._store.more = store, more
        return generate_latest(self._registry)


def value_of(metric: Counter | Gauge) -> int:
    """Of a metric without labels."""
    [family] = metric.collect()
    return int(family.samples[0].value)


def _by_tenant(counter: Counter) -> dict[str, int]:
    [family] = counter.collect()
    return {
        sample.labels["tenant"]: int(sample.value)
        for sample in family.samples
        if sample.name.endswith("_total")
    }


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


class FaultCollector(Collector):
    """Of this process: work in the background that failed, and went on."""

    def collect(self) -> Iterable[Metric]:
        counts = CounterMetricFamily(
            "kdn_faults", "Failures nobody expected, which the log shows.", labels=["work"]
        )
        for work, number in faults.items():
            counts.add_metric([work], number)
        yield counts


class StoreCollector(Collector):
    """The store counts for itself; this hands its counts on."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.more: Sequence[tuple[str, str, float]] = ()

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        for name, help_, value in self.more:
            yield GaugeMetricFamily(name, help_, value)
        for name, help_, value in (
            ("objects", "Objects held now.", stats.objects),
            ("size_bytes", "Bytes held now.", stats.size_bytes),
            ("capacity_bytes", "Bytes it may hold.", stats.capacity_bytes),
        ):
            yield GaugeMetricFamily(f"kdn_store_{name}", help_, value)
        for name, help_, value in (
            ("hits", "Reads that found their object.", stats.hits),
            ("misses", "Reads that did not.", stats.misses),
            ("puts", "Objects written.", stats.puts),
            ("evictions", "Objects dropped to make room.", stats.evictions),
            ("cuts", "Times that an object lost levels to make room.", stats.cuts),
            ("corruptions", "Objects found damaged, never served.", stats.corruptions),
        ):
            yield CounterMetricFamily(f"kdn_store_{name}", help_, value)
        yield from _costs(stats.costs)


def _costs(costs: Costs) -> Iterable[Metric]:
    """What a bill is made of, where the store is a bucket."""
    requests = CounterMetricFamily(
        "kdn_store_requests", "Requests to a store elsewhere, by kind.", labels=["kind"]
    )
    for kind, number in sorted(costs.requests.items()):
        requests.add_metric([kind], number)
    yield requests
    for name, help_, value in (
        ("sent_bytes", "Bytes of objects sent to a store elsewhere.", costs.sent_bytes),
        ("received_bytes", "Bytes of objects received from it.", costs.received_bytes),
    ):
        yield CounterMetricFamily(f"kdn_store_{name}", help_, value)
