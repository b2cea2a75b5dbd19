"""How `kdn bench ttft` is told: a table, JSON, a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kdn.bench.report import drawing, table_of

_COLOURS = {
    "text": "#6c757d", "fp16": "#8d99ae", "int8": "#2e6f95", "cachegen": "#3f7d20", "klt": "#d1495b"
}  # fmt: skip


@dataclass(frozen=True)
class TtftRow:
    """One way over one link. `stopped`: it took longer than anyone would wait, and was ended."""

    link: str
    way: str
    ttft_s: float
    least_s: float
    most_s: float
    text_s: float
    """What reading the text took, in the same minute."""
    kld: float = float("nan")
    recall_kld: float = float("nan")
    same_answer: bool = False
    num_bytes: int = 0
    levels: tuple[int, ...] = ()
    computed: int = 0
    """Chunks the model read meanwhile."""
    stopped: bool = False

    @property
    def speedup(self) -> float:
        return self.text_s / self.ttft_s


def document(rows: Sequence[TtftRow], extra: dict[str, Any]) -> dict[str, Any]:
    lines = [{**asdict(row), "speedup": row.speedup} for row in rows]
    for line in lines:
        if line["stopped"]:
            line |= {"kld": None, "recall_kld": None, "same_answer": None}
    return {**extra, "rows": lines}


def print_report(console: Console, rows: Sequence[TtftRow], extra: dict[str, Any]) -> None:
    settings = extra["settings"]
    title = f"Time to first token, {settings['context']} tokens of {settings['text']}"
    figures = ("seconds", "spread", "speedup", "MB", "KLD", "recall", "same\nanswer")
    table = table_of(title, ["link", "way", *figures], texts=2)
    table.add_column("chunks")
    for row in rows:
        table.add_row(*_cells(row), end_section=row.way == "klt")
    console.print(table)
    console.print(
        "speedup: against the model reading the text, timed just before. KLD: nats per token of "
        "the text that follows; recall: of passages from far back. Chunks: levels x number; "
        f"'read': by the model meanwhile. The exact answer: {extra['answer'].strip()!r}"
    )
    facts = extra["hardware"]
    console.print(", ".join(str(value) for value in facts.values()), style="dim")


def _cells(row: TtftRow) -> list[str]:
    if row.stopped:
        return [row.link, row.way, f"> {row.ttft_s:.1f}", "", f"< {row.speedup:.2f}x"]
    spread = "" if row.least_s == row.most_s else f"{row.least_s:.2f} to {row.most_s:.2f}"
    cells = [row.link, row.way, f"{row.ttft_s:.2f}", spread, f"{row.speedup:.2f}x"]
    if row.way == "text":
        return cells
    cells += [f"{row.num_bytes / 1e6:.2f}", f"{row.kld:.4f}", f"{row.recall_kld:.4f}"]
    return [*cells, "yes" if row.same_answer else "no", _chunks(row)]


def _chunks(row: TtftRow) -> str:
    counts = Counter(level for level in row.levels if level)
    parts = [f"{level} x {count}" for level, count in sorted(counts.items())]
    return ", ".join([f"read {row.computed}"] * bool(row.computed) + parts)


def plot(path: Path, rows: Sequence[TtftRow]) -> None:
    """Seconds by link, a bar for each way."""
    with drawing(path) as pyplot:
        links = list(dict.fromkeys(row.link for row in rows))
        ways = list(dict.fromkeys(row.way for row in rows))
        width = 0.8 / len(ways)
        figure, panel = pyplot.subplots(figsize=(2 + 1.4 * len(links), 4), layout="constrained")
        for number, way in enumerate(ways):
            mine = [row for row in rows if row.way == way]
            at = [links.index(row.link) + (number - len(ways) / 2 + 0.5) * width for row in mine]
            bars = panel.bar(
                at, [row.ttft_s for row in mine], width, color=_COLOURS.get(way), label=way
            )
            for bar, row in zip(bars, mine, strict=True):
                if row.stopped:
                    bar.set_hatch("///")
                    bar.set_edgecolor("white")
        panel.set_yscale("log")
        panel.set_ylabel("seconds to the first token")
        panel.set_xticks(
            range(len(links)), [name.replace("_", "\n", 2) for name in links], fontsize=8
        )
        title = "hatched: stopped, it would have taken longer"
        figure.legend(loc="outside upper center", ncols=len(ways), fontsize=8, title=title)
        panel.spines[["top", "right"]].set_visible(False)
