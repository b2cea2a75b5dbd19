"""Counters for vLLM's periodic log and its Prometheus metrics (`kdn/metrics.py` lists them)."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kdn.metrics import BY_COUNT, LABELS_OF_VLLM, MS, OF_VLLM

OF_EACH_RANK = ("fetched_bytes",)
"""Of several ranks, which load the same, the first tells all else."""


class KdnStats(KVConnectorStats):  # type: ignore[misc]
    """Sums since the last time they were taken."""

    def reset(self) -> None:
        self.data = dict[str, int]()

    def aggregate(self, other: KVConnectorStats) -> KdnStats:
        return KdnStats(data=dict(Tally(self.data) + Tally(other.data)))

    def reduce(self) -> dict[str, int | float]:
        every = sorted(self.data, key=lambda name: [*OF_VLLM].index(count_of(name)))
        return {name: self.data[name] for name in every if self.data[name]}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Taken:
    """The growth of counters since it was last taken."""

    def __init__(self, names: Iterable[str] = OF_VLLM) -> None:
        self._names = frozenset(names)
        self._before: Tally[str] = Tally()

    def take(self, counts: dict[str, int] | Tally[str]) -> KdnStats | None:
        # A copy, at once: the threads of loads count meanwhile.
        now = Tally({name: n for name, n in dict(counts).items() if count_of(name) in self._names})
        grown = now - self._before
        self._before = now
        return KdnStats(data=dict(grown)) if grown else None


def count_of(name: str) -> str:
    """`level_bytes` of `level_bytes:0`."""
    return name.partition(":")[0]


class KdnPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter for each of the above, by engine."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counters: dict[str, Any] = {
            name: self._counter_cls(
                name=family.name, documentation=f"kdn: {family.meaning}",
                labelnames=[*self._labelnames, *_own_labels(name)],
            )
            for name, family in BY_COUNT.items()
        }  # fmt: skip

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, grown in transfer_stats_data.items():
            count, _, label = name.partition(":")
            if count in self._counters:
                own = [label] if _own_labels(count) else []
                labels = [*self.per_engine_labelvalues[engine_idx], *own]
                counter: Counter = self._counters[count].labels(*labels)
                counter.inc(grown / 1000 if count.endswith(MS) else grown)


def _own_labels(count: str) -> list[str]:
    return [LABELS_OF_VLLM[count]] if count in LABELS_OF_VLLM else []
