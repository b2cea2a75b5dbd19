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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
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


class PagedCache:
    """The layers of one worker: all of the model's, with some or all of its heads."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        spec: ModelSpec,
        heads: Heads,
        block_tokens: int,
        layout: Layout | None = None,
    ) -> None:
        """`block_tokens` is the scheduler's block size, a multiple of the kernels'."""
        if len(layers) != spec.num_layers:
            raise UnsupportedError(
                f"vLLM caches {len(layers)} layers, the model has {spec.num_layers}"
            )
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
        self.dtype = layers[0].dtype

    def write(self, cache: KVCache, start: int, end: int, block_ids: Sequence[int]) -> None:
        """Tokens [start, end) of `cache` to their places; others in the same blocks stay. It has
        all heads, or those that are held here."""
        slots = self._slots(start, end, block_ids)
        part = cache.slice(start, end)
        first = 0 if cache.num_kv_heads == self.heads.count else self.heads.first
        mine = slice(first, first + self.heads.count)
        for layer, (keys, values) in enumerate(self._views):
            keys[slots] = part.keys[layer, :, mine].to(keys.device, keys.dtype)
            values[slots] = part.values[layer, :, mine].to(values.device, values.dtype)
        if slots[0].is_cuda:  # only then may vLLM's own stream read them
            torch.cuda.current_stream(slots[0].device).synchronize()

    def read(self, start: int, end: int, block_ids: Sequence[int]) -> KVCache:
        """A copy, in main memory, of tokens [start, end) with the heads that are held here."""
        slots = self._slots(start, end, block_ids)
        keys, values = (
            torch.stack([pair[kind][slots] for pair in self._views]).cpu() for kind in (0, 1)
        )
        return KVCache(keys, values, start)

    def _slots(
        self, start: int, end: int, block_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token the kernels' block, and where it is in there. This takes no longer than to
        name whole blocks: 3 ms instead of 4 for 256 tokens of SmolLM2 on one core."""
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        if last > len(block_ids):
            raise MismatchError(f"tokens up to {end} are not in {len(block_ids)} blocks")
        ids = torch.tensor(block_ids[first:last], dtype=torch.long)
        tokens = torch.arange(start, end)
        within = tokens % self.block_tokens
        blocks = ids[tokens // self.block_tokens - first] * self._per_block
        blocks += within // self.kernel_tokens
        device = self._views[0][0].device
        return blocks.to(device), (within % self.kernel_tokens).to(device)
