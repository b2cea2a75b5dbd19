"""Every metric that kdn shows to Prometheus: its name, its kind, its labels, and what it means.

Whoever counts takes the name from here, and `docs/metrics.md` is made of this file (`make metrics`;
a test sees that it is up to date). Names are as Prometheus asks for: base units, `_total` for what
only grows. Labels have few values, all of them kdn's own words or the operator's: the names of
tenants, routes and kinds, never those of contexts, chunks or clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
QUEUE_BUCKETS_S = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
REQUEST_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class Family:
    name: str
    """As Prometheus shows it."""
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def shown(self, values: float | Mapping[tuple[str, ...], float]) -> Metric:
        """What somebody else has counted: one value, or one for each of some labels."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        made = CounterMetricFamily if self.kind == COUNTER else GaugeMetricFamily
        family: Metric = made(self.name, self.meaning, labels=self.labels)
        every = values if isinstance(values, Mapping) else {(): values}
        for labels, value in every.items():
            family.add_metric(labels, value)  # type: ignore[attr-defined]
        return family


def _by_name(*families: Family) -> dict[str, Family]:
    return {family.name: family for family in families}


NODE = _by_name(
    Family("kdn_hits_total", COUNTER, "Objects or spans asked for that were here."),
    Family("kdn_misses_total", COUNTER, "Objects or spans asked for that were not here."),
    Family("kdn_refused_puts_total", COUNTER, "Bodies that failed verification."),
    Family("kdn_cut_readers_total", COUNTER, "Readers cut because they did not drain."),
    Family("kdn_connections", GAUGE, "Open connections."),
    Family(
        "kdn_request_seconds",
        HISTOGRAM,
        "From the head of a request to the end of its answer. Status 0: the answer was cut.",
        ("method", "route", "status"),
        REQUEST_BUCKETS_S,
    ),
    Family("kdn_received_bytes_total", COUNTER, "Bytes of request bodies.", ("tenant",)),
    Family("kdn_sent_bytes_total", COUNTER, "Bytes of response bodies.", ("tenant",)),
    Family(
        "kdn_queue_seconds",
        HISTOGRAM,
        "A frame's wait for its turn to be sent.",
        ("tenant",),
        QUEUE_BUCKETS_S,
    ),
    Family(
        "kdn_faults_total",
        COUNTER,
        "Failures nobody expected, which the log shows, by the work that failed.",
        ("work",),
    ),
    Family("kdn_build_info", GAUGE, "Always 1; its label says which kdn this is.", ("version",)),
    Family("kdn_disk_size_bytes", GAUGE, "Size of the file system that holds the data folder."),
    Family("kdn_disk_free_bytes", GAUGE, "Free bytes there, for this user."),
)
"""Of a node as a whole."""

STORE = _by_name(
    Family("kdn_store_objects", GAUGE, "Objects held now."),
    Family("kdn_store_size_bytes", GAUGE, "Bytes held now."),
    Family("kdn_store_capacity_bytes", GAUGE, "Bytes it may hold."),
    Family("kdn_store_hits_total", COUNTER, "Reads that found their object."),
    Family("kdn_store_misses_total", COUNTER, "Reads that did not."),
    Family(
        "kdn_store_tier_hits_total",
        COUNTER,
        "Reads that a tier answered: memory, disk, or a store behind them.",
        ("tier",),
    ),
    Family("kdn_store_puts_total", COUNTER, "Objects written."),
    Family("kdn_store_evictions_total", COUNTER, "Objects dropped to make room."),
    Family("kdn_store_cuts_total", COUNTER, "Times that an object lost levels to make room."),
    Family("kdn_store_corruptions_total", COUNTER, "Objects found damaged, never served."),
    Family(
        "kdn_store_requests_total", COUNTER, "Requests to a store elsewhere, by kind.", ("kind",)
    ),
    Family("kdn_store_sent_bytes_total", COUNTER, "Bytes of objects sent to a store elsewhere."),
    Family(
        "kdn_store_received_bytes_total",
        COUNTER,
        "Bytes of objects received from it.",
    ),
)
"""Of what a node keeps objects in."""

REGION = _by_name(
    Family("kdn_region_waiting_objects", GAUGE, "Objects in the outbox, not yet at the centre."),
    Family("kdn_region_waiting_bytes", GAUGE, "Their bytes."),
    Family("kdn_region_names_age_seconds", GAUGE, "How old the copy of names may be."),
    Family("kdn_region_pulled_bytes_total", COUNTER, "Bytes fetched from the centre."),
    Family("kdn_region_sent_objects_total", COUNTER, "Objects that the centre has answered for."),
    Family(
        "kdn_region_send_failures_total", COUNTER, "Times that the centre could not be reached."
    ),
    Family("kdn_region_refused_objects_total", COUNTER, "Times that the centre refused an object."),
    Family("kdn_region_lost_objects_total", COUNTER, "Objects damaged before they were sent."),
)
"""Of a node with an `upstream`."""

CLIENT = _by_name(
    Family("kdn_client_answers_total", COUNTER, "Answers that were given."),
    Family("kdn_client_prompt_tokens_total", COUNTER, "Tokens of their prompts."),
    Family(
        "kdn_client_hit_tokens_total",
        COUNTER,
        "Tokens of prompts that were loaded, by where they came from: host, folder or remote.",
        ("tier",),
    ),
    Family("kdn_client_computed_tokens_total", COUNTER, "Tokens of prompts that the model read."),
    Family("kdn_client_fetched_bytes_total", COUNTER, "Bytes that came from places."),
    Family(
        "kdn_client_level_bytes_total",
        COUNTER,
        "Those of them that were verified, by level of quality.",
        ("level",),
    ),
    Family("kdn_client_load_seconds_total", COUNTER, "Time that deliveries took, added up."),
    Family(
        "kdn_client_avoided_seconds_total",
        COUNTER,
        "Estimate: the time that the model would have taken to read what was loaded. Less the "
        "time of the deliveries, it is what was saved.",
    ),
    Family("kdn_client_joins_total", COUNTER, "Answers from pieces that were learned apart."),
    Family(
        "kdn_client_recomputed_tokens_total", COUNTER, "Tokens of joins that were computed anew."
    ),
    Family(
        "kdn_client_audits_total",
        COUNTER,
        "Answers held against the model's own: done or failed.",
        ("result",),
    ),
    Family("kdn_client_audited_tokens_total", COUNTER, "Tokens of the audited answers."),
    Family(
        "kdn_client_audit_kld_nats_total",
        COUNTER,
        "Their KL divergence, added up; divided by the tokens, it is the mean.",
    ),
    Family(
        "kdn_client_audit_kld_nats_max", GAUGE, "Largest mean divergence of any audited answer."
    ),
)
"""Of a `kdn.connect` client, if its process shows them."""

OF_VLLM = {
    "asked": "prompts that were looked up",
    "asked_tokens": "tokens of these prompts",
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
    "early_loads": "loads whose streams were on their way before vLLM had made room for them",
    "dropped_early_loads": "loads on their way that vLLM then did not begin, or not in time",
    "loaded_tokens": "tokens that were loaded",
    "joined_tokens": "tokens of them that came from joined pieces",
    "moved_tokens": "tokens of these that stand elsewhere than they were learned",
    "repaired_tokens": "tokens of these that seams repaired",
    "host_tokens": "tokens that were found in the shared memory of the host",
    "failed_tokens": "tokens that were to be loaded and had to be computed",
    "load_ms": "time that loads took, added up",
    "avoided_ms": "estimate: the time that vLLM would have taken to compute what was loaded; less "
    "the time of the loads, it is what was saved",
    "fetched_bytes": "bytes that came from stores",
    "level_bytes": "those of them that were verified, by level of quality",
    "published_chunks": "chunks handed to the publisher",
    "unpublished_chunks": "chunks not published, as too much was waiting",
    "incomplete_chunks": "chunks not published, as the part of one of several ranks did not come",
    "faded_levels": "levels of streams that the host's memory let go for want of room",
    "forgotten_chunks": "chunks that it let go altogether",
    "unkept_chunks": "chunks that it could not take, for want of room or as too many came at once",
}
"""What the vLLM connector counts, in whole numbers, and in vLLM's log by these names."""
LABELS_OF_VLLM = {"level_bytes": "level"}
"""Counts that are kept apart by a label: `level_bytes:0`, `level_bytes:1`, ..."""
MS = "_ms"


def _of_vllm(name: str) -> Family:
    meaning = OF_VLLM[name]
    own = (LABELS_OF_VLLM[name],) if name in LABELS_OF_VLLM else ()
    in_seconds = name.removesuffix(MS) + "_seconds" if name.endswith(MS) else name
    told = f"{meaning[0].upper()}{meaning[1:]}."
    return Family(f"kdn_vllm_{in_seconds}_total", COUNTER, told, ("model_name", "engine", *own))


BY_COUNT = {name: _of_vllm(name) for name in OF_VLLM}
VLLM = _by_name(*BY_COUNT.values())
"""Of the connector, among vLLM's own metrics."""

EVERY: Mapping[str, Iterable[Family]] = {
    "A node": NODE.values(),
    "A node's store": STORE.values(),
    "A region": REGION.values(),
    "A client": CLIENT.values(),
    "vLLM": VLLM.values(),
}


def series(family: Family) -> tuple[str, ...]:
    """The names under which Prometheus stores it."""
    if family.kind != HISTOGRAM:
        return (family.name,)
    return tuple(f"{family.name}_{part}" for part in ("bucket", "sum", "count"))
