"""Progress bars: of a delivery (chunks by level, bytes, rate, the time left as planned), and of a
model that reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kdn.delivery.request import OnProgress, Snapshot


@contextmanager
def bar(console: Console) -> Iterator[OnProgress]:
    """Draws what it is told, on a terminal only, and is gone afterwards."""
    columns = BarColumn(), TextColumn("{task.fields[state]}")
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as shown:
        task = shown.add_task("", total=1.0, visible=False, state="")

        def report(snapshot: Snapshot) -> None:
            told = describe(snapshot)
            shown.update(task, completed=share(snapshot), state=told, visible=True)

        yield report


@contextmanager
def reading_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """The same of tokens that are read."""
    columns = BarColumn(), TextColumn("{task.completed:,} of {task.total:,} tokens read")
    disable = not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=disable
    ) as shown:
        task = shown.add_task("", total=1, visible=False)

        def report(num_read: int, num_tokens: int) -> None:
            shown.update(task, completed=num_read, total=num_tokens, visible=True)

        yield report


def share(snapshot: Snapshot) -> float:
    """How much of the expected time has passed."""
    whole_s = snapshot.elapsed_s + snapshot.left_s
    return snapshot.elapsed_s / whole_s if whole_s > 0 else 1.0


def describe(snapshot: Snapshot) -> str:
    """As "12 at 3/6, 2 computed, 2 missing | 1.2 MB | 48 Mbit/s | 0.3 s left"."""
    counts = Counter(snapshot.levels)
    names = {-1: "computed", 0: "missing"}
    chunks = ", ".join(
        f"{counts[level]} {names.get(level, f'at {level}/{snapshot.num_levels}')}"
        for level in sorted(counts, reverse=True)
    )
    return (
        f"{chunks} | {snapshot.fetched_bytes / 1e6:.1f} MB | {snapshot.rate * 8e-6:.0f} Mbit/s"
        f" | {snapshot.left_s:.1f} s left"
    )
