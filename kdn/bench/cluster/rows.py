"""What was measured, row by row: told at once, and saved at once, so that a run that is ended early
leaves what it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from kdn.bench.cluster.plan import Plan
from kdn.bench.report import write_json

Row = dict[str, Any]


class Rows:
    def __init__(self, facts: Row, console: Console, json_file: Path | None = None) -> None:
        self.facts, self.rows = facts, list[Row]()
        self._console, self._file = console, json_file

    def add(self, part: str, what: str, **figures: Any) -> Row:
        row = {"part": part, "what": what, **figures}
        self.rows.append(row)
        self.say(f"{what}: {', '.join(f'{k} {shown(v)}' for k, v in figures.items())}")
        self.save({})
        return row

    def say(self, line: str) -> None:
        """What goes on just now."""
        self._console.print(line, highlight=False, soft_wrap=True)

    def save(self, figures: Row) -> None:
        if self._file is not None:
            write_json(self._file, {**figures, **self.facts, "rows": self.rows})

    def skip(self, what: str, why: Exception) -> None:
        """Something is not installed: the report says so."""
        self.facts["notes"] = [*self.facts.get("notes", []), f"{what} is left out: {why}"]
        self.say(self.facts["notes"][-1])

    def of(self, what: str) -> list[Row]:
        return [row for row in self.rows if row["what"] == what]


class Run:
    """One run of the benchmark: what all its parts share."""

    def __init__(self, plan: Plan, rows: Rows, seed: int, root: Path) -> None:
        self.plan, self.rows, self.seed = plan, rows, seed
        self._root, self._number = root, 0

    def folder(self, name: str) -> Path:
        """A new one."""
        self._number += 1
        path = self._root / f"{self._number}-{name}"
        path.mkdir()
        return path


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
