"""What `kdn demo` shows: bars while it runs, and a table of what was measured."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

WAYS = ("with", "without")


@dataclass
class Side:
    """One question answered in one way, as far as it is told."""

    share: float = 0.0
    """Of the context, in the cache."""
    text: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    trace: list[tuple[float, float, int]] = field(default_factory=list)
    """(seconds, share, bytes fetched)."""
    text_s: list[float] = field(default_factory=list)
    delivered_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return float(self.stats.get("ttft_s", 0.0))

    @property
    def first_sentence(self) -> str:
        """Up to its full stop; all of it if there is none."""
        return re.split(r"(?<=[.!?])\s", self.text.strip(), maxsplit=1)[0]


class LiveScreen(ABC):
    """A terminal that shows how far something got; elsewhere, lines of a log."""

    def __init__(self, console: Console) -> None:
        self._said = ""
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        if text != self._said and not self._console.is_terminal:
            self._console.print(text, highlight=False)  # a log shows how far it got
        self._said = text
        self._draw()

    @abstractmethod
    def _draw(self) -> None: ...


class Screen(LiveScreen):
    """Takes events, and draws."""

    def __init__(self, console: Console, questions: Sequence[str], mbit: float) -> None:
        super().__init__(console)
        self.questions, self.mbit = questions, mbit
        self.sides = {(n, way): Side() for n in range(len(questions)) for way in WAYS}
        self.learn: dict[str, Any] = {}
        self.reading = ""
        """How far process A has read."""
        self.klds: dict[int, float] = {}
        self.kld_tokens = 0

    def learned(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "learned":
            self.learn = dict(event)
        elif event["event"] == "read":
            self.reading = f"{event['num_read']:,} of {event['num_tokens']:,} tokens read"
            self._draw()

    def answered(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "kld":
            self.klds[event["question"]] = event["mean"]
            self.kld_tokens += event["tokens"]
        side = self.sides.get((event["question"], event["way"]))
        if side is not None:
            note(side, event)
            way = "with kdn" if event["way"] == "with" else "by reading it all"
            self.say(f"Process B answers question {event['question'] + 1} {way}")

    def _draw(self) -> None:
        parts: list[RenderableType] = [Text(self._said, style="bold")]
        if self.learn or self.reading:
            told = _learned(self.learn) if self.learn else self.reading
            parts.append(Text(told, style="dim"))
        for number, question in enumerate(self.questions):
            parts.append(Panel(self._question(number), title=question, title_align="left"))
        self._live.update(Group(*parts))

    def _question(self, number: int) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=12)
        grid.add_column(width=24)
        grid.add_column(width=12, justify="right")
        grid.add_column()
        for way in WAYS:
            side = self.sides[number, way]
            ttft = f"{side.ttft_s:.2f} s" if side.stats else ""
            shown = Text(side.text.replace("\n", " ")[:160])
            label = "with kdn" if way == "with" else "without"
            grid.add_row(label, ProgressBar(total=1.0, completed=side.share), ttft, shown)
        return grid


def note(side: Side, event: Mapping[str, Any]) -> None:
    kind, at_s = event["event"], float(event["at_s"])
    if kind == "progress":
        side.share = float(event["share"])
        side.trace.append((at_s, side.share, int(event["fetched_bytes"])))
    elif kind == "delivered":
        side.delivered_s = at_s
    elif kind == "text":
        side.text += event["text"]
        side.text_s.append(at_s)
    elif kind == "done":
        side.share, side.stats = 1.0, dict(event)


def _learned(learn: Mapping[str, Any]) -> str:
    return (
        f"Process A read {learn['num_tokens']:,} tokens and published {learn['new_chunks']} chunks "
        f"in {learn['seconds']:.1f} s: {learn['stored_bytes'] / 1e6:.1f} MB with all levels, "
        f"{learn['fp16_bytes'] / 1e6:.0f} MB as fp16"
    )


def report(screen: Screen) -> Group:
    """All that was measured."""
    table = Table(title=f"Time to first token, over {screen.mbit:g} Mbit/s")
    for heading in ("question", "without kdn", "with kdn", "faster", "moved", "of fp16", "KLD"):
        table.add_column(heading, justify="left" if heading == "question" else "right")
    notes: list[RenderableType] = [Text(_learned(screen.learn)), table]
    for number, question in enumerate(screen.questions):
        own, known = screen.sides[number, "without"], screen.sides[number, "with"]
        moved = int(known.stats["fetched_bytes"])
        table.add_row(
            question,
            f"{own.ttft_s:.2f} s",
            f"{known.ttft_s:.2f} s",
            f"{own.ttft_s / known.ttft_s:.1f}x",
            f"{moved / 1e6:.2f} MB",
            f"1/{screen.learn['fp16_bytes'] / max(1, moved):.0f}",
            f"{screen.klds[number]:.4f}",
        )
        notes += _answers(question, own, known)
    known = screen.sides[0, "with"]
    tokens = f"{known.stats['known_tokens']:,} known, {known.stats['computed_tokens']:,} read"
    notes.append(
        Text(f"Tokens of a prompt with kdn: {tokens}. KLD over {screen.kld_tokens} tokens.")
    )
    return Group(*notes)


def _answers(question: str, own: Side, known: Side) -> list[RenderableType]:
    same = own.first_sentence == known.first_sentence
    verdict = "the same first sentence" if same else "the first sentences differ"
    style = "green" if same else "yellow"
    return [
        Text(f"\n{question} ({verdict})", style=style),
        Text(f"  without: {own.text.strip()}"),
        Text(f"  with:    {known.text.strip()}"),
    ]
