"""One small thread pool for all codecs: sections are independent, kernels release the GIL.

Each thread computes alone, torch's products included: two threads that each do a product use two
cores better than two products shared by two threads, and torch's own threads, which wait for more
work by spinning, would take the cores from these.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock = threading.Lock()  # guards _pool
_pool: ThreadPoolExecutor | None = None
_worker = threading.local()


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parallel_map(fn: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`[fn(item) for item in items]` on all cores; raises what the first failing item raised.

    Nothing runs on after it has returned or raised: the memory that `fn` writes to is the caller's
    again. A call from within a worker runs in place: waiting there for the same pool could never
    end.
    """
    todo = list(items)
    if len(todo) < 2:
        return [fn(item) for item in todo]
    return begin_parallel([partial(fn, item) for item in todo])()


def begin_parallel(works: Sequence[Callable[[], Result]]) -> Callable[[], list[Result]]:
    """Begins all of them; what is returned waits for them and returns what they did, or raises what
    the first failing one raised, when all have ended. It must be called: until then, memory that
    they write to is theirs."""
    if num_cores() < 2 or getattr(_worker, "busy", False):
        found = [work() for work in works]
        return lambda: found
    pool = _shared_pool()
    futures = [pool.submit(work) for work in works]

    def finish() -> list[Result]:
        wait(futures)
        return [future.result() for future in futures]

    return finish


def parallel_call(
    first: Callable[[], Item], *others: Callable[[], Result]
) -> tuple[Item, list[Result]]:
    """What each of them returns, all run as `parallel_map` does."""
    found: list[Any] = parallel_map(lambda fn: fn(), [first, *others])
    return found[0], found[1:]


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = _start_pool(num_cores())
        return _pool


def _start_pool(size: int) -> ThreadPoolExecutor:
    # A thread's number of torch threads is its own once it has asked for it; what it sets is also
    # what new threads begin with. So all workers are started at once, and that is set back.
    ready, before = threading.Barrier(size + 1), torch.get_num_threads()

    def start() -> None:
        _worker.busy = True
        torch.set_num_threads(1)
        torch.get_num_threads()
        ready.wait()

    pool = ThreadPoolExecutor(size, "kdn-codec", initializer=start)
    for _ in range(size):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(before)
    return pool


def _forget_pool() -> None:
    """A forked child has the pool object but none of its threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
