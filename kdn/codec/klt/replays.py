"""Launches that are recorded once, as a CUDA graph, and then replayed in one.

A launch takes some ten microseconds of the interpreter's time, and one of Triton's several times
that. Beside an engine, whose own Python runs all the time, that is most of what decoding costs it.
Work that comes again and again in the same memory is recorded when it comes for the third time:
the first time it may compile, and take memory that it keeps; and many a cache is filled just once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

MAX_KNOWN = 256
RECORDED_TIME = 3


@dataclass
class _Known:
    memory: tuple[object, ...]
    """What the launches read and write: kept, so that nothing else gets its place."""
    times: int = 0
    graph: Any = None


class Replays:
    """For one thread at a time, in one stream. On a CPU nothing is recorded."""

    def __init__(self, device: torch.device) -> None:
        self.is_real = device.type == "cuda"
        self._known: dict[Hashable, _Known] = {}
        # One for all: nothing of what work takes for itself is needed when it is done.
        self._pool = _new_pool() if self.is_real else None
        self._was_spoilt = False

    def run(self, kind: Hashable, memory: tuple[object, ...], work: Callable[[], object]) -> None:
        """Do `work`, which only launches, in the current stream and others that it joins: always
        the same for work of this kind in this memory, which is all that it reads and writes beside
        what its owner has for good. It waits for nothing that was not in the current stream
        before."""
        if not self.is_real:
            work()
            return
        key = (kind, *map(id, memory))
        if key not in self._known and len(self._known) == MAX_KNOWN:
            self.forget()
        known = self._known.setdefault(key, _Known(memory))
        known.times += 1
        if known.times == RECORDED_TIME and not self._was_spoilt:
            known.graph = recorded(work, self._pool)
            # PyTorch may take the pool of a failed recording for one that still goes on. No other
            # is begun: what is launched one by one takes longer, and is right.
            self._was_spoilt = known.graph is None
        if known.graph is None:
            work()
        else:
            known.graph.replay()

    def forget(self) -> None:
        """Let all memory go, when what was replayed is done."""
        if any(one.graph is not None for one in self._known.values()):
            _wait()
            # A pool whose graphs are all gone takes no others.
            self._pool = _new_pool()
        self._known.clear()


def _new_pool() -> Any:
    return torch.cuda.graph_pool_handle()


def _wait() -> None:
    """For the current stream."""
    torch.cuda.current_stream().synchronize()


def recorded(work: Callable[[], object], pool: Any = None) -> Any:
    """A graph of what `work` launches in the current stream, with memory of a pool; None if that
    cannot be recorded. Nothing on the device is waited for, and other threads go on."""
    graph: Any = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    except RuntimeError as error:  # too little memory is one
        log.warning("launches could not be recorded, and take longer: %s", error)
        return None
    return graph
