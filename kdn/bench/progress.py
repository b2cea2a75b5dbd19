"""How far a benchmark is: a bar on a terminal, plain lines every 20 s elsewhere.

Lines come from a thread, so a single step that takes minutes is not silent, either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID, TimeElapsedColumn

from kdn.calibrate.progress import EVERY_S, lines

LOOK_S = 1.0
"""Between two looks at whether a line is due."""


def progress_bar() -> Progress:
    """On stderr: stdout is for the report."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return ProgressLines(Console(stderr=True, soft_wrap=True, highlight=False))
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    return Progress(*columns, console=console)


class ProgressLines(Progress):
    """Says in a line when a task begins and ends, and every EVERY_S in between how far it is and
    how long the rest will take."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console=console, auto_refresh=False, disable=True)
        self._alone = Lock()  # guards what has been said
        self._ended: set[TaskID] = set()
        self._say = lines(lambda line: console.print(line, markup=False), clock)
        self._stopped = Event()
        self._teller: Thread | None = None

    def start(self) -> None:
        self._stopped.clear()
        self._teller = Thread(target=self._tell, name="kdn-progress", daemon=True)
        self._teller.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._teller is not None:
            self._teller.join()
            self._teller = None

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        task = super().add_task(description, *args, **options)
        self.look()
        return task

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self.look()

    def look(self) -> None:
        """Say what is due."""
        with self._alone:
            for task in self.tasks:
                if task.total is None or task.id in self._ended:
                    continue
                self._say(task.description, int(task.completed), int(task.total))
                if task.finished:
                    self._ended.add(task.id)

    def _tell(self) -> None:
        while not self._stopped.wait(min(LOOK_S, EVERY_S)):
            self.look()
