"""What was measured, in figures: scores, how they compare with the exact cache's, and how sure that
is.

Intervals are bootstrapped over contexts, as questions about one context share its losses. Scores
are compared in pairs: both caches were asked the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kdn.bench.tasks.problems import Task
from kdn.bench.tasks.ways import DEFAULT, EXACT

ENOUGH = 0.98
"""Of the exact cache's score, at the default quality."""
RESAMPLES = 4000

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """A task in one way."""

    task: str
    kind: str
    metric: str
    way: str
    contexts: int
    items: int
    ratio: float
    """Times smaller than fp16."""
    score: float
    score_interval: Interval
    kept: float | None
    """Part of the exact cache's score; of perplexities the exact cache's over this one. None: the
    exact cache scores 0."""
    kept_interval: Interval | None
    agreement: float
    agreement_interval: Interval


Contexts = Sequence[Mapping[str, Any]]
"""As `found.py` keeps them, all of one task."""


def rows_of(task: Task, contexts: Contexts, ways: Sequence[str]) -> list[Row]:
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(contexts), (RESAMPLES, len(contexts)))
    return [_row(task, contexts, way, drawn) for way in ways]


def _row(task: Task, contexts: Contexts, way: str, drawn: npt.NDArray[np.int64]) -> Row:
    def sums(of_way: str, figure: str) -> Floats:
        return np.array([sum(one["ways"][of_way][figure]) for one in contexts], np.float64)

    def size(of_way: str) -> float:
        return float(sum(one["ways"][of_way]["bytes"] for one in contexts))

    counts = np.array([len(one["ways"][way]["scores"]) for one in contexts], np.float64)
    score, exact = sums(way, "scores"), sums(EXACT, "scores")
    agreed = sums(way, "agreements")
    is_loss = task.kind == "perplexity"
    shown = np.exp if is_loss else np.asarray
    kept = _kept(score, exact, counts, is_loss)
    resampled = _kept(score[drawn], exact[drawn], counts[drawn], is_loss)
    return Row(
        task.name, task.kind, task.metric, way, len(contexts), int(counts.sum()),
        size(EXACT) / size(way),
        float(shown(score.sum() / counts.sum())),
        _interval(shown(score[drawn].sum(1) / counts[drawn].sum(1))),
        None if math.isnan(kept) else float(kept),
        None if math.isnan(kept) else _interval(resampled),
        float(agreed.sum() / counts.sum()),
        _interval(agreed[drawn].sum(1) / counts[drawn].sum(1)),
    )  # fmt: skip


def _kept(score: Floats, exact: Floats, counts: Floats, is_loss: bool) -> Any:
    """Of each row of contexts. A score of 0 is compared with nothing."""
    if is_loss:
        return np.exp((exact - score).sum(-1) / counts.sum(-1))
    whole = exact.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(whole > 0, score.sum(-1) / whole, np.nan)


def _interval(found: Floats) -> Interval:
    known = found[~np.isnan(found)]
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


def verdicts(tasks: Sequence[Task], rows: Sequence[Row]) -> tuple[dict[str, bool], list[str]]:
    """Which tasks keep enough of their score at the default quality, and what is to be known."""
    passes, notes = {}, []
    of = {(row.task, row.way): row for row in rows}
    for task in tasks:
        exact, row = of[task.name, EXACT], of[task.name, DEFAULT]
        if row.kept is None or row.kept_interval is None:
            notes.append(f"{task.name}: the exact cache scores 0, so there is nothing to keep")
            continue
        low, high = row.kept_interval
        name = (
            f"{task.name}: default quality keeps {row.kept:.1%} of the exact score, "
            f"95 % interval {low:.1%} to {high:.1%}, {row.items} items; {ENOUGH:.0%} asked for"
        )
        passes[name] = row.kept >= ENOUGH
        if low < ENOUGH <= high:
            notes.append(f"{task.name}: too few items to be sure: the interval holds {ENOUGH:.0%}")
        if task.kind != "perplexity" and exact.score_interval[0] <= (task.chance or 0.0):
            notes.append(
                f"{task.name}: the model itself is not clearly better than chance "
                f"({task.chance or 0:.0%}): read the agreement with the exact cache instead"
            )
    return passes, notes


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
