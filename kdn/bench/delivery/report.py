"""How `kdn bench delivery` is told: tables, JSON, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kdn.bench.report import commit, drawing, print_passed, table_of

if TYPE_CHECKING:
    from kdn.bench.delivery.simulate import Scenario, SimulatedResult

_COLOURS = {"fixed": "#6c757d", "cachegen": "#3f7d20", "mpc": "#2e6f95", "default": "#d1495b"}
_LEVEL_COLOURS = ("#f4b6a6", "#e07a5f", "#c0392b", "#6d1a1a")
MET_BAR = 0.97
KLD_BAR = 1.25
_NOTES = (
    "met: deadlines met of those the oracle meets. KLD: mean over the runs that both meet, "
    "recomputed chunks counting 0; the oracle's is a bound that no schedule can beat.",
    "cachegen: the paper's rule (last chunk's throughput, least lossy choice that fits), over the "
    "same layered streams.",
    "Link, decoder and model are taken to work side by side without slowing each other.",
)


@dataclass(frozen=True)
class PolicyRun:
    """One run of one policy."""

    trace: str
    model: str
    num_tokens: int
    rate_gbit: float
    factor: float
    policy: str
    deadline_s: float
    met: bool
    ttft_s: float
    kld: float
    kld_oracle: float
    """Infinite where the oracle does not meet the deadline."""
    num_bytes: int
    plans: int


def summary(rows: Sequence[PolicyRun]) -> dict[str, float]:
    """One policy's figures over some runs."""
    possible = [row for row in rows if np.isfinite(row.kld_oracle)]
    both = [row for row in possible if row.met]
    ttft_s = [row.ttft_s for row in rows]
    return {
        "deadline_met_of_oracle": len(both) / len(possible) if possible else 1.0,
        "kld_mean": float(np.mean([row.kld for row in both])) if both else 0.0,
        "kld_mean_oracle": float(np.mean([row.kld_oracle for row in both])) if both else 0.0,
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p95_s": float(np.percentile(ttft_s, 95)),
        "bytes": float(np.mean([row.num_bytes for row in rows])),
        "runs": len(rows),
    }


def document(
    rows: Sequence[PolicyRun], policies: Sequence[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything, as it goes to JSON."""
    buckets = dict.fromkeys((row.model, row.rate_gbit, row.factor) for row in rows)
    return {
        "policies": {
            name: summary([row for row in rows if row.policy == name]) for name in policies
        },
        "buckets": [
            {"model": model, "rate_gbit": rate, "deadline_factor": factor}
            | {name: summary(_select(rows, name, model, rate, factor)) for name in policies}
            for model, rate, factor in buckets
        ],
        "rows": [asdict(row) for row in rows],
        "settings": settings,
        "notes": _NOTES,
        "commit": commit(),
    }


def _select(rows: Sequence[PolicyRun], name: str, *bucket: object) -> list[PolicyRun]:
    return [
        row
        for row in rows
        if row.policy == name and (row.model, row.rate_gbit, row.factor) == bucket
    ]


def print_report(console: Console, results: dict[str, Any]) -> None:
    console.print(_bucket_table(results))
    console.print(_policy_table(results))
    if own := results["policies"].get("default"):
        ratio = own["kld_mean"] / max(own["kld_mean_oracle"], 1e-12)
        passed = own["deadline_met_of_oracle"] >= MET_BAR and ratio <= KLD_BAR
        told = f"default meets {own['deadline_met_of_oracle']:.1%} (bar {MET_BAR:.0%}) at "
        told += f"{ratio:.3f} times the oracle's KLD (bar {KLD_BAR:g})"
        print_passed(console, told, passed)
    for note in results["notes"]:
        console.print(note, style="dim")


def _ratio(figures: dict[str, float]) -> str:
    best = figures["kld_mean_oracle"]
    if best <= 0:
        return "=" if figures["kld_mean"] <= 0 else "inf"
    return f"{figures['kld_mean'] / best:.2f}"


def _policy_table(results: dict[str, Any]) -> Table:
    headings = (
        "policy", "met of\noracle", "KLD", "oracle's\nKLD", "times", "TTFT s\np50", "\np95", "MB",
        "runs",
    )  # fmt: skip
    table = table_of("All runs", headings)
    for name, one in results["policies"].items():
        table.add_row(
            name, f"{one['deadline_met_of_oracle']:.1%}", f"{one['kld_mean']:.5f}",
            f"{one['kld_mean_oracle']:.5f}", _ratio(one), f"{one['ttft_p50_s']:.3f}",
            f"{one['ttft_p95_s']:.2f}", f"{one['bytes'] / 1e6:.1f}", f"{one['runs']:,}",
        )  # fmt: skip
    return table


def _bucket_table(results: dict[str, Any]) -> Table:
    """Per bucket and policy: met, and divergence as multiples of the oracle's."""
    names = list(results["policies"])
    title = "Deadlines met, % / KLD over the oracle's on the runs met"
    table = table_of(title, ["model", "Gbit/s", "deadline", "oracle's\nKLD", *names])
    previous = None
    for bucket in results["buckets"]:
        group = (bucket["model"], bucket["rate_gbit"])
        if previous and group != previous:
            table.add_section()
        cells = [
            f"{100 * bucket[name]['deadline_met_of_oracle']:.0f} / {_ratio(bucket[name])}"
            for name in names
        ]
        head = [bucket["model"], f"{bucket['rate_gbit']:g}"] if group != previous else ["", ""]
        oracle = f"{bucket[names[-1]]['kld_mean_oracle']:.5f}"
        table.add_row(*head, f"{bucket['deadline_factor']:g}", oracle, *cells)
        previous = group
    return table


def plot(path: Path, results: dict[str, Any], scenario: Scenario, outcome: SimulatedResult) -> None:
    """Left one run: the link, and what became of each chunk. Right all runs."""
    with drawing(path) as pyplot:
        _, panels = pyplot.subplot_mosaic(
            [["link", "met"], ["chunks", "met"], ["chunks", "kld"], ["chunks", "kld"]],
            figsize=(12, 7), width_ratios=(1.6, 1), layout="constrained",
        )  # fmt: skip
        _draw_link(panels["link"], scenario, outcome)
        _draw_chunks(panels["chunks"], scenario, outcome)
        _draw_summary(panels["met"], panels["kld"], results)
        for panel in panels.values():
            panel.spines[["top", "right"]].set_visible(False)


def _draw_link(panel: Any, scenario: Scenario, outcome: SimulatedResult) -> None:
    end_s = max(scenario.deadline_s, outcome.ttft_s)
    times_s = np.linspace(0, end_s, 600)
    rates = [8 * scenario.trace.rate_at(t) / 1e9 for t in times_s]
    panel.fill_between(times_s, rates, step="post", color="#2e6f95", alpha=0.35, linewidth=0)
    panel.set_xlim(0, end_s * 1.01)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("Gbit/s")
    panel.set_xticklabels([])
    chunks = len(scenario.offers)
    told = f"{chunks} chunks, KLD {outcome.kld:.4f}, {outcome.num_bytes / 1e6:.1f} MB"
    panel.set_title(f"One delivery: {told}", fontsize=10, loc="left")


def _draw_chunks(panel: Any, scenario: Scenario, outcome: SimulatedResult) -> None:
    """Loading above, decoding below within a chunk's line; a level's colour once it is decoded."""
    labels: set[str] = set()
    for event in outcome.events:
        if event.start_s > scenario.deadline_s:
            continue
        label = "read by the model" if event.what == "compute" else f"level {event.levels}"
        colour = "#3f7d20" if event.what == "compute" else _LEVEL_COLOURS[event.levels - 1]
        height, offset = {"load": (0.4, 0.22), "decode": (0.4, -0.22), "compute": (0.84, 0.0)}[
            event.what
        ]
        panel.barh(
            event.chunk + offset, event.end_s - event.start_s, height, event.start_s,
            color=colour, label=None if label in labels else label,
            edgecolor="#1b1b1e" if event.what == "decode" else "none", linewidth=0.3,
        )  # fmt: skip
        labels.add(label)
    panel.axvline(scenario.deadline_s, color="#1b1b1e", linewidth=1, linestyle=(0, (4, 3)))
    panel.set_xlim(0, max(scenario.deadline_s, outcome.ttft_s) * 1.01)
    panel.set_xlabel("s since the request (dashed: deadline)")
    panel.set_ylabel("chunk (above: on the link, below: being decoded)")
    handles = dict(sorted(zip(*reversed(panel.get_legend_handles_labels()), strict=True)))
    panel.legend(handles.values(), handles.keys(), loc="lower right", fontsize=8, framealpha=0.9)


def _draw_summary(met: Any, kld: Any, results: dict[str, Any]) -> None:
    factors = sorted({bucket["deadline_factor"] for bucket in results["buckets"]})
    places = np.arange(len(factors))
    for name in results["policies"]:
        each = [_at_factor(results, name, factor) for factor in factors]
        style: dict[str, Any] = {"marker": "o", "color": _COLOURS.get(name), "label": name}
        met.plot(places, [100 * one["deadline_met_of_oracle"] for one in each], **style)
        ratios = [
            one["kld_mean"] / one["kld_mean_oracle"] if one["kld_mean_oracle"] > 0 else np.nan
            for one in each
        ]
        kld.plot(places, ratios, **style)
    met.axhline(100 * MET_BAR, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))
    kld.axhline(KLD_BAR, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))
    met.set_ylim(0, 103)
    kld.set_yscale("log")
    kld.set_xlabel("deadline, times the least an oracle needs")
    for panel, title in ((met, "Deadlines met of the oracle's, %"), (kld, "KLD over the oracle's")):
        panel.set_xticks(places, [f"{factor:g}" for factor in factors])
        panel.set_title(title, fontsize=10, loc="left")
    met.legend(frameon=False, fontsize=9)


def _at_factor(results: dict[str, Any], name: str, factor: float) -> dict[str, float]:
    rows = [
        PolicyRun(**row)
        for row in results["rows"]
        if row["policy"] == name and row["factor"] == factor
    ]
    return summary(rows)
