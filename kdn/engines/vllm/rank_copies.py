"""A rank's values between main memory, in which ranks meet, and its GPU, if it has one.

Copies have a stream of their own, for which no other waits, and one only: memory that a stream had
is given to the same stream again.
"""

from __future__ import annotations

from typing import Any

import torch

from kdn.cache.tensors import KVCache


class Copies:
    """Used by any thread. On a CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._device = device
        self._stream: Any = cuda.Stream(device) if device.type == "cuda" else None

    @property
    def are_needed(self) -> bool:
        return self._stream is not None

    def to_host(self, cache: KVCache) -> KVCache:
        """Values that `cache.ready` says are there, in main memory when this returns."""
        if not cache.keys.is_cuda:
            return cache
        if cache.ready is not None:
            self._stream.wait_event(cache.ready)
        with torch.cuda.stream(self._stream):
            return KVCache(cache.keys.cpu(), cache.values.cpu(), cache.start, cache.valid_from)

    def to_device(self, cache: KVCache) -> KVCache:
        """The way back: there when this returns."""
        if self._stream is None:
            return cache
        with torch.cuda.stream(self._stream):
            keys, values = cache.keys.to(self._device), cache.values.to(self._device)
        self._stream.synchronize()
        return KVCache(keys, values, cache.start, cache.valid_from)
