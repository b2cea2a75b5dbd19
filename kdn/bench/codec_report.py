"""How `kdn bench codec` is told: tables, JSON, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kdn.bench.figures import CodecRow, Comparison, by_codec, compare, ratio_at_quality
from kdn.bench.report import drawing, table_of
from kdn.calibrate.ratios import KLD_LIMIT, RECALL_LIMIT

# Colour-blind safe, in the order of the codecs' names below.
_COLOURS = {
    "klt": "#d1495b",
    "kvtc": "#2e6f95",
    "kvtc-nowindow": "#5fa8d3",
    "cachegen": "#3f7d20",
    "cachegen-shipped": "#9bc53d",
    "int8": "#6c757d",
    "drop": "#e09f3e",
}
_SPARE_COLOURS = ("#7b2d8b", "#1b1b1e", "#a0522d")
_HEADINGS = (
    "level", "bytes", "bits/\nvalue", "ratio", "KLD", "KLD\np99", "recall\nKLD", "top-1", "ppl",
    "encode\ns", "decode\ns", "prefill/\ndecode",
)  # fmt: skip
_LOSSLESS = ("fp16", "exact")


def document(rows: Sequence[CodecRow], extra: dict[str, Any]) -> dict[str, Any]:
    """Everything, as it goes to JSON."""
    return {
        "rows": [asdict(row) for row in rows],
        "ratio_at_quality": ratio_at_quality(rows),
        "at_klt_quality": [asdict(comparison) for comparison in compare(rows)],
        **extra,
    }


def row_line(row: CodecRow, label: str) -> str:
    """One row while the benchmark still runs."""
    return (
        f"{row.text}  {row.codec} {label}: {row.ratio:.1f} times smaller, KLD {row.kld:.5f}, "
        f"recall {row.recall_kld:.5f}"
    )


def print_report(console: Console, rows: Sequence[CodecRow], extra: dict[str, Any]) -> None:
    labels = extra["levels"]
    for text in dict.fromkeys(row.text for row in rows):
        console.print(_rows_table([row for row in rows if row.text == text], labels, text))
    console.print(_headline_table(rows))
    comparisons = compare(rows)
    if comparisons:
        console.print(_comparison_table(comparisons))
    learnt = extra["calibration"]
    console.print(f"kvtc and cachegen: {learnt['tokens']:,} tokens of {', '.join(learnt['texts'])}")
    console.print("; ".join(f"{name} {value}" for name, value in extra["hardware"].items()))


def _rows_table(rows: Sequence[CodecRow], labels: dict[str, tuple[str, ...]], text: str) -> Table:
    title = f"{text} (prefill {rows[0].prefill_s:.2f} s)"
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("codec", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        if previous and row.codec != previous:
            table.add_section()
        table.add_row(
            row.codec if row.codec != previous else "",
            labels[row.codec][row.level],
            f"{row.bytes:,.0f}",
            f"{row.bits_per_value:.3f}",
            f"{row.ratio:.2f}",
            f"{row.kld:.5f}",
            f"{row.kld_p99:.4f}",
            f"{row.recall_kld:.5f}",
            f"{row.top1:.3f}",
            f"{row.ppl:.2f}",
            f"{row.encode_s:.3f}",
            f"{row.decode_s:.3f}",
            f"{row.prefill_s / max(row.decode_s, 1e-6):.0f}",
        )
        previous = row.codec
    return table


def _headline_table(rows: Sequence[CodecRow]) -> Table:
    title = f"Ratio at quality: continuation KLD {KLD_LIMIT:g}, recall KLD {RECALL_LIMIT:g}"
    texts = list(dict.fromkeys(row.text for row in rows))
    table = table_of(title, ["codec", *texts])
    for codec, ratios in ratio_at_quality(rows).items():
        table.add_row(codec, *(f"{ratios[t]:.2f}" if t in ratios else "" for t in texts))
    return table


def _comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """How many times smaller klt is than each rival that is at least as good."""
    rivals = [r for r in dict.fromkeys(c.rival for c in comparisons) if r not in _LOSSLESS]
    table = Table(
        title="klt is so many times smaller at equal quality",
        caption="-: the rival is never that good. <: it has no coarser level to compare with.",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("text", "klt level", *rivals):
        table.add_column(heading, justify="right" if heading in rivals else "left")
    for text, level in dict.fromkeys((c.text, c.level) for c in comparisons):
        cells = {c.rival: c for c in comparisons if (c.text, c.level) == (text, level)}
        shown = []
        for rival in rivals:
            cell = cells.get(rival)
            if cell is None or cell.factor is None:
                shown.append("-")
            else:
                shown.append(f"{'< ' if cell.at_coarsest else ''}{cell.factor:.1f}")
        table.add_row(text, str(level), *shown)
    return table


def plot(path: Path, rows: Sequence[CodecRow]) -> None:
    """Divergence over compression, a row of panels per text: continuation and recall."""
    with drawing(path) as pyplot:
        texts = list(dict.fromkeys(row.text for row in rows))
        figure, panels = pyplot.subplots(
            len(texts), 2, figsize=(11, 0.9 + 3.6 * len(texts)), squeeze=False, sharex=True,
            layout="constrained",
        )  # fmt: skip
        lossy = {c: g for c, g in by_codec(rows).items() if c not in _LOSSLESS}
        spare = iter(_SPARE_COLOURS * len(lossy))
        colours = {codec: _COLOURS.get(codec) or next(spare) for codec in lossy}
        for line, text in zip(panels, texts, strict=True):
            tasks = ("kld", "continuation", KLD_LIMIT), ("recall_kld", "recall", RECALL_LIMIT)
            for panel, (field, task, limit) in zip(line, tasks, strict=True):
                for codec, groups in lossy.items():
                    _curve(panel, groups.get(text, []), field, colours[codec], codec)
                _dress(panel, f"{text}: {task}", limit)
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower center", ncols=min(7, len(names)), frameon=False
        )
        for panel in panels[-1]:
            panel.set_xlabel("times smaller than fp16")


def _curve(panel: Any, rows: Sequence[CodecRow], field: str, colour: str, codec: str) -> None:
    ordered = sorted(rows, key=lambda row: row.ratio)
    panel.plot(
        [row.ratio for row in ordered],
        [max(getattr(row, field), 1e-6) for row in ordered],
        marker="o",
        markersize=4.5 if codec != "klt" else 6,
        linewidth=1.6 if codec != "klt" else 2.6,
        color=colour,
        label=codec,
        zorder=3 if codec == "klt" else 2,
    )


def _dress(panel: Any, title: str, limit: float) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_title(title, fontsize=10, loc="left")
    panel.set_ylabel("KLD (nats per token)")
    panel.axhline(limit, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    panel.annotate(
        f"limit {limit:g}", (1, limit), xycoords=("axes fraction", "data"), xytext=(-4, 3),
        textcoords="offset points", ha="right", fontsize=8, color="#444444",
    )  # fmt: skip
    low, high = panel.get_xlim()
    ticks = [2**i for i in range(-3, 13) if low <= 2**i <= high]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.grid(color="#e3e3e3", linewidth=0.7, zorder=0)
    panel.spines[["top", "right"]].set_visible(False)
