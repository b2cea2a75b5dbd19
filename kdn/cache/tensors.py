"""The one canonical layout of a KV cache.

Keys and values are `[layers, tokens, kv_heads, head_dim]`, with RoPE applied as the engine has it.
Token `i` sits at absolute position `start + i`. A layer with a sliding window may lack old tokens:
`valid_from[layer]` is the first absolute position that layer really holds; what lies before it is
zero and must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kdn.errors import MismatchError


@dataclass(frozen=True)
class KVCache:
    """Keys and values of consecutive tokens, for all layers of one model."""

    keys: torch.Tensor
    values: torch.Tensor
    start: int = 0
    valid_from: tuple[int, ...] = field(default=())
    ready: torch.cuda.Event | None = None
    """On a GPU: the values are there when this has passed. None: they are there."""

    def __post_init__(self) -> None:
        if self.keys.ndim != 4 or self.keys.shape != self.values.shape:
            raise MismatchError(
                "keys and values must both be [layers, tokens, kv_heads, head_dim]; "
                f"found {tuple(self.keys.shape)} and {tuple(self.values.shape)}"
            )
        if self.keys.dtype != self.values.dtype or self.keys.device != self.values.device:
            raise MismatchError("keys and values must share dtype and device")
        if self.start < 0:
            raise MismatchError(f"start must not be negative, found {self.start}")
        if not self.valid_from:
            object.__setattr__(self, "valid_from", (self.start,) * self.num_layers)
        if len(self.valid_from) != self.num_layers:
            raise MismatchError(
                f"valid_from needs one position per layer ({self.num_layers}), "
                f"found {len(self.valid_from)}"
            )
        if any(not self.start <= v <= self.end for v in self.valid_from):
            raise MismatchError(f"valid_from must lie in [{self.start}, {self.end}]")

    @property
    def num_layers(self) -> int:
        return int(self.keys.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.keys.shape[2])

    @property
    def head_dim(self) -> int:
        return int(self.keys.shape[3])

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def end(self) -> int:
        """Absolute position after the last token."""
        return self.start + self.num_tokens

    @property
    def size_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def is_complete(self) -> bool:
        """Whether every layer holds every token."""
        return all(v == self.start for v in self.valid_from)

    def slice(self, start: int, end: int) -> KVCache:
        """The tokens at absolute positions `[start, end)`, as views."""
        if not self.start <= start <= end <= self.end:
            raise MismatchError(f"[{start}, {end}) is not within [{self.start}, {self.end})")
        lo, hi = start - self.start, end - self.start
        valid = tuple(min(max(v, start), end) for v in self.valid_from)
        return KVCache(self.keys[:, lo:hi], self.values[:, lo:hi], start, valid, self.ready)

    def of_heads(self, heads: range) -> KVCache:
        """Some of its KV heads, as views."""
        check_heads(heads, self.num_kv_heads)
        own = slice(heads.start, heads.stop)
        return KVCache(
            self.keys[:, :, own], self.values[:, :, own], self.start, self.valid_from, self.ready
        )

    def of_layers(self, layers: Sequence[int]) -> KVCache:
        """Its layers in this order: itself if that is its own, else in new memory, on a GPU in the
        order of its current stream."""
        if list(layers) == list(range(self.num_layers)):
            return self
        if self.ready is not None:
            torch.cuda.current_stream(self.keys.device).wait_event(self.ready)
        which = torch.tensor(layers, device=self.keys.device)
        keys, values = (side.index_select(0, which) for side in (self.keys, self.values))
        valid_from = tuple(self.valid_from[layer] for layer in layers)
        return KVCache(keys, values, self.start, valid_from).queued()

    def queued(self) -> KVCache:
        """The same, where a GPU still has to compute it: ready when that has done what its current
        stream was given so far."""
        if not self.keys.is_cuda:
            return self
        ready = torch.cuda.current_stream(self.keys.device).record_event()
        return KVCache(self.keys, self.values, self.start, self.valid_from, ready)

    def copy(self) -> KVCache:
        """In memory of its own; on a GPU in the order of its current stream."""
        if self.ready is not None:
            torch.cuda.current_stream(self.keys.device).wait_event(self.ready)
        keys, values = self.keys.clone(), self.values.clone()
        return KVCache(keys, values, self.start, self.valid_from).queued()

    @classmethod
    def empty(
        cls,
        num_layers: int,
        num_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        start: int = 0,
        valid_from: tuple[int, ...] = (),
    ) -> KVCache:
        """A zeroed cache to decode into."""
        shape = (num_layers, num_tokens, num_kv_heads, head_dim)
        return cls(
            torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), start, valid_from
        )


def check_heads(heads: range, num_kv_heads: int) -> None:
    """That these are some of so many."""
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= num_kv_heads:
        raise MismatchError(f"{heads} is not within {num_kv_heads} KV heads")
