"""Timing on a CUDA device: events, and calls replayed as a graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def cuda_ms(fn: Callable[[], object], repeat: int = 7, warmup: int = 2) -> float:
    """Median of event times."""
    for _ in range(warmup):
        fn()
    marks = [[cuda_event() for _ in range(2)] for _ in range(repeat)]
    for begin, end in marks:
        begin.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in marks))


def cuda_event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def replayed(fn: Callable[[], object]) -> Callable[[], None]:
    """The same as a CUDA graph: launches cost the host nothing."""
    make: Any = torch.cuda.Stream
    side = make()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    replay: Callable[[], None] = graph.replay
    return replay
