"""What `kdn demo --blend` shows: a bar for each way to answer, and a table of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kdn.cli.demo_show import LiveScreen, Side, note

LABELS = {
    "joined": "joined",
    "looked": "joined, 15 % computed anew",
    "repaired": "with seams",
    "both": "with seams, 15 % computed anew",
    "read": "read in full",
}


class Screen(LiveScreen):
    """Takes events, and draws."""

    def __init__(self, console: Console, question: str, mbit: float) -> None:
        super().__init__(console)
        self.question, self.mbit = question, mbit
        self.sides: dict[str, Side] = {}
        self.klds: dict[str, tuple[float, float]] = {}
        """By way: at the first token of the answer, and over all of it."""
        self.documents: list[dict[str, Any]] = []

    def learned(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "learned":
            self.documents.append(dict(event))
            self._draw()

    def answered(self, event: Mapping[str, Any]) -> None:
        way = event["way"]
        if event["event"] == "kld":
            self.klds[way] = (event["first"], event["mean"])
        elif way in LABELS:
            note(self.sides.setdefault(way, Side()), event)
            self.say(f"Process B answers: {LABELS[way]}")

    def _draw(self) -> None:
        parts: list[RenderableType] = [Text(self._said, style="bold")]
        if self.documents:
            parts.append(Text(told(self.documents), style="dim"))
        parts.append(Panel(self._grid(), title=self.question, title_align="left"))
        self._live.update(Group(*parts))

    def _grid(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for width in (30, 20, 8):
            grid.add_column(width=width)
        grid.add_column()
        for way, side in self.sides.items():
            ttft = f"{side.ttft_s:.2f} s" if side.stats else ""
            bar = ProgressBar(total=1.0, completed=side.share)
            grid.add_row(LABELS[way], bar, ttft, Text(side.text.replace("\n", " ")[:160]))
        return grid


def told(documents: list[dict[str, Any]]) -> str:
    names = ", ".join(f"{one['name']} ({one['num_tokens']:,} tokens)" for one in documents)
    return f"Process A learned each by itself: {names}"


def report(screen: Screen) -> Group:
    """All that was measured."""
    table = Table(title=f"Time to first token, over {screen.mbit:g} Mbit/s")
    headings = ("way", "first token", "faster", "moved", "computed", "KLD first", "KLD of answer")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "way" else "right")
    whole = screen.sides["read"]
    notes: list[RenderableType] = [Text(told(screen.documents)), table]
    for way, side in screen.sides.items():
        klds = screen.klds.get(way)
        table.add_row(
            LABELS[way],
            f"{side.ttft_s:.2f} s",
            f"{whole.ttft_s / side.ttft_s:.1f}x",
            f"{side.stats['fetched_bytes'] / 1e6:.2f} MB",
            f"{side.stats['computed_tokens']:,} of {side.stats['prompt_tokens']:,}",
            *(("", "") if klds is None else (f"{one:.4f}" for one in klds)),
        )
    notes.append(Text(f"\n{screen.question}", style="bold"))
    notes += [Text(f"  {LABELS[way]}: {side.text.strip()}") for way, side in screen.sides.items()]
    if "repaired" not in screen.sides:
        notes.append(Text("\nNo seams are known for this model here: `kdn seams` fits some."))
    return Group(*notes)
