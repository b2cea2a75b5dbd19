"""Between a cache and its columns: `[columns, tokens]` in float32, RoPE undone.

Columns are ordered as `profile.py` says. Tokens come last, as in everything the codec computes: a
component's symbols of all tokens stand side by side, and matrix products need nothing transposed.

These kernels do in one pass what `rope.py` and a transposition would do in several: memory, not
arithmetic, is what they wait for. Tokens are shared out among the cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.threads import num_cores, parallel_map

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_TILE = 16  # floats in a cache line
_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Slab:
    """The rows [columns] of a group that hold the keys or the values of layers [first, last)."""

    rows: slice
    is_keys: bool
    first: int
    last: int


@dataclass(frozen=True)
class Restored:
    """A slab's values as what is to be summed, each [rows, tokens] with its factors:
    `base + bias[row] + coarse * row_scale[row] * token_scale[token]`, and the same with `error` if
    there is one."""

    base: torch.Tensor
    bias: Floats
    coarse: torch.Tensor
    row_scale: Floats
    token_scale: Floats
    error: Ints | None = None
    error_row_scale: Floats | None = None
    error_token_scale: Floats | None = None


def slabs(spec: ModelSpec, layers: tuple[int, int]) -> list[Slab]:
    """The keys of a group, and its values."""
    first, last = layers
    height = (last - first) * spec.num_kv_heads * spec.head_dim
    return [
        Slab(slice(0, height), True, first, last),
        Slab(slice(height, 2 * height), False, first, last),
    ]


def read_columns(
    cache: KVCache, spec: ModelSpec, layers: tuple[int, int], tables: RopeTables
) -> torch.Tensor:
    """Columns of layers [first, last), one group's."""
    first, last = layers
    keys, values = _float_array(cache.keys[first:last]), _float_array(cache.values[first:last])
    width = spec.num_kv_heads * spec.head_dim
    out = torch.empty((2, last - first, width, cache.num_tokens), dtype=torch.float32)
    columns, turns = out.numpy(), tables.arrays(first, last)
    calls = [
        (keys[:, share], values[:, share], *turns, columns[..., share], share.start)
        for share in _shares(cache.num_tokens)
    ]
    parallel_map(lambda call: _read(*call), calls)
    return out.view(-1, cache.num_tokens)


def write_columns(
    parts: Sequence[tuple[Slab, Restored]], tables: RopeTables, cache: KVCache
) -> None:
    """Puts restored values where they belong; RoPE is applied to keys again."""
    outputs = [_Output.of(slab, cache) for slab, _ in parts]
    calls = [
        (*_arrays(slab, restored, tables), output.array, share.start, share.stop)
        for (slab, restored), output in zip(parts, outputs, strict=True)
        for share in _shares(cache.num_tokens)
    ]
    # All at once: waking threads up costs as much as a tenth of their work here.
    parallel_map(lambda call: _write(*call), calls)
    for output in outputs:
        output.finish()


@dataclass(frozen=True)
class _Output:
    """Where a slab is written to: the cache itself, or a float32 copy of its part."""

    target: torch.Tensor
    aside: torch.Tensor | None

    @classmethod
    def of(cls, slab: Slab, cache: KVCache) -> _Output:
        target = (cache.keys if slab.is_keys else cache.values)[slab.first : slab.last]
        direct = target.dtype == torch.float32 and target.device.type == "cpu"
        return cls(target, None if direct else torch.empty(tuple(target.shape)))

    @property
    def array(self) -> Floats:
        found: Floats = (self.target if self.aside is None else self.aside).numpy()
        return found

    def finish(self) -> None:
        if self.aside is not None:
            self.target.copy_(self.aside)


def _arrays(slab: Slab, restored: Restored, tables: RopeTables) -> tuple[Any, ...]:
    errors = (np.zeros((0, 0), np.int32), _NOTHING, _NOTHING)
    if restored.error is not None:
        assert restored.error_row_scale is not None
        assert restored.error_token_scale is not None
        errors = (restored.error, restored.error_row_scale, restored.error_token_scale)
    return (
        restored.base.numpy(), restored.bias, restored.coarse.numpy(), restored.row_scale,
        restored.token_scale, *errors, *tables.arrays(slab.first, slab.last, turn=slab.is_keys),
    )  # fmt: skip


def _float_array(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.float().cpu().numpy()
    return array


def _shares(num_tokens: int) -> list[slice]:
    """Tokens for each core, in whole cache lines."""
    tiles = -(-num_tokens // _TILE)
    bounds = np.linspace(0, tiles, min(num_cores(), tiles) + 1).astype(int) * _TILE
    return [slice(a, b) for a, b in pairwise(np.minimum(bounds, num_tokens).tolist())]


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines [distinct rotations, pairs, tokens], and of each layer: its rotation, how
    many pairs it turns (none without RoPE) and whether a pair's channels are neighbours."""

    cos: Floats
    sin: Floats
    which: Ints
    pairs: Ints
    interleaved: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, spec: ModelSpec, start: int, num_tokens: int, *, forward: bool) -> RopeTables:
        distinct = [r for r in dict.fromkeys(spec.ropes) if r is not None]
        pairs = max((len(r.inv_freq) for r in distinct), default=0)
        cos = np.zeros((len(distinct), pairs, num_tokens), dtype=np.float32)
        sin = np.zeros_like(cos)
        for index, found in enumerate(distinct):
            both = rope.tables(found, start, num_tokens, torch.device("cpu"), forward=forward)
            cos[index, : len(found.inv_freq)] = both[0][:, 0].numpy().T
            sin[index, : len(found.inv_freq)] = both[1][:, 0].numpy().T
        which = np.array([distinct.index(r) if r else 0 for r in spec.ropes], dtype=np.int32)
        counts = np.array([len(r.inv_freq) if r else 0 for r in spec.ropes], dtype=np.int32)
        neighbours = np.array([bool(r and r.interleaved) for r in spec.ropes])
        return cls(cos, sin, which, counts, neighbours)

    def arrays(
        self, first: int, last: int, *, turn: bool = True
    ) -> tuple[npt.NDArray[np.generic], ...]:
        """Of layers [first, last); `turn` False is for values, which no rotation touches."""
        pairs = self.pairs[first:last] if turn else np.zeros(last - first, np.int32)
        return self.cos, self.sin, self.which[first:last], pairs, self.interleaved[first:last]


@njit(nogil=True, cache=True)
def _channels(pair, pairs, interleaved):  # type: ignore[no-untyped-def]
    """Where the two channels of a pair stand in a head."""
    if interleaved:
        return 2 * pair, 2 * pair + 1
    return pair, pair + pairs


@njit(nogil=True, cache=True)
def _turn(block, cos, sin, pairs, interleaved, begin):  # type: ignore[no-untyped-def]
    """Applies RoPE to a head's block [channels, tokens], given [pairs, tokens] from `begin` on."""
    for pair in range(pairs):
        a, b = _channels(pair, pairs, interleaved)
        first, second = block[a], block[b]
        c, s = cos[pair, begin : begin + len(first)], sin[pair, begin : begin + len(first)]
        for t in range(len(first)):
            x, y = first[t], second[t]
            first[t] = x * c[t] - y * s[t]
            second[t] = y * c[t] + x * s[t]


@njit(nogil=True, cache=True)
def _transpose(source, target):  # type: ignore[no-untyped-def]
    """Tile by tile, so that both sides stay in the nearest cache."""
    rows, columns = source.shape
    for begin in range(0, columns, _TILE):
        for first in range(0, rows, _TILE):
            last, end = min(first + _TILE, rows), min(begin + _TILE, columns)
            for j in range(begin, end):
                for i in range(first, last):
                    target[j, i] = source[i, j]


@njit(nogil=True, cache=True)
def _read(keys, values, cos, sin, which, pairs, interleaved, out, begin):  # type: ignore[no-untyped-def]
    num_heads, head_dim = keys.shape[2:]
    for layer in range(len(keys)):
        for head in range(num_heads):
            rows = slice(head * head_dim, (head + 1) * head_dim)
            block = out[0, layer, rows]
            _transpose(keys[layer, :, head], block)
            if pairs[layer]:
                table = which[layer]
                _turn(block, cos[table], sin[table], pairs[layer], interleaved[layer], begin)
            _transpose(values[layer, :, head], out[1, layer, rows])


@njit(nogil=True, cache=True)
def _add_scaled(out, whole, scale, token_scale):  # type: ignore[no-untyped-def]
    for t in range(len(out)):
        out[t] += np.float32(whole[t]) * (scale * token_scale[t])


@njit(nogil=True, cache=True)
def _add_constant(out, base, constant):  # type: ignore[no-untyped-def]
    for t in range(len(out)):
        out[t] = base[t] + constant


@njit(nogil=True, cache=True)
def _write(  # type: ignore[no-untyped-def]
    base, bias, coarse, row_scale, token_scale, error, error_row, error_token,
    cos, sin, which, pairs, interleaved, out, begin, end,
):  # fmt: skip
    num_layers, _, num_heads, head_dim = out.shape
    block = np.empty((head_dim, end - begin), np.float32)
    for layer in range(num_layers):
        for head in range(num_heads):
            for d in range(head_dim):
                row, own = (layer * num_heads + head) * head_dim + d, block[d]
                _add_constant(own, base[row, begin:end], bias[row])
                _add_scaled(own, coarse[row, begin:end], row_scale[row], token_scale[begin:end])
                if len(error):
                    _add_scaled(own, error[row, begin:end], error_row[row], error_token[begin:end])
            if pairs[layer]:
                table = which[layer]
                _turn(block, cos[table], sin[table], pairs[layer], interleaved[layer], begin)
            _transpose(block, out[layer, begin:end, head])
