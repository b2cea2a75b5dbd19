"""Keys and values in the paged memory of vLLM, read and written in the canonical layout.

vLLM holds a tensor per layer, cut into blocks of a few tokens. Every way to arrange a block is
reduced to one pair of views `[blocks, tokens, heads, dim]` of keys and of values, through which
elements are read and written where they are. The arrangements, by what vLLM hands out:

- `HEADS_FIRST` (vLLM from 0.30 on a GPU): `[blocks, heads, tokens, 2 * dim]`, of any strides; a row
  holds a key, then a value.
- `CPU`: the same shape, contiguous, and not that: per block and head, the keys as `[dim, tokens]`
  come first, then the values as `[tokens, dim]`. Nothing tells the two apart but who made them.
- `PAIR_FIRST` (FlashAttention before): `[2, blocks, tokens, heads, dim]`.
- `PAIR_SECOND` (FlashInfer and Triton before): `[blocks, 2, tokens, heads, dim]`.

Kernels may cut a block of the scheduler into several smaller ones, which lie side by side.

Wherever tokens lie at one distance within a block, and blocks at a multiple of it, a token's place
is one number, its slot (`kdn/cache/rows.py`). That is every layout but the CPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch

from kdn.cache.rows import Slots, TokenRows
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.gather import gather
from kdn.errors import MismatchError, UnsupportedError


class Layout(Enum):
    HEADS_FIRST = "heads first"
    CPU = "cpu"
    PAIR_FIRST = "pair first"
    PAIR_SECOND = "pair second"


@dataclass(frozen=True)
class Heads:
    """The KV heads that one of several tensor-parallel ranks holds."""

    first: int
    count: int

    @property
    def range(self) -> range:
        return range(self.first, self.first + self.count)

    @classmethod
    def of_rank(cls, num_kv_heads: int, rank: int, num_ranks: int) -> Heads:
        """Ranks share heads evenly; where there are more ranks than heads, some hold the same."""
        if num_ranks <= num_kv_heads:
            if num_kv_heads % num_ranks:
                raise UnsupportedError(f"{num_kv_heads} KV heads on {num_ranks} ranks")
            count = num_kv_heads // num_ranks
            return cls(rank * count, count)
        if num_ranks % num_kv_heads:
            raise UnsupportedError(f"{num_kv_heads} KV heads on {num_ranks} ranks")
        return cls(rank // (num_ranks // num_kv_heads), 1)


def layout_of(layer: torch.Tensor, heads: int, head_dim: int) -> Layout:
    """The arrangement, told by its shape."""
    shape = tuple(layer.shape)
    if len(shape) == 4 and shape[1] == heads and shape[3] == 2 * head_dim:
        return Layout.CPU if layer.device.type == "cpu" else Layout.HEADS_FIRST
    if len(shape) == 5 and shape[3:] == (heads, head_dim) and 2 in shape[:2]:
        return Layout.PAIR_FIRST if shape[0] == 2 else Layout.PAIR_SECOND
    raise UnsupportedError(
        f"vLLM's cache of {shape} is in no layout that kdn knows for {heads} heads of {head_dim}"
    )


def views(layer: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as `[blocks, tokens, heads, dim]`, of the same memory."""
    if layout is Layout.PAIR_FIRST:
        return layer[0], layer[1]
    if layout is Layout.PAIR_SECOND:
        return layer[:, 0], layer[:, 1]
    blocks, heads, tokens, width = layer.shape
    if layout is Layout.HEADS_FIRST:
        rows = layer.transpose(1, 2)
        return rows[..., : width // 2], rows[..., width // 2 :]
    halves = layer.view(blocks, heads, 2, tokens * width // 2)
    keys = halves[:, :, 0].view(blocks, heads, width // 2, tokens)
    values = halves[:, :, 1].view(blocks, heads, tokens, width // 2)
    return keys.permute(0, 3, 1, 2), values.transpose(1, 2)


@dataclass(frozen=True)
class Scales:
    """What a layer's keys and values are multiplied with to become those of the model: a cache of
    8 bit holds `value / scale`."""

    keys: tuple[float, ...]
    values: tuple[float, ...]


class PagedCache:
    """The layers of one worker: all of the model's, with some or all of its heads."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        spec: ModelSpec,
        heads: Heads,
        block_tokens: int,
        layout: Layout | None = None,
        scales: Scales | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`block_tokens` is the scheduler's block size, a multiple of the kernels'; `dtype` that of
        the values. With `scales` the elements are fp8 (e4m3), whatever torch calls them."""
        if len(layers) != spec.num_layers:
            raise UnsupportedError(
                f"vLLM caches {len(layers)} layers, the model has {spec.num_layers}"
            )
        self.dtype = dtype or layers[0].dtype
        """Of values as they are read and decoded."""
        if scales is not None:
            layers = [_as_fp8(layer) for layer in layers]
        elif self.dtype != layers[0].dtype:
            raise UnsupportedError(f"expected a cache of {self.dtype}, found {layers[0].dtype}")
        if len(kinds := {(layer.dtype, layer.shape) for layer in layers}) > 1:
            raise UnsupportedError(f"layers with caches of different kinds: {kinds}")
        self.layout = layout or layout_of(layers[0], heads.count, spec.head_dim)
        self.heads, self.block_tokens = heads, block_tokens
        self.has_all_heads = heads.count == spec.num_kv_heads
        self._views = [views(layer, self.layout) for layer in layers]
        self.kernel_tokens = int(self._views[0][0].shape[1])
        if block_tokens % self.kernel_tokens:
            raise UnsupportedError(
                f"kernels with blocks of {self.kernel_tokens} tokens in blocks of {block_tokens}"
            )
        self._per_block = block_tokens // self.kernel_tokens
        self.device = layers[0].device
        self.rows = self._as_rows(scales)
        """The same memory, slot by slot; None where a place is not one number."""
        if scales is not None and self.rows is None:
            raise UnsupportedError(f"a KV cache of 8 bit in vLLM's layout {self.layout.value!r}")

    def write(self, cache: KVCache, start: int, end: int, block_ids: Sequence[int]) -> None:
        """Tokens [start, end) of `cache` to their places; others in the same blocks stay. It has
        all heads, or those that are held here."""
        part = cache.slice(start, end)
        has_mine = cache.num_kv_heads == self.heads.count
        if self.rows is not None:
            rows = replace(self.rows, heads=range(self.heads.count)) if has_mine else self.rows
            with rows.writing():
                rows.write(part, self.slots(start, end, block_ids))
            return
        slots = self._places(start, end, block_ids)
        first = 0 if has_mine else self.heads.first
        mine = slice(first, first + self.heads.count)
        for layer, (keys, values) in enumerate(self._views):
            keys[slots] = part.keys[layer, :, mine].to(keys.device, keys.dtype)
            values[slots] = part.values[layer, :, mine].to(values.device, values.dtype)
        if slots[0].is_cuda:  # only then may vLLM's own stream read them
            torch.cuda.current_stream(slots[0].device).synchronize()

    def read(self, start: int, end: int, block_ids: Sequence[int]) -> KVCache:
        """A copy, in main memory, of tokens [start, end) with the heads that are held here."""
        if self.rows is not None:
            keys, values = gather(self.rows, self.slots(start, end, block_ids), self.dtype)
            return KVCache(keys.cpu(), values.cpu(), start)
        slots = self._places(start, end, block_ids)
        keys, values = (
            torch.stack([pair[kind][slots] for pair in self._views]).cpu() for kind in (0, 1)
        )
        return KVCache(keys, values, start)

    def slots(self, start: int, end: int, block_ids: Sequence[int]) -> Slots:
        """Where tokens [start, end) are in `rows`."""
        blocks, within = self._located(start, end, block_ids)
        return blocks * self._block_slots + within

    def mark(self) -> torch.cuda.Event | None:
        """What is queued on the device by now: blocks may still be written by steps under way."""
        if self.device.type != "cuda":
            return None
        stream: Any = torch.cuda.current_stream(self.device)
        event: torch.cuda.Event = stream.record_event()
        return event

    def _as_rows(self, scales: Scales | None) -> TokenRows | None:
        strides = {view.stride() for pair in self._views for view in pair}
        block, token = self._views[0][0].stride()[:2]
        if self.layout is Layout.CPU or len(strides) > 1 or block % token:
            return None
        self._block_slots = block // token
        keys, values = ([_by_slot(pair[kind]) for pair in self._views] for kind in (0, 1))
        heads = self.heads.range
        if scales is None:
            return TokenRows(keys, values, heads)
        return TokenRows(keys, values, heads, scales.keys, scales.values)

    def _located(self, start: int, end: int, block_ids: Sequence[int]) -> tuple[Slots, Slots]:
        """Of each token the kernels' block, and where it is in there."""
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        if last > len(block_ids):
            raise MismatchError(f"tokens up to {end} are not in {len(block_ids)} blocks")
        ids = np.array(block_ids[first:last], dtype=np.int64)
        tokens = np.arange(start, end)
        within = tokens % self.block_tokens
        blocks = ids[tokens // self.block_tokens - first] * self._per_block
        return blocks + within // self.kernel_tokens, within % self.kernel_tokens

    def _places(
        self, start: int, end: int, block_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as indices of views. This takes no longer than to name whole blocks: 3 ms
        instead of 4 for 256 tokens of SmolLM2 on one core."""
        blocks, within = self._located(start, end, block_ids)
        return torch.from_numpy(blocks).to(self.device), torch.from_numpy(within).to(self.device)


def _by_slot(view: torch.Tensor) -> torch.Tensor:
    """`[blocks, tokens, heads, dim]` as `[slots, heads, dim]`: from one token to the next, over
    whatever lies between blocks."""
    blocks, tokens, heads, dim = view.shape
    block, token, head, channel = view.stride()
    slots = (blocks - 1) * (block // token) + tokens
    return view.as_strided((slots, heads, dim), (token, head, channel))


def _as_fp8(layer: torch.Tensor) -> torch.Tensor:
    """vLLM has caches of 8 bit as bytes without a kind, depending on its version."""
    if layer.dtype not in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        raise UnsupportedError(f"an fp8 cache whose elements are {layer.dtype}")
    return layer.view(torch.float8_e4m3fn)
