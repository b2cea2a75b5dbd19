"""How `kdn bench tasks` tells what it found: tables, and a plot of scores over sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from kdn.bench.report import drawing, print_end, table_of
from kdn.bench.tasks.problems import Task
from kdn.bench.tasks.summary import ENOUGH, Interval, Row
from kdn.bench.tasks.ways import DEFAULT, EXACT, HIGH

_COLOURS = {"klt": "#d1495b", DEFAULT: "#1b1b1e", HIGH: "#2e6f95", "cachegen": "#3f7d20"}


def print_report(
    console: Console, tasks: Sequence[Task], rows: Sequence[Row], extra: Mapping[str, Any]
) -> None:
    for task in tasks:
        own = [row for row in rows if row.task == task.name]
        console.print(_table(task, own))
        console.print(f"  {told(task)}", style="dim", markup=False, highlight=False)
        console.print()
    print_end(console, extra)


def told(task: Task) -> str:
    """How long contexts are, and how they were made."""
    lengths = sorted(len(one.tokens) for one in task.problems)
    return (
        f"contexts of {lengths[0]:,} to {lengths[-1]:,} tokens (half of them up to "
        f"{median(lengths):,.0f}): {task.cut}"
    )


def _table(task: Task, rows: Sequence[Row]) -> Table:
    title = f"{task.name}: {rows[0].items} items over {rows[0].contexts} contexts"
    if task.chance is not None:
        title += f", chance {task.chance:.1%}"
    headings = (
        "way", "times\nsmaller", task.metric, "95 %", "of exact's", "95 %", "as exact", "95 %",
    )  # fmt: skip
    table = table_of(title, headings)
    is_loss = task.kind == "perplexity"
    for row in rows:
        table.add_row(
            row.way,
            f"{row.ratio:.1f}",
            f"{row.score:.2f}" if is_loss else f"{row.score:.1%}",
            _shown(row.score_interval, ".2f" if is_loss else ".1%"),
            "-" if row.kept is None else f"{row.kept:.1%}",
            "-" if row.kept_interval is None else _shown(row.kept_interval),
            f"{row.agreement:.1%}",
            _shown(row.agreement_interval),
            style="bold" if row.way == DEFAULT else None,
        )
    return table


def _shown(interval: Interval, form: str = ".1%") -> str:
    low, high = (format(end, form).removesuffix("%") for end in interval)
    return f"{low} to {high}"


def plot(path: Path, tasks: Sequence[Task], rows: Sequence[Row]) -> None:
    """What is kept of the exact cache's score, over how much smaller a cache is."""
    with drawing(path) as pyplot:
        columns = min(3, len(tasks))
        lines = -(-len(tasks) // columns)
        figure, panels = pyplot.subplots(
            lines, columns, figsize=(4.4 * columns, 3.4 * lines), squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for panel, task in zip(panels.flat, tasks, strict=False):
            _panel(panel, task, [row for row in rows if row.task == task.name])
        for panel in list(panels.flat)[len(tasks) :]:
            panel.set_visible(False)
        shown = {name: line for panel in panels.flat for line, name in _legend(panel)}
        figure.legend(shown.values(), shown, loc="outside lower center", ncols=4, frameon=False)


def _legend(panel: Any) -> Iterable[tuple[Any, str]]:
    return zip(*panel.get_legend_handles_labels(), strict=True)


def _panel(panel: Any, task: Task, rows: Sequence[Row]) -> None:
    for codec, colour in _COLOURS.items():
        own = [row for row in rows if row.way.split()[0] == codec and row.kept is not None]
        if not own:
            continue
        kept = [float(row.kept or 0) for row in own]
        ends = [row.kept_interval or (0.0, 0.0) for row in own]
        below = [max(0.0, at - low) for at, (low, _) in zip(kept, ends, strict=True)]
        above = [max(0.0, high - at) for at, (_, high) in zip(kept, ends, strict=True)]
        panel.errorbar(
            [row.ratio for row in own], kept, yerr=(below, above), color=colour, marker="o",
            markersize=7 if codec == DEFAULT else 4.5, capsize=2, linewidth=1.4, label=codec,
        )  # fmt: skip
    exact = next(row for row in rows if row.way == EXACT)
    panel.axhline(ENOUGH, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))
    panel.set_xscale("log")
    panel.set_title(f"{task.name}, {exact.items} items", fontsize=9, loc="left")
    panel.set_xlabel("times smaller than fp16")
    panel.set_ylabel("part of the exact score")
    panel.grid(color="#e3e3e3", linewidth=0.7)
    panel.spines[["top", "right"]].set_visible(False)
