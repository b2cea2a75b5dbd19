"""Between a cache's values and the components that are coded.

    values = prediction from the token ids + weighted components

**Prediction.** Reader and writer have the token ids, so what follows from them is not stored: a
linear function, of low rank, of the embeddings of a token and of the two before it.

**Metric.** Not every error hurts alike. Calibration measures the Fisher information of the values:
how much the model's output distribution moves (in KL divergence) when a value does. Of it the
profile keeps, per group of layers, a weight per column and a few directions V that matter more:
`W = (1 + V diag(gain) V') diag(weight)`, so that |W error|^2 is twice the divergence.

**Components.** The principal components U of `W residual`: `y = U' W r`, and back
`r = W^-1 U y`. Keys and values of a group's layers share one basis, since both are read off the
same hidden state. As `|W error| = |error of y|`, one step size serves all components.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    @cached_property
    def analysis(self) -> torch.Tensor:
        """[columns, components]: components of a residual row are `row @ analysis`."""
        # The stored basis is rounded: dividing by its Gram matrix makes analysis and synthesis
        # exact inverses on its span.
        gram = (self._basis @ self._basis.T).double()
        exact = torch.linalg.solve(gram, self._basis.double()).float()
        weighted = self._apply_metric(exact, inverse=False) * torch.from_numpy(self.group.weight)
        return weighted.T.contiguous()

    def synthesise(self, components: torch.Tensor) -> torch.Tensor:
        """[tokens, columns] of components [components, tokens]; the last ones may be left out.

        The few largest components are summed in float32. The others are stored with 8 bits, and
        are small: each token's are rounded to 8 bits too, at a few percent of a step, and summed in
        integers, which takes a quarter of the time.
        """
        g, precise = self.group, len(self.group.fine)
        total = components[:precise].T @ self._fine[: len(components)]
        rest = components[precise:]
        if len(rest):
            scaled = (rest * self._basis_scale[: len(rest), None]).T
            total += int8_rows(scaled, torch.from_numpy(g.basis[: len(rest)]))
        return self._apply_metric(total, inverse=True).div_(self._weight)

    @cached_property
    def _fine(self) -> torch.Tensor:
        return torch.from_numpy(self.group.fine).float()

    @cached_property
    def _basis_scale(self) -> torch.Tensor:
        return torch.from_numpy(self.group.basis_scale)

    @cached_property
    def _weight(self) -> torch.Tensor:
        return torch.from_numpy(self.group.weight)

    @cached_property
    def _directions(self) -> torch.Tensor:
        return torch.from_numpy(self.group.metric).float()

    @property
    def _basis(self) -> torch.Tensor:
        g = self.group
        coarse = torch.from_numpy(g.basis).float() * torch.from_numpy(g.basis_scale)[:, None]
        return torch.cat([torch.from_numpy(g.fine).float(), coarse])

    def _apply_metric(self, rows: torch.Tensor, *, inverse: bool) -> torch.Tensor:
        gain = torch.from_numpy(self.group.gain)
        if inverse:
            gain = 1 / (1 + gain) - 1
        return torch.addmm(rows, (rows @ self._directions) * gain, self._directions.T)


def int8_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` with each row of `left` rounded to 8 bits and `right` in int8, summed exactly
    in integers: 570 against 180 Gop/s of float32 on two cores of an Ice Lake server."""
    unit = left.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30) / 127
    # Contiguous: torch's int8 product is many times slower on a transposed matrix.
    codes = (left / unit).round_().contiguous()
    if hasattr(torch, "_int_mm"):
        return torch._int_mm(codes.to(torch.int8), right).float().mul_(unit)
    return (codes @ right.float()).mul_(unit)


def to_columns(cache: KVCache, spec: ModelSpec, groups: Sequence[tuple[int, int]]) -> torch.Tensor:
    """[tokens, columns] in float32, with RoPE undone; `groups` are ranges of layers."""
    keys = rope.undo(cache.keys, spec, cache.start)
    parts = []
    for first, last in groups:
        for side in (keys[first:last], cache.values[first:last].float()):
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
def dequantise(values, scales, shifts, centroids, steps, out):  # type: ignore[no-untyped-def]
    """out[c, t]: what an integer stands for, the mean of all that is rounded to it."""
    num_components, num_tokens = values.shape
    for c in range(num_components):
        for t in range(num_tokens):
            q = values[c, t]
            if q == 0:
                out[c, t] = 0.0
                continue
            scale = min(max(np.int64(scales[c]) + shifts[t], 0), len(centroids) - 1)
            size = abs(q)
            restored = (size + centroids[scale, min(size, 3) - 1]) * steps[t]
            out[c, t] = restored if q > 0 else -restored
