"""Between a cache and its columns: `[tokens, columns]` in float32, RoPE undone.

Columns are ordered as `profile.py` says. These kernels do in one pass what `rope.py` and several
copies would do: memory, not arithmetic, is what they wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

BAND_COLUMNS = 1024


@dataclass(frozen=True)
class Band:
    """The columns of a group that hold the keys or the values of layers [first, last), or of some
    heads of one layer."""

    columns: slice
    is_keys: bool
    first: int
    last: int


@dataclass(frozen=True)
class Scaled:
    """Integers [tokens, columns], to be multiplied by their token's and their column's scale."""

    whole: Ints
    token_scale: Floats
    column_scale: Floats


@dataclass(frozen=True)
class Restored:
    """A band's values [tokens, columns] as what is to be summed. Only the last level has errors."""

    base: Floats
    bias: Floats
    predicted: Scaled
    coarse: Scaled
    error: Scaled | None


_NOTHING = Scaled(np.zeros((0, 0), np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32))


def bands(spec: ModelSpec, layers: tuple[int, int], most_columns: int = BAND_COLUMNS) -> list[Band]:
    """A group's keys and values in pieces of whole layers, as many as are summed at once, and as
    the cache of a core holds while they are summed and written."""
    first, last = layers
    width = spec.num_kv_heads * spec.head_dim
    count = max(1, most_columns // width)
    found = []
    for is_keys, begin in ((True, 0), (False, (last - first) * width)):
        for layer in range(first, last, count):
            end = min(layer + count, last)
            columns = slice(begin + (layer - first) * width, begin + (end - first) * width)
            found.append(Band(columns, is_keys, layer, end))
    return found


def share_of(band: Band, spec: ModelSpec, heads: range | None) -> list[Band]:
    """What of a band of whole layers belongs to some heads, layer by layer; None: all do."""
    if heads is None or len(heads) == spec.num_kv_heads:
        return [band]
    width, found = spec.num_kv_heads * spec.head_dim, []
    for layer in range(band.first, band.last):
        first = band.columns.start + (layer - band.first) * width + heads.start * spec.head_dim
        columns = slice(first, first + len(heads) * spec.head_dim)
        found.append(Band(columns, band.is_keys, layer, layer + 1))
    return found


def read_columns(
    cache: KVCache, spec: ModelSpec, layers: tuple[int, int], tables: RopeTables
) -> torch.Tensor:
    """Columns of layers [first, last), one group's."""
    first, last = layers
    height = (last - first) * spec.num_kv_heads * spec.head_dim
    out = torch.empty((cache.num_tokens, 2 * height), dtype=torch.float32)
    for side, is_keys in ((cache.keys, True), (cache.values, False)):
        part = side[first:last].to("cpu", torch.float32)
        part = part if _has_plain_rows(part) else part.contiguous()
        own = out[:, :height] if is_keys else out[:, height:]
        turns = tables.arrays(first, last, turn=is_keys)
        _read(_flat(part), part.stride()[:2], turns, tuple(part.shape[2:]), own.numpy())
    return out


def write_band(band: Band, restored: Restored, tables: RopeTables, cache: KVCache) -> None:
    """Puts restored values where they belong; RoPE is applied to keys again."""
    target = (cache.keys if band.is_keys else cache.values)[band.first : band.last]
    direct = target.dtype == torch.float32 and target.device.type == "cpu"
    direct = direct and _has_plain_rows(target)
    out = target if direct else torch.empty(tuple(target.shape))
    parts = (restored.predicted, restored.coarse, restored.error or _NOTHING)
    sums = tuple((part.whole, part.token_scale, part.column_scale) for part in parts)
    turns = tables.arrays(band.first, band.last, turn=band.is_keys)
    heads, strides = tuple(out.shape[2:]), out.stride()[:2]
    _write(restored.base, restored.bias, sums, turns, heads, _flat(out), strides)
    if not direct:
        target.copy_(out)


def _has_plain_rows(part: torch.Tensor) -> bool:
    """Whether a token's values of a layer [layers, tokens, heads, channels] lie side by side."""
    return part.stride()[2:] == (part.shape[3], 1)


def _flat(part: torch.Tensor) -> Floats:
    """All memory from its first to its last value: kernels find a token's values by the strides.
    Compilers only make vector code for what is known to lie side by side."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True))
    array: Floats = part.as_strided((span,), (1,)).numpy()
    return array


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines [distinct rotations, tokens, pairs], and of each layer: its rotation, how
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
        cos = np.zeros((len(distinct), num_tokens, pairs), dtype=np.float32)
        sin = np.zeros_like(cos)
        for index, found in enumerate(distinct):
            both = rope.tables(found, start, num_tokens, torch.device("cpu"), forward=forward)
            cos[index, :, : len(found.inv_freq)] = both[0][:, 0].numpy()
            sin[index, :, : len(found.inv_freq)] = both[1][:, 0].numpy()
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
def _turn(row, turns, heads, t):  # type: ignore[no-untyped-def]
    """Applies RoPE to all heads of some layers, in place. Unsigned indices need no check for
    negative ones: the loop over pairs becomes vector code."""
    cos, sin, which, pairs, interleaved = turns
    num_heads, head_dim = heads
    for layer in range(len(pairs)):
        count, table = np.uint64(pairs[layer]), which[layer]
        for head in range(num_heads):
            first = np.uint64((layer * num_heads + head) * head_dim)
            if interleaved[layer]:
                for p in range(count):
                    a, b = first + np.uint64(2) * p, first + np.uint64(2) * p + np.uint64(1)
                    x, y, c, s = row[a], row[b], cos[table, t, p], sin[table, t, p]
                    row[a], row[b] = x * c - y * s, y * c + x * s
            else:
                for p in range(count):
                    a, b = first + p, first + count + p
                    x, y, c, s = row[a], row[b], cos[table, t, p], sin[table, t, p]
                    row[a], row[b] = x * c - y * s, y * c + x * s


@njit(nogil=True, cache=True)
def _read(flat, strides, turns, heads, out):  # type: ignore[no-untyped-def]
    width, num_layers = np.uint64(heads[0] * heads[1]), len(turns[2])
    own = np.empty(out.shape[1], np.float32)
    for t in range(len(out)):
        for layer in range(num_layers):
            source = np.uint64(layer * strides[0] + t * strides[1])
            first = np.uint64(layer) * width
            for c in range(width):
                own[first + c] = flat[source + c]
        _turn(own, turns, heads, t)
        out[t] = own


@njit(nogil=True, cache=True)
def _sum(base, bias, predicted, p_token, p_column, coarse, c_token, c_column, out):  # type: ignore[no-untyped-def]
    for c in range(len(out)):
        first = np.float32(predicted[c]) * (p_token * p_column[c])
        second = np.float32(coarse[c]) * (c_token * c_column[c])
        out[c] = ((base[c] + bias[c]) + first) + second


@njit(nogil=True, cache=True)
def _add_scaled(whole, token_scale, column_scale, out):  # type: ignore[no-untyped-def]
    for c in range(len(out)):
        out[c] += np.float32(whole[c]) * (token_scale * column_scale[c])


@njit(nogil=True, cache=True)
def _write(base, bias, sums, turns, heads, flat, strides):  # type: ignore[no-untyped-def]
    predicted, p_token, p_column = sums[0]
    coarse, c_token, c_column = sums[1]
    error, e_token, e_column = sums[2]
    width = np.uint64(heads[0] * heads[1])
    own = np.empty(len(bias), np.float32)
    for t in range(len(base)):
        _sum(
            base[t], bias, predicted[t], p_token[t], p_column, coarse[t], c_token[t], c_column, own
        )
        if len(error):
            _add_scaled(error[t], e_token[t], e_column, own)
        _turn(own, turns, heads, t)
        for layer in range(len(turns[2])):
            target = np.uint64(layer * strides[0] + t * strides[1])
            first = np.uint64(layer) * width
            for c in range(width):
                flat[target + c] = own[first + c]
