"""Counters for vLLM's periodic log and its Prometheus metrics."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

MEANINGS = {
    "asked": "prompts that were looked up",
    "hits": "requests of which something was known beyond vLLM's own cache",
    "hit_tokens": "tokens that were to be loaded for them",
    "late": "lookups without an answer in time",
    "refused": "requests with media, embeddings, settings or adapters that kdn has no name for",
    "lossy": "chunks not published, as they were computed on top of losses",
    "stopped": "ends of all loading and publishing, after a reset or as the weights were replaced",
    "joins": "requests whose pieces were to be joined",
    "refused_joins": "requests with pieces that could not be joined, and were served like others",
    "loads": "loads that have ended",
    "crowded": "loads that had not begun by their deadline, as others were under way",
    "loaded_tokens": "tokens that were loaded",
    "joined_tokens": "tokens of them that came from joined pieces",
    "host_tokens": "tokens that were found in the shared memory of the host",
    "failed_tokens": "tokens that were to be loaded and had to be computed",
    "load_ms": "milliseconds that loads took, added up",
    "fetched_bytes": "bytes that came from stores",
    "published_chunks": "chunks handed to the publisher",
    "unpublished_chunks": "chunks not published, as too much was waiting",
    "incomplete_chunks": "chunks not published, as the part of one of several ranks did not come",
    "faded_levels": "levels of streams that the host's memory let go for want of room",
    "forgotten_chunks": "chunks that it let go altogether",
    "unkept_chunks": "chunks that it could not take, for want of room or as too many came at once",
}
OF_EACH_RANK = ("fetched_bytes",)
"""Of several ranks, which load the same, the first tells all else."""


class KdnStats(KVConnectorStats):  # type: ignore[misc]
    """Sums since the last time they were taken."""

    def reset(self) -> None:
        self.data = dict[str, int]()

    def aggregate(self, other: KVConnectorStats) -> KdnStats:
        return KdnStats(data=dict(Tally(self.data) + Tally(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data[name] for name in MEANINGS if self.data.get(name)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Taken:
    """The growth of counters since it was last taken."""

    def __init__(self, names: Iterable[str] = MEANINGS) -> None:
        self._names = tuple(names)
        self._before: Tally[str] = Tally()

    def take(self, counts: dict[str, int] | Tally[str]) -> KdnStats | None:
        now = Tally({name: counts[name] for name in self._names if name in counts})
        grown = now - self._before
        self._before = now
        return KdnStats(data=dict(grown)) if grown else None


class KdnPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter for each of the above, by engine."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counters: dict[str, Any] = {
            name: self._counter_cls(
                name=f"vllm:kdn_{name}", documentation=f"kdn: {what}", labelnames=self._labelnames
            )
            for name, what in MEANINGS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, grown in transfer_stats_data.items():
            if name in self._counters:
                labels = self.per_engine_labelvalues[engine_idx]
                counter: Counter = self._counters[name].labels(*labels)
                counter.inc(grown)
