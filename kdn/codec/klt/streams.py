"""CUDA streams of an owner's own; on a CPU, where Triton is interpreted, none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Event = Any  # torch.cuda.Event or None: its methods have no types


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Work in a new stream, for which nobody else's waits."""
    if device.type != "cuda":
        yield
        return
    make: Any = torch.cuda.Stream
    with torch.cuda.stream(make(device)):
        yield


class CudaStreams:
    """A main stream, one for copies, and a few beside whichever is current. What runs in them is
    joined again before it is used."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device, self._is_real = device, device.type == "cuda"
        make: Any = torch.cuda.Stream
        self._streams = [make(device) for _ in range(count)] if self._is_real else []
        self._main: Any = make(device) if self._is_real else None
        self._copying: Any = make(device) if self._is_real else None

    @contextmanager
    def main(self, after: Event = None) -> Iterator[None]:
        """Work in the main stream, after an event."""
        if not self._is_real:
            yield
            return
        if after is not None:
            self._main.wait_event(after)
        with torch.cuda.stream(self._main):
            yield

    @contextmanager
    def copying(self, after: Event = None) -> Iterator[None]:
        """Copies to the device beside all other work, after an event."""
        if not self._is_real:
            yield
            return
        if after is not None:
            self._copying.wait_event(after)
        with torch.cuda.stream(self._copying):
            yield

    @contextmanager
    def side(self, index: int, after: Event = None) -> Iterator[None]:
        """Work beside the current stream, after an event in it or what is in it by now."""
        if not self._is_real:
            yield
            return
        stream = self._streams[index]
        stream.wait_event(after or torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(stream):
            yield

    def join(self, index: int) -> None:
        """What follows in the current stream waits for that one."""
        if self._is_real:
            torch.cuda.current_stream(self._device).wait_stream(self._streams[index])

    def join_all(self) -> None:
        """The same, for all of them."""
        for index in range(len(self._streams)):
            self.join(index)

    def lend(self, tensor: torch.Tensor) -> None:
        """The current stream reads a tensor of another: its memory is kept until that is done."""
        if self._is_real:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def wait(self, event: Event) -> None:
        """What follows in the current stream waits for an event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def mark(self) -> Event:
        """This place in the current stream. Who waits for it on the host sleeps."""
        if not self._is_real:
            return None
        make: Any = torch.cuda.Event
        return torch.cuda.current_stream(self._device).record_event(make(blocking=True))
