"""Memory that a GPU decoder takes once and uses over and over: scratch on the device, and buffers
through which streams go there. Plain torch.

**Order.** All decoding of a decoder runs in one stream, its main one, batch after batch, so scratch
needs no guard: a batch's first launch comes after the last one of the batch before. Streams travel
in a second stream, so that the next batch is copied while this one is decoded. A buffer is guarded
by two events: its host half is free when its copy is `copied`, its device half when what was copied
is `used`. On a CPU, where Triton is interpreted, there are no streams and nothing is waited for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.codec.klt.streams import CudaStreams, Event

ALIGNMENT = 256
SLAB_CHUNKS = 32
INPUT_BYTES = 64 << 20
"""Size of each buffer: a batch of chunks of an 8B model has 41 MB in three levels.
torch takes pinned memory in powers of two."""


class Scratch:
    """Tensors carved one after the other out of one allocation."""

    def __init__(self, device: torch.device) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8, device=device)
        self.times_moved = 0
        """Since when recorded launches read and write memory that is not its own any more."""

    @property
    def size_bytes(self) -> int:
        return len(self._arena)

    def carve(self, size_bytes: int) -> Carving:
        """So much from its beginning, again: what was carved before is overwritten. It grows to the
        most that was asked for."""
        if size_bytes > len(self._arena):
            self.times_moved += 1
            device, self._arena = self._arena.device, self._arena[:0].clone()
            self._arena = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return Carving(self._arena)


class Carving:
    def __init__(self, arena: torch.Tensor) -> None:
        self._arena, self._at = arena, 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = prod(shape) * dtype.itemsize
        first, self._at = self._at, self._at + aligned(size)
        assert first + size <= len(self._arena), "the plan asks for more than there is"
        return self._arena[first : first + size].view(dtype).view(shape)


class Fresh(Carving):
    """The same in new memory, of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


@dataclass
class InputBuffer:
    """Pinned memory and as much on the device, and more there that nothing is copied to."""

    host: torch.Tensor
    device: torch.Tensor
    copied: Event = None
    used: Event = None
    fields: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """The fields at the start of its device half, by the number of chunks that it holds."""

    @classmethod
    def of(
        cls, device: torch.device, host_bytes: int, device_bytes: int, streams: CudaStreams
    ) -> InputBuffer:
        host = torch.empty(host_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        on_device = torch.empty(device_bytes, dtype=torch.uint8, device=device)
        # To the allocator that is the current stream's memory, which may still use it for another
        # purpose: the first copy waits for that, too.
        return cls(host, on_device, used=streams.mark())

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The host half."""
        array: npt.NDArray[np.uint8] = self.host.numpy()
        return array

    def send(self, size_bytes: int, streams: CudaStreams) -> None:
        """The first bytes to the device: what follows in the current stream waits for them."""
        with streams.copying(self.used):
            self.device[:size_bytes].copy_(self.host[:size_bytes], non_blocking=True)
            self.copied = streams.mark()
        streams.wait(self.copied)


class InputRing:
    """Buffers in turn."""

    def __init__(self, device: torch.device, count: int = 2, size_bytes: int = INPUT_BYTES) -> None:
        self._device, self._size_bytes = device, size_bytes
        self._buffers: list[InputBuffer | None] = [None] * count
        self._next = 0

    @property
    def size_bytes(self) -> int:
        """What batches should fit into."""
        return self._size_bytes

    def memory_bytes(self) -> tuple[int, int]:
        """On the device, and pinned."""
        known = [one for one in self._buffers if one is not None]
        return sum(len(b.device) for b in known), sum(len(b.host) for b in known)

    def take(self, host_bytes: int, device_bytes: int, streams: CudaStreams) -> InputBuffer:
        """The next buffer, when its last copy is done. One that is too small is replaced, which
        takes long: memory is pinned page by page."""
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        buffer = self._buffers[index]
        if buffer is not None and buffer.copied is not None:
            buffer.copied.synchronize()
        if buffer is None or len(buffer.host) < host_bytes or len(buffer.device) < device_bytes:
            self._buffers[index] = buffer = None  # before the new one, so that both never are
            spare = device_bytes - host_bytes
            size = max(self._size_bytes, host_bytes)
            buffer = InputBuffer.of(self._device, size, size + spare, streams)
            self._buffers[index] = buffer
        return buffer


class StatusPool:
    """Pinned memory for what kernels say of chunks, used again and again, from any thread.

    Not PyTorch's for each slab: what comes back to its allocator leaves an event in the stream that
    used it. If another thread records launches there just then, that event is part of the
    recording, and the next allocation of pinned memory fails."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._free: deque[torch.Tensor] = deque()

    def take(self, count: int) -> torch.Tensor:
        """Room for so many chunks, or more."""
        try:
            found = self._free.pop()
        except IndexError:
            found = torch.empty(0, dtype=torch.int32)
        if len(found) >= count:
            return found
        size = max(count, SLAB_CHUNKS)
        return torch.empty(size, dtype=torch.int32, pin_memory=self._is_pinned)

    def give_back(self, status: torch.Tensor) -> None:
        self._free.append(status)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def size_of(*owners: Any) -> int:
    """Bytes of all tensors that objects hold, in lists and objects of theirs too, each once."""
    seen: dict[int, int] = {}
    todo = list(owners)
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            seen[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, list | tuple):
            todo += one
        elif isinstance(one, dict):
            todo += one.values()
        elif type(one).__module__.startswith("kdn.codec.klt.") and hasattr(one, "__dict__"):
            todo += vars(one).values()
    return sum(seen.values())
