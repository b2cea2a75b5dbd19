"""The figures that everything comes to, whether they hold, and tables of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from rich.console import Console

from kdn.bench.cluster.rows import Row, Rows, shown
from kdn.bench.report import print_end, table_of

OF_RAW_BAR = 0.8
COPIES_BAR = 1.05
OVER_CLUSTER_BAR_S = 1.0
NO_ERRORS = {"node_errors": "kill a node", "reshard_errors": "add a shard and reshard"}
"""Where every request has somebody to answer it."""
NOTHING = (
    "acknowledged_lost", "wrong_bytes", *NO_ERRORS, "not_monotonic", "too_old",
    "stale_force_latest",
)  # fmt: skip
NOT_SHOWN = ("part", "what", "histogram", "reasons", "faults")


def figures_of(rows: Rows) -> dict[str, Any]:
    """Those of the parts that were run."""
    told: dict[str, Any] = {}
    for store in ("redis", "s3"):
        ratios = [row["ratio"] for row in rows.of("ratio") if row["store"] == store]
        if ratios:
            told[f"{store}_of_raw"] = min(ratios)  # of all sizes and numbers of shards
            told[f"{store}_of_raw_mean"] = geometric_mean(ratios)
    for name in ("acknowledged_lost", "wrong_bytes", "not_monotonic", "too_old",
                 "stale_force_latest"):  # fmt: skip
        found = [row[name] for row in rows.rows if name in row]
        if found:
            told[name] = sum(found)
    if kills := rows.of("kill a master"):
        told["failover_s"] = max(row["back_s"] for row in kills)
        told["failover_over_cluster_s"] = max(row["back_s"] - row["cluster_s"] for row in kills)
    for name, what in NO_ERRORS.items():
        if found := rows.of(what):
            told[name] = sum(row["errors"] for row in found)
    if copies := rows.of("one document"):
        told["long_link_copies"] = max(row["long_link_copies"] for row in copies)
    return told


def passes_of(told: Mapping[str, Any]) -> dict[str, bool]:
    """Of the figures that there are."""
    least = {"redis_of_raw": OF_RAW_BAR, "s3_of_raw": OF_RAW_BAR}
    most = {"failover_over_cluster_s": OVER_CLUSTER_BAR_S, "long_link_copies": COPIES_BAR}
    most |= dict.fromkeys(NOTHING, 0.0)
    passes = {name: told[name] >= bar for name, bar in least.items() if name in told}
    return passes | {name: told[name] <= bar for name, bar in most.items() if name in told}


def print_report(console: Console, results: Mapping[str, Any]) -> None:
    every: dict[tuple[str, str, tuple[str, ...]], list[Row]] = {}
    for row in results["rows"]:
        names = tuple(name for name in row if name not in NOT_SHOWN)
        every.setdefault((row["part"], row["what"], names), []).append(row)
    for (part, what, names), rows in every.items():
        _print_table(console, f"{part}: {what}", names, rows)
    for row in results["rows"]:
        if "histogram" in row:
            ages = ", ".join(f"{name}: {count}" for name, count in row["histogram"].items())
            console.print(f"{row['what']}, ages of default reads: {ages}")
        for reason in row.get("reasons", ()):
            console.print(f"{row['what']}: {reason}", style="dim")
    told = {name: value for name, value in results.items() if isinstance(value, int | float)}
    console.print("  ".join(f"{name} {shown(value)}" for name, value in told.items()))
    print_end(console, results)


def _print_table(console: Console, title: str, names: Sequence[str], rows: Sequence[Row]) -> None:
    table = table_of(title, names, texts=0)
    for row in rows:
        table.add_row(*(shown(row[name]) for name in names))
    console.print(table)
