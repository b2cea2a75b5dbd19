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
    from kdn.blend.seams import Seams
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
    """For programs."""
    joined = seams.joined or (None, None)
    rows: list[dict[str, Any]] = [
        {"method": "join", "share": 0.0, "kld_first": joined[0], "kld": joined[1]}
    ]
    for share, (first, mean) in sorted(seams.expected.items()):
        method = "seams+question" if share else "seams"
        rows.append({"method": method, "share": share, "kld_first": first, "kld": mean})
    return {"model": seams.model.hex(), "tag": tag, "bytes": len(seams.to_bytes()), "rows": rows}


def show(seams: Seams, tag: str) -> None:
    told = report(seams, tag)
    table = Table("", "KLD, first token", "KLD, 16 tokens")
    for row in told["rows"]:
        name = f"{row['method']}, {row['share']:.0%} recomputed" if row["share"] else row["method"]
        table.add_row(name, f"{row['kld_first']:.4f}", f"{row['kld']:.4f}")
    console = Console(highlight=False)
    console.print(table)
    called = f"the tag {tag!r}" if tag else "no tag"
    console.print(f"seams of {told['bytes'] / 1e6:.1f} MB, stored under {called}", markup=False)
