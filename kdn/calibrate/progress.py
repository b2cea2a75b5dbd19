"""Calibration's progress: a bar for each stage on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from kdn.calibrate.steps import Progress

EVERY_S = 20.0
"""Between two lines of one stage."""


@contextmanager
def bar(console: Console | None = None) -> Iterator[Progress]:
    """On a terminal a rich bar with one line per stage, and the time left of it; in a file or a
    pipe a line now and then."""
    from rich.console import Console

    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lines(console.print)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:>18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as shown:
        tasks = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, total=total)

        yield report


def lines(say: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> Progress:
    """A line when a stage begins, when it ends, and every EVERY_S between. The time left is
    reckoned from what this run did: a resumed one begins in the middle."""
    begun: dict[str, tuple[float, int]] = {}
    said: dict[str, float] = {}
    ended: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        now = clock()
        if stage in ended and done < total:  # it begins anew
            ended.remove(stage)
            del begun[stage], said[stage]
        since, first = begun.setdefault(stage, (now, done))
        is_news = stage not in said or done >= total or now - said[stage] >= EVERY_S
        if not is_news or stage in ended:
            return
        said[stage] = now
        left = ""
        if first < done < total:
            left = f", about {_duration((now - since) / (done - first) * (total - done))} left"
        elif done >= total:
            left = f", {_duration(now - since)}"
            ended.add(stage)
        say(f"{stage}: {done} of {total}{left}")

    return report


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
