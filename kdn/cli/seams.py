"""`kdn seams`: fits what repairs joins of a kind of text, and says what it is worth."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from kdn.checked import checked_name, checked_output, checked_text, shown
from kdn.cli.client import Door, read_text, run_with
from kdn.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from kdn.blend.seams import Seams
    from kdn.client.asynchronous import AsyncClient
    from kdn.client.fitting import Asked

QUESTION_SETS = (".jsonl", ".jsonl.gz")
MAX_SET_BYTES = 256 << 20


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
            path = Path(one)
            if one.endswith(QUESTION_SETS) and path.is_file():
                found._add_set(path)
            elif path.is_file():
                found.texts.append(read_text(path))
            else:
                found.names.append(checked_name(one))
        if not what:
            raise UnsupportedError("expected names or files to fit seams on, found none")
        return found

    def _add_set(self, path: Path) -> None:
        try:
            for line in _lines(path):
                row = json.loads(line)
                question = checked_text("question", row["question"])
                self.examples.append((question, [_passage(chunk) for chunk in row["chunks"]]))
        except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise FormatError(
                f"{shown(str(path))}: expected JSON lines of a question and its chunks: {error}"
            ) from error


def _passage(chunk: Any) -> str:
    text, title = checked_text("text", chunk["text"]), chunk.get("title")
    return f"{checked_text('title', title)}\n{text}" if title else text


def _lines(path: Path) -> list[str]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        data = file.read(MAX_SET_BYTES + 1)
    if len(data) > MAX_SET_BYTES:
        raise ValueError(f"expected at most {MAX_SET_BYTES} bytes")
    return [line for line in data.decode().splitlines() if line.strip()]


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
