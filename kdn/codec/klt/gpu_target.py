"""Where a GPU decoder writes: an engine's memory as the kernels see it.

A token's values lie anywhere in a layer's keys and values: at its slot times the slot stride, and
from there, head by head, a head stride apart. The kernels do not know heads: they add a table of
channel offsets, made here once for each pair of head strides. Plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.keys import Chunk
from kdn.cache.rows import TokenRows
from kdn.cache.tensors import KVCache
from kdn.codec.klt.gpu_tables import Pairs, Tensor, put

RUN_CHANNELS = 8
"""Neighbours that are written at once, if they lie where whole vectors may."""
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Target:
    """Where values go: `pointers` [layers, 2] to each layer's keys and values, whose tokens lie
    `key_stride` and `value_stride` values apart, and a token's heads `head_strides` (of keys, of
    values). `inverse_scales` [layers, 2] are what values are multiplied by, if they are."""

    pointers: Tensor
    key_stride: int
    value_stride: int
    head_strides: tuple[int, int]
    dtype: torch.dtype
    is_aligned: bool
    inverse_scales: Tensor | None = None
    whole: KVCache | None = None
    """A cache of which every value will be written: until then its memory is free to use."""

    @classmethod
    def of(
        cls, keys: Sequence[Tensor], values: Sequence[Tensor],
        scales: npt.NDArray[np.float32] | None = None,
    ) -> Target:  # fmt: skip
        """Of tensors [slots, heads, channels] per layer, and their scales [layers, 2]."""
        both = zip(keys, values, strict=True)
        pointers = np.array([[k.data_ptr(), v.data_ptr()] for k, v in both])
        (key_stride, key_heads, _), (value_stride, value_heads, _) = (
            side[0].stride() for side in (keys, values)
        )
        dtype, device = keys[0].dtype, keys[0].device
        strides = np.array([key_stride, value_stride]) * dtype.itemsize
        is_aligned = not (pointers % VECTOR_BYTES).any() and not (strides % VECTOR_BYTES).any()
        is_aligned &= not any(one % RUN_CHANNELS for one in (key_heads, value_heads))
        inverse = None if scales is None else put(1 / scales, device)
        return cls(
            put(pointers, device), key_stride, value_stride, (key_heads, value_heads), dtype,
            is_aligned, inverse,
        )  # fmt: skip

    @classmethod
    def of_rows(cls, rows: TokenRows) -> Target:
        scales = None
        if rows.key_scales or rows.value_scales:
            ones = (1.0,) * rows.num_layers
            both = (rows.key_scales or ones, rows.value_scales or ones)
            scales = np.array(both, np.float32).T.copy()
        return cls.of(rows.keys, rows.values, scales)

    @classmethod
    def of_cache(cls, cache: KVCache, chunks: Sequence[Chunk]) -> Target:
        """Of a cache into which these chunks are decoded."""
        target = cls.of(list(cache.keys), list(cache.values))
        plain = cache.keys.is_contiguous() and cache.values.is_contiguous()
        filled = sum(chunk.num_tokens for chunk in chunks) == cache.num_tokens
        return replace(target, whole=cache) if plain and filled else target


class Channels:
    """Tables [2, layers, pairs] of where a pair's channels are from a token's first one, in keys
    and in values."""

    def __init__(self, pairs: Pairs, head_dim: int, device: torch.device) -> None:
        self._pairs, self._head_dim, self._device = pairs, head_dim, device
        self.frequency = put(pairs.frequency, device)
        self.num_layers, self.num_pairs = pairs.first.shape
        # An engine's memory hardly ever changes its strides; one that grows does now and then.
        self._of = lru_cache(maxsize=8)(self._made)

    def of(self, head_strides: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Of each pair's first and second channel; -1 where a row is padded."""
        return self._of(head_strides)

    def _made(self, head_strides: tuple[int, int]) -> tuple[Tensor, Tensor]:
        first, second = (
            np.stack([self._offsets(side, stride) for stride in head_strides])
            for side in (self._pairs.first, self._pairs.second)
        )
        return put(first, self._device), put(second, self._device)

    def _offsets(
        self, channels: npt.NDArray[np.int32], head_stride: int
    ) -> npt.NDArray[np.signedinteger]:
        heads, own = np.divmod(channels.astype(np.int64), self._head_dim)
        places = np.where(channels >= 0, heads * head_stride + own, -1)
        return places.astype(np.int32) if places.max() < 2**31 else places
