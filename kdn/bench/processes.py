"""The same work on many things, in as many processes as there are cores, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from kdn.bench.progress import progress_bar

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_processes(
    work: Callable[[Given], Made], todo: Sequence[Given], jobs: int, description: str
) -> list[Made]:
    """What `work` makes of each, in their order. `jobs` 0: a process per core."""
    with progress_bar() as progress:
        made = _made(work, todo, min(jobs or os.cpu_count() or 1, len(todo)))
        return list(progress.track(made, len(todo), description=description))


def _made(work: Callable[[Given], Made], todo: Sequence[Given], workers: int) -> Iterator[Made]:
    if workers == 1:
        yield from map(work, todo)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, todo)
