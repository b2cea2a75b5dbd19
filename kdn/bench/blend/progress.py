"""How far the benchmark is: a bar on a terminal, lines elsewhere; and a line for each question."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.progress import Progress as Bars

from kdn.bench.progress import progress_bar


class Step:
    """A part of the work, of so many parts itself."""

    def __init__(self, bars: Bars, what: str, total: int) -> None:
        self._bars, self._what, self._total = bars, what, total
        self._task = bars.add_task(what, total=total)
        self._count, self._began_s = 0, time.perf_counter()

    def done(self, told: str) -> None:
        """One more."""
        self._count += 1
        self._bars.advance(self._task)
        passed_s = time.perf_counter() - self._began_s
        self.say(f"{self._count}/{self._total}, {passed_s:.0f} s: {told}")

    def part(self, share: float) -> None:
        """So much of it is done."""
        self._bars.update(self._task, completed=share * self._total)

    def say(self, told: str) -> None:
        """On a terminal above the bars, where it scrolls away."""
        self._bars.console.print(f"{self._what} {told}", highlight=False, markup=False)


class Progress:
    """On stderr: stdout is for the report."""

    def __init__(self) -> None:
        self._bars = progress_bar()

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    @contextmanager
    def of(self, what: str, total: int) -> Iterator[Step]:
        step = Step(self._bars, what, total)
        yield step
