"""CUDA streams beside the current one; on a CPU, where Triton is interpreted, none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Streams:
    """A few streams of one device. What runs in them is joined again before it is used."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._is_real = device.type == "cuda"
        make: Any = torch.cuda.Stream
        self._streams = [make(device) for _ in range(count)] if self._is_real else []

    @contextmanager
    def side(self, index: int, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Work beside the current stream, after an event in it or what is in it by now."""
        if not self._is_real:
            yield
            return
        stream = self._streams[index]
        stream.wait_event(after or torch.cuda.current_stream().record_event())
        with torch.cuda.stream(stream):
            yield

    def join(self, index: int) -> None:
        """What follows in the current stream waits for that one."""
        if self._is_real:
            torch.cuda.current_stream().wait_stream(self._streams[index])

    def mark(self) -> torch.cuda.Event | None:
        """This place in the current stream."""
        return torch.cuda.current_stream().record_event() if self._is_real else None
