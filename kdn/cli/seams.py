"""`kdn seams`: fits what repairs joins of a kind of text, and says what it is worth."""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from kdn.bench.blend.items import MAX_PIECES, load_items
from kdn.checked import MAX_COUNT, checked_name, checked_output
from kdn.cli.client import Door, read_text, run_with

if TYPE_CHECKING:
    from kdn.blend.seams import Intervals, Seams
    from kdn.client.asynchronous import AsyncClient
    from kdn.client.fitting import Asked

QUESTION_SETS = (".jsonl", ".jsonl.gz")


@dataclass
class Material:
    """What seams are fitted on and measured by."""

    names: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    examples: list[Asked] = field(default_factory=list)

    @classmethod
    def of(cls, what: list[str]) -> Material:
        """Each a file, if there is one that is called so, else a name. JSON lines of a question
        and its passages are examples."""
        found = cls()
        for one in what:
            if not os.path.isfile(one):  # says no to whatever can be no path
                found.names.append(checked_name(one))
            elif one.endswith(QUESTION_SETS):
                items = load_items(Path(one), MAX_COUNT, MAX_PIECES)
                found.examples += ((item.question, item.pieces) for item in items)
            else:
                found.texts.append(read_text(Path(one)))
        return found


def run(door: Door, what: list[str], tag: str, out: Path | None) -> None:
    material = Material.of(what)
    if out is not None:
        checked_output(out)

    async def work(client: AsyncClient) -> None:
        with progress(Console(stderr=True)) as tell:
            seams = await client.seams(
                material.names, texts=material.texts, examples=material.examples, tag=tag,
                on_progress=tell,
            )  # fmt: skip
        show(seams, tag)
        if out is not None:
            out.write_text(json.dumps(report(seams, tag), indent=2) + "\n")

    run_with(door, work)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, float, float], None]]:
    """A bar with what is being done and the time left, on a terminal only."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task("reading joins", total=1.0, left="")

        def tell(what: str, done: float, left_s: float) -> None:
            bar.update(task, description=what, completed=done, left=f"{left_s:.0f} s left")

        yield tell


def report(seams: Seams, tag: str) -> dict[str, Any]:
    """For programs. Intervals are null where there were too few questions to tell."""
    rows = [_row("join", 0.0, seams.joined, seams.joined_intervals)]
    for share, klds in sorted(seams.expected.items()):
        method = "seams+question" if share else "seams"
        rows.append(_row(method, share, klds, seams.intervals.get(share)))
    return {"model": seams.model.hex(), "tag": tag, "bytes": len(seams.to_bytes()), "rows": rows}


def _row(
    method: str, share: float, klds: tuple[float, float] | None, intervals: Intervals | None
) -> dict[str, Any]:
    (first, mean), (first_in, mean_in) = klds or (None, None), intervals or (None, None)
    return {
        "method": method, "share": share, "kld_first": first, "kld_first_interval": first_in,
        "kld": mean, "kld_interval": mean_in,
    }  # fmt: skip


def show(seams: Seams, tag: str) -> None:
    told = report(seams, tag)
    table = Table("", "KLD, first token", "KLD, 16 tokens")
    for row in told["rows"]:
        name = f"{row['method']}, {row['share']:.0%} recomputed" if row["share"] else row["method"]
        first, mean = (_shown(row[key], row[f"{key}_interval"]) for key in ("kld_first", "kld"))
        table.add_row(name, first, mean)
    console = Console(highlight=False)
    console.print(table)
    if any(row["kld_interval"] is None for row in told["rows"]):
        console.print("with more questions, the report would say how sure it is")
    else:
        console.print("in brackets: 90 % intervals of these means")
    called = f"the tag {tag!r}" if tag else "no tag"
    console.print(f"seams of {told['bytes'] / 1e6:.1f} MB, stored under {called}", markup=False)


def _shown(kld: float, interval: tuple[float, float] | None) -> str:
    sure = "" if interval is None else f" ({interval[0]:.2g} to {interval[1]:.2g})"
    return f"{kld:.4f}{sure}"
