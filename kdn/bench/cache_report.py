"""How `kdn bench cache` is told: a table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kdn.bench.cache_replay import (
    LEVEL_BITS,
    LEVEL_KLD,
    PREFILL_S_PER_TOKEN,
    PREFILL_S_PER_TOKEN2,
    WANTED_LEVELS,
)
from kdn.bench.report import commit, drawing, table_of

OPTIMUM = "optimum"
_COLOURS = {
    "lru": "#6c757d",
    "s3fifo": "#2e6f95",
    "cost": "#d1495b",
    "graded": "#3a7d44",
    OPTIMUM: "#1b1b1e",
}
_NOTES = (
    "A block hits only if all before it hit. optimum: Belady's choice by next use, which no policy "
    "can beat in blocks hit; prefixes cost it nothing, as a prefix is used whenever what follows "
    "it is.",
    f"Prefill of n tokens: {PREFILL_S_PER_TOKEN * 1e6:g} us n + {PREFILL_S_PER_TOKEN2 * 1e9:g} ns "
    "n^2 (an 8B model on one H200).",
    f"graded cuts levels off blocks before it drops any; all others keep all levels. A block hits "
    f"with {WANTED_LEVELS} of {len(LEVEL_BITS)} levels, the default quality. KLD: mean over hits, "
    f"with all levels that are there (by level: {', '.join(f'{kld:g}' for kld in LEVEL_KLD)}). "
    "Exact: hits whose whole prefix has all levels. The optimum is that of whole blocks.",
)


@dataclass(frozen=True)
class CacheRow:
    """One policy at one capacity on one trace. `share`: capacity as a part of the footprint."""

    trace: str
    requests: int
    footprint_tokens: int
    share: float
    policy: str
    token_hit_ratio: float
    saved_ratio: float
    """Part of all seconds of prefill."""
    hit_kld: float
    """Mean over the tokens that hit."""
    exact_hit_ratio: float
    """Token hit ratio of readers who want all levels."""
    replay_s: float


def by_capacity(rows: Sequence[CacheRow]) -> dict[tuple[str, float], dict[str, CacheRow]]:
    """{(trace, share): {policy: row}}, in their order."""
    groups: dict[tuple[str, float], dict[str, CacheRow]] = {}
    for row in rows:
        groups.setdefault((row.trace, row.share), {})[row.policy] = row
    return groups


def document(rows: Sequence[CacheRow], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything, as it goes to JSON."""
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for (trace, share), group in by_capacity(rows).items():
        ratios.setdefault(trace, {})[f"{share:g}"] = {
            policy: row.token_hit_ratio for policy, row in group.items()
        }
    return {
        "rows": [asdict(row) for row in rows],
        "token_hit_ratio": ratios,
        "settings": settings,
        "notes": _NOTES,
        "commit": commit(),
    }


def print_report(console: Console, rows: Sequence[CacheRow]) -> None:
    policies = list(dict.fromkeys(row.policy for row in rows))
    console.print(_table(rows, policies, "token_hit_ratio", "Token hit ratio"))
    console.print(_table(rows, policies, "saved_ratio", "Part of the prefill time saved"))
    console.print(_table(rows, policies, "exact_hit_ratio", "Token hit ratio, exact"))
    console.print(_table(rows, policies, "hit_kld", "Mean KLD of hits", best=min))
    for note in _NOTES:
        console.print(note, style="dim")


def _table(
    rows: Sequence[CacheRow],
    policies: Sequence[str],
    field: str,
    title: str,
    best: Callable[..., float | None] = max,
) -> Table:
    """The best online policy of each line is bold."""
    table = table_of(title, ["trace", "footprint\ntokens", "cache", *policies])
    previous = ""
    for (trace, share), group in by_capacity(rows).items():
        if previous and trace != previous:
            table.add_section()
        values = {policy: getattr(row, field) for policy, row in group.items()}
        first = best((v for p, v in values.items() if p != OPTIMUM), default=None)
        cells = [
            f"[bold]{value:.4f}[/]" if value == first and policy != OPTIMUM else f"{value:.4f}"
            for policy, value in values.items()
        ]
        footprint = f"{next(iter(group.values())).footprint_tokens:,}"
        is_new = trace != previous
        table.add_row(trace if is_new else "", footprint if is_new else "", f"{share:.0%}", *cells)
        previous = trace
    return table


def plot(path: Path, rows: Sequence[CacheRow]) -> None:
    """Token hit ratio over capacity, a panel per trace."""
    with drawing(path) as pyplot:
        traces = list(dict.fromkeys(row.trace for row in rows))
        figure, panels = pyplot.subplots(
            1,
            len(traces),
            figsize=(1.2 + 3.9 * len(traces), 4.2),
            squeeze=False,
            layout="constrained",
        )
        for panel, trace in zip(panels[0], traces, strict=True):
            _draw(panel, [row for row in rows if row.trace == trace])
            panel.set_title(trace.replace("_", " "), fontsize=10, loc="left")
        panels[0][0].set_ylabel("token hit ratio")
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)


def _draw(panel: Any, rows: Sequence[CacheRow]) -> None:
    for policy in dict.fromkeys(row.policy for row in rows):
        own = sorted((row.share, row.token_hit_ratio) for row in rows if row.policy == policy)
        panel.plot(
            [share for share, _ in own],
            [ratio for _, ratio in own],
            marker="o",
            markersize=4.5,
            linewidth=2.6 if policy in ("cost", "graded") else 1.6,
            linestyle=(0, (4, 3)) if policy == OPTIMUM else "-",
            color=_COLOURS.get(policy),
            label=policy,
        )
    shares = sorted({row.share for row in rows})
    panel.set_xscale("log")
    panel.set_xticks(shares, [f"{share:.0%}" for share in shares])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set_xlabel("capacity, part of the footprint")
    panel.grid(color="#e3e3e3", linewidth=0.7)
    panel.spines[["top", "right"]].set_visible(False)
