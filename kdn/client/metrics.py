"""What a client has counted since it was opened. It can be shown to Prometheus:

prometheus_client.REGISTRY.register(client.metrics)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kdn.client.answers import Stats
from kdn.metrics import CLIENT

Labelled = dict[tuple[str, ...], float]


@dataclass(eq=False)
class Metrics(Collector):
    answers: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0
    computed_tokens: int = 0
    fetched_bytes: int = 0
    tier_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that were loaded, by where they came from: host, folder or remote."""
    level_bytes: Counter[int] = field(default_factory=Counter)
    """Bytes that were fetched and verified, by level."""
    load_s: float = 0.0
    """That deliveries took."""
    avoided_s: float = 0.0
    """That the model would have taken to read what was loaded, as far as it can be told."""
    joins: int = 0
    """Answers from pieces that were learned apart."""
    moved_tokens: int = 0
    repaired_tokens: int = 0
    recomputed_tokens: int = 0
    audits: int = 0
    failed_audits: int = 0
    audited_tokens: int = 0
    audit_kld_sum: float = 0.0
    audit_kld_max: float = 0.0
    """Largest mean KLD of any audited answer."""

    @property
    def audit_kld(self) -> float:
        """Mean over all audited tokens."""
        return self.audit_kld_sum / max(1, self.audited_tokens)

    @property
    def saved_s(self) -> float:
        """Seconds that loading has saved, as estimated; negative if it cost time."""
        return self.avoided_s - self.load_s

    def count(self, stats: Stats) -> None:
        self.answers += 1
        self.prompt_tokens += stats.prompt_tokens
        self.known_tokens += stats.known_tokens
        self.computed_tokens += stats.computed_tokens
        self.fetched_bytes += stats.fetched_bytes
        self.tier_tokens.update(stats.tier_tokens)
        self.level_bytes.update(dict(enumerate(stats.level_bytes)))
        self.load_s += stats.delivery_s
        self.avoided_s += stats.avoided_s
        self.joins += stats.joined_pieces > 0
        self.moved_tokens += stats.moved_tokens
        self.repaired_tokens += stats.repaired_tokens
        self.recomputed_tokens += stats.recomputed_tokens

    def audited(self, klds: npt.NDArray[np.float64]) -> None:
        self.audits += 1
        self.audited_tokens += len(klds)
        self.audit_kld_sum += float(klds.sum())
        self.audit_kld_max = max(self.audit_kld_max, float(klds.mean()))

    def collect(self) -> Iterable[Metric]:
        """For Prometheus."""
        tiers: Labelled = {(tier,): count for tier, count in list(self.tier_tokens.items())}
        levels: Labelled = {(str(level),): size for level, size in list(self.level_bytes.items())}
        audits: Labelled = {("done",): self.audits, ("failed",): self.failed_audits}
        told: dict[str, float | Labelled] = {
            "answers_total": self.answers,
            "prompt_tokens_total": self.prompt_tokens,
            "hit_tokens_total": tiers,
            "computed_tokens_total": self.computed_tokens,
            "fetched_bytes_total": self.fetched_bytes,
            "level_bytes_total": levels,
            "load_seconds_total": self.load_s,
            "avoided_seconds_total": self.avoided_s,
            "joins_total": self.joins,
            "recomputed_tokens_total": self.recomputed_tokens,
            "audits_total": audits,
            "audited_tokens_total": self.audited_tokens,
            "audit_kld_nats_total": self.audit_kld_sum,
            "audit_kld_nats_max": self.audit_kld_max,
        }
        for name, value in told.items():
            yield CLIENT[f"kdn_client_{name}"].shown(value)
