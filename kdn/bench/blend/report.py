"""Tables, JSON and a plot of `kdn bench blend`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kdn.bench.blend import expected
from kdn.bench.blend.rows import BlendRow
from kdn.bench.report import drawing, table_of

HEADINGS = (
    "method", "codec", "first", "quartiles", "/join", "16", "quartiles", "/join", "same", "F1",
    "gold", "TTFT s", "tokens", "MB",
)  # fmt: skip
_COLOURS = {
    "full": "#444444", "prefix": "#8c8c8c", "join-no-head": "#b0b0b0", "join": "#1f77b4",
    "cacheblend": "#d62728", "epic": "#9467bd", "question": "#2ca02c", "seams": "#ff7f0e",
    "seams+question": "#17becf",
}  # fmt: skip
_FIGURES = {"kld_first": "first token", "kld": "16 tokens"}
_MARKS = {"exact": "o", "klt": "s"}
WIDTH = 150
"""Of the widest table."""
LEAST_KLD = 1e-4
"""Drawn for less."""


def document(rows: Iterable[BlendRow], extra: Mapping[str, Any]) -> dict[str, Any]:
    rows = list(rows)
    told = list(expected.rows_of(rows, extra["seams"]))
    return {"rows": [row.as_json() for row in rows], "expected": told, **extra}


def print_report(console: Console, rows: Sequence[BlendRow], extra: Mapping[str, Any]) -> None:
    if not console.is_terminal and console.width < WIDTH:
        console = Console(width=WIDTH)
    print_rows(console, rows, extra["seams"])
    print_expected(console, rows, extra["seams"])
    print_paired(console, extra["paired"])
    print_consistency(console, extra["consistency"])
    print_timing(console, extra["timing"])
    for note in extra["notes"]:
        console.print(note, style="dim", highlight=False)
    print_seconds(console, extra["seconds"])
    facts = extra["settings"]["hardware"]
    console.print("  ".join(f"{name} {fact}" for name, fact in facts.items()), style="dim")


def print_rows(console: Console, rows: Sequence[BlendRow], seams: Mapping[str, Any]) -> None:
    """One table for each set."""
    for data in dict.fromkeys(row.data for row in rows):
        own = [row for row in rows if row.data == data]
        title = f"{data}, {own[0].items} questions"
        if own[0].answers > own[0].items:
            title += f", {own[0].answers} answers"
        if data in seams:
            title += f", seams fitted on {seams[data]['from']}"
        table = table_of(title, HEADINGS, texts=2, no_wrap=True)
        joins = {row.codec: row for row in own if row.method == "join"}
        for row in own:
            table.add_row(*_cells(row, own[0].items, joins.get(row.codec)))
        console.print(table)
        seldom = list(dict.fromkeys(row.label for row in own if row.items < own[0].items))
        if seldom:
            told = f"* {' and '.join(seldom)}: measured on every third question"
            console.print(told, style="dim", highlight=False)


def _cells(row: BlendRow, items: int, join: BlendRow | None) -> list[str]:
    """Parts of the plain join's figures only where both are of the same questions."""
    label, join = row.label, join if join and join.items == row.items else None
    return [
        f"{label} *" if row.items < items else label, row.codec,
        f"{row.kld_first:.4f}", _spread(row.kld_first_quartiles),
        _part(row.kld_first, join.kld_first if join else None),
        f"{row.kld:.4f}", _spread(row.kld_quartiles), _part(row.kld, join.kld if join else None),
        f"{row.top1:.0%}", f"{row.f1_full:.2f}", f"{row.f1_gold:.3f}", f"{row.ttft_s:.2f}",
        f"{row.computed_tokens:,.0f}", f"{row.bytes / 1e6:.2f}",
    ]  # fmt: skip


def _spread(quartiles: Sequence[float]) -> str:
    """As ".01 .04 .12"."""
    return " ".join(f"{one:.2f}".removeprefix("0") for one in quartiles)


def _part(value: float, whole: float | None) -> str:
    return f"{value / whole:.2f}" if whole else ""


def print_expected(console: Console, rows: Sequence[BlendRow], seams: Mapping[str, Any]) -> None:
    """What the seams' own report promised, beside what was measured."""
    table = table_of(
        "Expected by the seams' report, and measured, each with its 90 % interval",
        ("data", "codec", "share", "KLD", "expected", "interval", "measured", "interval", "off"),
        texts=4,
    )
    for one in expected.rows_of(rows, seams):
        table.add_row(
            one["data"], one["codec"], f"{one['share']:.0%}", _FIGURES[one["figure"]],
            f"{one['expected']:.4f}", _interval(one["interval"]),
            f"{one['measured']:.4f}", _interval(one["measured_interval"]),
            "" if one["off"] is None else f"{one['off']:+.0%}",
        )  # fmt: skip
    if table.row_count:
        console.print(table)


def print_paired(console: Console, found: Sequence[Mapping[str, Any]]) -> None:
    if not found:
        return
    table = table_of(
        "Reports beside measurements of the same questions: how far they are off by themselves",
        ("data", "codec", "share", "KLD", "expected", "measured", "off", "90 %", "questions"),
        texts=4,
    )
    for one in found:
        off, interval = one["off"], one["interval"]
        table.add_row(
            one["data"], one["codec"], f"{one['share']:.0%}", _FIGURES[one["figure"]],
            f"{one['expected']:.4f}", f"{one['measured']:.4f}",
            "" if off is None else f"{off:+.0%}",
            "" if interval is None else f"{interval[0]:+.0%} to {interval[1]:+.0%}",
            str(one["items"]),
        )  # fmt: skip
    console.print(table)


def _interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"


def print_consistency(console: Console, found: Sequence[Mapping[str, Any]]) -> None:
    if not found:
        return
    headings = ("method", "codec", "same choice as read", "same choice in every order", "choices")
    table = table_of("Multiple choice, the same pieces in several orders", headings, texts=2)
    for one in found:
        label = f"{one['method']} {one['share']:.0%}" if 0 < one["share"] < 1 else one["method"]
        table.add_row(
            label, one["codec"], f"{one['same_choice']:.0%}", f"{one['same_in_orders']:.0%}",
            str(one["choices"]),
        )  # fmt: skip
    console.print(table)


def print_timing(console: Console, found: Sequence[Mapping[str, Any]]) -> None:
    if not found:
        return
    first = found[0]
    title = f"Time to first token, {first['tokens']:,} tokens in {first['pieces']} pieces"
    headings = ("method", "codec", "link", "TTFT s", "fastest", "slowest", "times faster", "MB")
    table = table_of(title, headings, texts=3)
    for one in found:
        label = f"{one['method']} {one['share']:.0%}" if 0 < one["share"] < 1 else one["method"]
        table.add_row(
            label, one["codec"], one["link"], f"{one['ttft_s']:.3f}", f"{one['fastest_s']:.3f}",
            f"{one['slowest_s']:.3f}", f"{one['times_faster']:.1f}", f"{one['bytes'] / 1e6:.2f}",
        )  # fmt: skip
    console.print(table)


def print_seconds(console: Console, seconds: Mapping[str, float]) -> None:
    """Where the time of the run went, most first."""
    ordered = sorted(seconds.items(), key=lambda one: -one[1])
    spent = ", ".join(f"{what} {took:.0f} s" for what, took in ordered if took >= 1)
    console.print(f"Time went to: {spent}", style="dim", highlight=False)


def plot(path: Path, rows: Sequence[BlendRow]) -> None:
    """KLD over the time to the first token: one panel for each set and each KLD. Ways that differ
    in how much is recomputed are joined by a line."""
    sets = list(dict.fromkeys(row.data for row in rows))
    with drawing(path) as pyplot:
        _, panels = pyplot.subplots(
            len(sets), 2, figsize=(12, 4.6 * len(sets)), squeeze=False, layout="constrained"
        )
        for line, data in zip(panels, sets, strict=True):
            own = [row for row in rows if row.data == data]
            for panel, field, title in zip(
                line, ("kld_first", "kld"), ("first token", "16 tokens"), strict=True
            ):
                _draw(panel, own, field)
                _dress(panel, f"{data}: {title}")
        handles, names = panels[0][0].get_legend_handles_labels()
        pyplot.gcf().legend(handles, names, loc="outside lower center", ncols=6, frameon=False)


def _draw(panel: Any, rows: Sequence[BlendRow], field: str) -> None:
    for method, codec in dict.fromkeys((row.method, row.codec) for row in rows):
        own = [row for row in rows if (row.method, row.codec) == (method, codec)]
        panel.plot(
            [row.ttft_s for row in own], [max(getattr(row, field), LEAST_KLD) for row in own],
            marker=_MARKS.get(codec, "x"), markersize=5, linewidth=1.2,
            linestyle="-" if codec == "exact" else (0, (3, 2)),
            color=_COLOURS.get(method, "#000000"), label=f"{method}, {codec}",
        )  # fmt: skip


def _dress(panel: Any, title: str) -> None:
    panel.set_yscale("log")
    panel.set_title(title, fontsize=10, loc="left")
    panel.set_xlabel("seconds to the first token")
    panel.set_ylabel("KLD (nats)")
    panel.set_xlim(left=0)
    panel.grid(color="#e3e3e3", linewidth=0.7, zorder=0)
    panel.spines[["top", "right"]].set_visible(False)
