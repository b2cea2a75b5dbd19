"""Between a cache's values and the components that are coded.

    values = prediction from the token ids + weighted components

**Prediction.** Reader and writer have the token ids, so what follows from them is not stored: a
linear function, of low rank, of the embeddings of a token and of the two before it.

**Metric.** Not every error hurts alike. Calibration measures the Fisher information of the values:
how much the model's output distribution moves (in KL divergence) when a value does. Of it the
profile keeps, per group of layers, a weight per column and a few directions V that matter more:
`W = (1 + V diag(gain) V') diag(weight)`, so that |W error|^2 is twice the divergence.

**Components.** The principal components U of `W residual`: `y = U' W r`, and back
`r = W^-1 U y`. Keys and values of a group's layers share one basis, since both are read off the same
hidden state. As `|W error| = |error of y|`, one step size serves all components.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.codec.klt.profile import CONTEXT_TOKENS, Group, Profile
from kdn.errors import MismatchError

Floats = npt.NDArray[np.float32]


class Predictor:
    """Values of each token as far as the token ids tell them, [tokens, columns]."""

    def __init__(self, profile: Profile) -> None:
        t = profile.tensors
        self._codes = torch.from_numpy(t["embed.codes"])
        self._scale = torch.from_numpy(t["embed.scale"])
        self._mix = torch.from_numpy(t["predict.mix"]).float()
        self._out = torch.from_numpy(t["predict.out"]).float()
        self._bias = torch.from_numpy(t["predict.bias"])

    def __call__(self, chunk: Chunk) -> torch.Tensor:
        return torch.addmm(self._bias, self._features(chunk) @ self._mix, self._out)

    def _features(self, chunk: Chunk) -> torch.Tensor:
        """Embeddings of each token and of those before it; zero before the beginning."""
        before = CONTEXT_TOKENS - 1
        history = chunk.history[-before:]
        ids = torch.from_numpy(np.concatenate([history, chunk.tokens]).astype(np.int64))
        if len(ids) and int(ids.max()) >= len(self._codes):
            raise MismatchError(
                f"expected token ids below {len(self._codes)}, found {int(ids.max())}"
            )
        known = self._codes[ids].float() * self._scale
        padded = torch.cat([known.new_zeros(before - len(history), known.shape[1]), known])
        count = chunk.num_tokens
        return torch.cat([padded[before - i : before - i + count] for i in range(before + 1)], 1)


@dataclass(frozen=True)
class GroupTransform:
    """The two matrices of a group, from what the profile stores of them."""

    group: Group
    block_columns: int

    @cached_property
    def analysis(self) -> torch.Tensor:
        """[columns, components]: components of a residual row are `row @ analysis`."""
        g = self.group
        basis = torch.from_numpy(g.basis).float() * torch.from_numpy(g.basis_scale)[:, None]
        # The stored basis is rounded to 8 bits: dividing by its Gram matrix makes analysis and
        # synthesis exact inverses on its span.
        gram = (basis @ basis.T).double()
        exact = torch.linalg.solve(gram, basis.double()).float()
        return (self._apply_metric(exact, inverse=False) * torch.from_numpy(g.weight)).T.contiguous()

    @cached_property
    def synthesis(self) -> Floats:
        """[blocks, components, block columns]: `components @ (all blocks)` is the residual."""
        g = self.group
        basis = torch.from_numpy(g.basis).float() * torch.from_numpy(g.basis_scale)[:, None]
        rows = self._apply_metric(basis, inverse=True) / torch.from_numpy(g.weight)
        blocks = rows.view(len(rows), -1, self.block_columns).transpose(0, 1)
        result: Floats = blocks.contiguous().numpy()
        return result

    def _apply_metric(self, rows: torch.Tensor, *, inverse: bool) -> torch.Tensor:
        directions = torch.from_numpy(self.group.metric).float()
        gain = torch.from_numpy(self.group.gain)
        if inverse:
            gain = 1 / (1 + gain) - 1
        return rows + ((rows @ directions) * gain) @ directions.T


def to_columns(cache: KVCache, spec: ModelSpec, groups: tuple[Group, ...]) -> torch.Tensor:
    """[tokens, columns] in float32, with RoPE undone."""
    keys = rope.undo(cache.keys, spec, cache.start)
    parts = []
    for group in groups:
        layers = slice(group.first_layer, group.last_layer)
        for side in (keys[layers], cache.values[layers].float()):
            parts.append(side.transpose(0, 1).reshape(cache.num_tokens, -1))
    return torch.cat(parts, dim=1)


def from_columns(columns: torch.Tensor, spec: ModelSpec, group: Group, cache: KVCache) -> None:
    """Writes a group's columns [tokens, group columns] to the cache; RoPE is put on again."""
    layers = slice(group.first_layer, group.last_layer)
    shape = (2, group.last_layer - group.first_layer, spec.num_kv_heads, spec.head_dim)
    keys, values = columns.view(len(columns), *shape).permute(1, 2, 0, 3, 4)
    rope.redo(keys, spec, cache.start, first_layer=group.first_layer, out=cache.keys[layers])
    cache.values[layers].copy_(values)


@njit(nogil=True, cache=True)
def gather_nonzeros(values, scales, shifts, centroids, steps, starts, index, size):  # type: ignore[no-untyped-def]
    """Non-zero components token by token: token t has the entries [starts[t], starts[t + 1])."""
    num_components, num_tokens = values.shape
    for t in range(num_tokens + 1):
        starts[t] = 0
    for c in range(num_components):
        for t in range(num_tokens):
            starts[t + 1] += values[c, t] != 0
    for t in range(num_tokens):
        starts[t + 1] += starts[t]
    place = starts[:-1].copy()
    for c in range(num_components):
        for t in range(num_tokens):
            q = values[c, t]
            if q != 0:
                scale = min(max(np.int32(scales[c]) + shifts[t], 0), len(centroids) - 1)
                magnitude = abs(q)
                restored = (magnitude + centroids[scale, min(magnitude, 3) - 1]) * steps[t]
                index[place[t]] = c
                size[place[t]] = restored if q > 0 else -restored
                place[t] += 1


@njit(nogil=True, cache=True, fastmath={"contract", "nsz"})
def add_components(blocks, starts, index, size, out):  # type: ignore[no-untyped-def]
    """out[t] += sum of size * row over token t's entries.

    Most components of a token are zero, so this does a fraction of a dense product's work. Blocks
    of columns keep the rows in use within the processor's cache; four rows at a time keep loads
    and stores of the sum off the critical path.
    """
    num_blocks, _, width = blocks.shape
    for b in range(num_blocks):
        rows = blocks[b]
        for t in range(len(starts) - 1):
            total = out[t, b * width : (b + 1) * width]
            k, end = starts[t], starts[t + 1]
            while k + 4 <= end:
                r0, r1, r2, r3 = rows[index[k]], rows[index[k + 1]], rows[index[k + 2]], rows[index[k + 3]]
                s0, s1, s2, s3 = size[k], size[k + 1], size[k + 2], size[k + 3]
                for j in range(width):
                    total[j] += s0 * r0[j] + s1 * r1[j] + s2 * r2[j] + s3 * r3[j]
                k += 4
            while k < end:
                row, s = rows[index[k]], size[k]
                for j in range(width):
                    total[j] += s * row[j]
                k += 1
