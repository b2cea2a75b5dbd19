"""What was measured of each way to answer: of one question, and over all of a set.

Answers to one question about its pieces in several orders are alike: they count as one number
where it is told how sure a mean is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kdn.bench.blend.methods import HEADLESS, Method
from kdn.engines.uncertainty import Interval, mean_interval

SCORES = ("top1", "f1_full", "f1_gold")


@dataclass(frozen=True)
class Outcome:
    """Of one method with one codec, over one question, with its pieces in one order."""

    method: Method
    codec: str
    kld_first: float
    kld: float
    top1: bool
    f1_full: float
    f1_gold: float
    ttft_s: float
    computed_tokens: float
    bytes: int
    question: str = ""


@dataclass(frozen=True)
class BlendRow:
    """Over a set. Figures are means over its questions (all orders of one count as one), unless
    they say otherwise. Means of divergence are what a few hard questions make them, so quartiles
    of all answers stand beside them."""

    method: str
    share: float
    codec: str
    data: str
    kld_first: float
    """KL(full reading || this) in nats at the first token of the answer."""
    kld: float
    """The same, mean over 16 tokens of the full reading's own greedy answer."""
    top1: float
    """How often the first token is the full reading's."""
    f1_full: float
    """Of the answer's words, against the full reading's answer."""
    f1_gold: float
    """Against the answer of the set."""
    ttft_s: float
    """Median: delivery from a folder of this machine, choosing, computing."""
    computed_tokens: float
    bytes: float
    """Fetched."""
    head: bool
    """Whether pieces were learned behind a shared head."""
    items: int
    """Questions."""
    answers: int
    """To them, in all orders."""
    kld_first_interval: Interval | None
    """Where the mean over very many questions lies in nine of ten cases; None for very few."""
    kld_interval: Interval | None
    kld_first_quartiles: tuple[float, float, float]
    kld_quartiles: tuple[float, float, float]
    ttft_quartiles_s: tuple[float, float, float]

    @classmethod
    def of(cls, data: str, outcomes: Sequence[Outcome]) -> BlendRow:
        """Of the same method and codec."""
        method = outcomes[0].method
        ttft = quartiles(one.ttft_s for one in outcomes)
        first, klds = by_question(outcomes, "kld_first"), by_question(outcomes, "kld")
        return cls(
            method.name, method.share, outcomes[0].codec, data,
            kld_first=_mean(first.values()),
            kld=_mean(klds.values()),
            **{name: _mean(by_question(outcomes, name).values()) for name in SCORES},
            ttft_s=ttft[1],
            computed_tokens=_mean(one.computed_tokens for one in outcomes),
            bytes=_mean(one.bytes for one in outcomes),
            head=method.delivered != HEADLESS,
            items=len(klds),
            answers=len(outcomes),
            kld_first_interval=mean_interval(list(first.values())),
            kld_interval=mean_interval(list(klds.values())),
            kld_first_quartiles=quartiles(one.kld_first for one in outcomes),
            kld_quartiles=quartiles(one.kld for one in outcomes),
            ttft_quartiles_s=ttft,
        )  # fmt: skip

    @property
    def label(self) -> str:
        return f"{self.method} {self.share:.0%}" if 0 < self.share < 1 else self.method

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(data: str, outcomes: Iterable[Outcome]) -> list[BlendRow]:
    """One for each method and codec, in the order in which they first come."""
    groups: dict[tuple[Method, str], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.method, one.codec), []).append(one)
    return [BlendRow.of(data, group) for group in groups.values()]


def by_question(outcomes: Iterable[Outcome], figure: str) -> dict[str, float]:
    """The mean over each question's orders."""
    found: dict[str, list[float]] = {}
    for one in outcomes:
        found.setdefault(one.question, []).append(getattr(one, figure))
    return {question: _mean(values) for question, values in found.items()}


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(list(values), (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
