"""Between a group's columns and the components that are coded, all `[rows, tokens]`.

    values = prediction from the token ids + basis' components

**Prediction.** Reader and writer have the token ids, so what follows from them is not stored: a
linear function, of low rank, of the embeddings of a token and of the two before it.

**Metric.** Not every error hurts alike. Calibration measures the Fisher information of the values:
how much the model's output distribution moves (in KL divergence) when a value does. Of it the
profile keeps, per group of layers, a weight per column and a few directions V that matter more:
`W = (1 + V diag(gain) V') diag(weight)`, so that |W error|^2 is twice the divergence.

**Components.** The principal components U of `W residual`: `y = U' W r`, and back
`r = W^-1 U y`. Keys and values of a group's layers share one basis, since both are read off the
same hidden state. As `|W error| = |error of y|`, one step size serves all components. The profile
holds the rows of `U' (1 + V diag(gain) V')^-1`: what is left of W^-1 is a factor per column.

**Speed.** The few largest components are summed in float32, together with the prediction. The
others are stored with 8 bits and are small: each token's are rounded to 8 bits too, at a few
percent of a step, and summed in integers, three to four times faster (900 against 256 Gop/s on two
cores of an Ice Lake server). Analysis does the same, after the large components are taken away.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from kdn.cache.keys import Chunk
from kdn.codec.klt.columns import Floats
from kdn.codec.klt.profile import CONTEXT_TOKENS, Group, Profile
from kdn.errors import MismatchError

Bytes = npt.NDArray[np.int8]
ALL = slice(None)


class Predictor:
    """What the token ids tell of each token: a few latent variables, [rank, tokens]. Each group's
    values follow from them."""

    def __init__(self, profile: Profile) -> None:
        t = profile.tensors
        self._codes = torch.from_numpy(t["embed.codes"])
        self._scale = torch.from_numpy(t["embed.scale"])
        self._mix = torch.from_numpy(t["predict.mix"]).float()

    def __call__(self, chunk: Chunk) -> torch.Tensor:
        return (self._features(chunk) @ self._mix).T.contiguous()

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
class Packed:
    """Components ready to be summed: the large ones as they are, of the others
    `codes * token_scale` (their basis rows' scales included)."""

    large: Floats
    codes: Bytes
    token_scale: Floats


class GroupTransform:
    """The matrices of a group, from what the profile stores of them."""

    def __init__(self, group: Group, profile: Profile) -> None:
        self.group = group
        out = torch.from_numpy(profile.tensors["predict.out"][:, group.columns]).float()
        self.rank = len(out)
        large = torch.from_numpy(group.fine).float() / torch.from_numpy(group.weight)
        # One product sums prediction and large components.
        self._float_rows = torch.cat([out, large])
        self._coarse_rows = torch.from_numpy(group.basis)
        self.column_scale: Floats = np.reciprocal(group.weight)
        self.bias: Floats = np.ascontiguousarray(profile.tensors["predict.bias"][group.columns])

    @property
    def num_large(self) -> int:
        return len(self.group.fine)

    def predict(self, latent: torch.Tensor) -> torch.Tensor:
        return torch.addmm(
            torch.from_numpy(self.bias)[:, None], self._float_rows[: self.rank].T, latent
        )

    def sum_large(self, weights: torch.Tensor, rows: slice = ALL) -> torch.Tensor:
        """Prediction (but for its bias) and large components, given latent variables and these
        components one under the other; the last of these may be missing."""
        return self._float_rows[: len(weights), rows].T @ weights

    def sum_missed(self, large: torch.Tensor) -> torch.Tensor:
        """The same of large components alone."""
        return self._float_rows[self.rank : self.rank + len(large)].T @ large

    def sum_coarse(self, codes: Bytes, rows: slice = ALL) -> torch.Tensor:
        """The other components, in units of column and token scale; the last may be missing."""
        basis = self._coarse_rows[: len(codes), rows]
        if not len(codes):
            return torch.zeros((basis.shape[1], codes.shape[1]), dtype=torch.int32)
        return int8_product(basis.T, torch.from_numpy(codes))

    def analyse(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Components of a residual, and what the large ones leave of it."""
        large_rows, coarse_rows, coarse_scale = self._analysis
        large = large_rows @ residual
        rest = torch.addmm(residual, self._float_rows[self.rank :].T, large, alpha=-1)
        codes = np.empty(tuple(rest.shape), dtype=np.int8)
        unit = np.empty(rest.shape[1], dtype=np.float32)
        _to_bytes(rest.numpy(), self.group.weight, codes, unit)
        coarse = int8_product(coarse_rows, torch.from_numpy(codes)).float()
        coarse *= coarse_scale[:, None]
        coarse *= torch.from_numpy(unit)
        return torch.cat([large, coarse]), rest

    @cached_property
    def _analysis(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows that give the large components of a residual, and those (int8, and their scale)
        that give the others of a weighted one.

        The stored basis is rounded: dividing by its Gram matrix makes analysis and synthesis
        inverses on its span.
        """
        g = self.group
        coarse = torch.from_numpy(g.basis).float() * torch.from_numpy(g.basis_scale)[:, None]
        basis = torch.cat([torch.from_numpy(g.fine).float(), coarse])
        directions, gain = torch.from_numpy(g.metric).float(), torch.from_numpy(g.gain)
        measured = torch.addmm(basis, (basis @ directions) * gain, directions.T)
        dual = torch.linalg.solve((measured @ measured.T).double(), measured.double()).float()
        dual = torch.addmm(dual, (dual @ directions) * gain, directions.T)
        large = dual[: len(g.fine)] * torch.from_numpy(g.weight)
        rest = dual[len(g.fine) :]
        scale = rest.abs().amax(dim=1).clamp_(min=1e-30) / 127
        return large, (rest / scale[:, None]).round_().to(torch.int8), scale


def int8_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The exact product of int8 matrices, as int32."""
    if hasattr(torch, "_int_mm"):
        return torch._int_mm(left, right)
    # Exact as well: float64 holds every sum.
    return (left.double() @ right.double()).to(torch.int32)


@njit(nogil=True, cache=True)
def _restore(values, scale, shifts, offsets, factor, out):  # type: ignore[no-untyped-def]
    """One component's integers to sizes in steps. `offsets` [scale classes * 4] is what to add to
    sizes 0, 1, 2 and more."""
    top = np.int32(len(offsets) // 4 - 1)
    for t in range(len(values)):
        size = abs(values[t])
        found = min(max(scale + shifts[t], np.int32(0)), top)
        restored = (np.float32(size) + offsets[found * 4 + min(size, np.int32(3))]) * factor
        out[t] = restored if values[t] >= 0 else -restored


@njit(nogil=True, cache=True)
def _grow(row, factor, most):  # type: ignore[no-untyped-def]
    for t in range(len(row)):
        most[t] = max(most[t], abs(row[t]) * factor)


@njit(nogil=True, cache=True)
def _round_row(row, factor, inverse, out):  # type: ignore[no-untyped-def]
    for t in range(len(row)):
        out[t] = np.int8(np.rint(row[t] * factor * inverse[t]))


@njit(nogil=True, cache=True)
def pack(values, scales, shifts, centroids, steps, row_scale, large, codes, token_scale):  # type: ignore[no-untyped-def]
    """Integers [components, tokens] to what is summed. An integer stands for the mean of all that
    is rounded to it; `steps` [tokens] is the size of one."""
    num_tokens, num_large = values.shape[1], len(large)
    table = np.zeros((len(centroids), 4), np.float32)
    table[:, 1:] = centroids
    offsets, wide_shifts = table.ravel(), shifts.astype(np.int32)
    rest = np.empty((len(codes), num_tokens), np.float32)
    most = np.full(num_tokens, 1e-30, np.float32)
    for c in range(num_large):
        own = large[c]
        _restore(values[c], np.int32(scales[c]), wide_shifts, offsets, np.float32(1), own)
        for t in range(num_tokens):
            own[t] *= steps[t]
    for c in range(len(codes)):
        place = num_large + c
        _restore(
            values[place], np.int32(scales[place]), wide_shifts, offsets, row_scale[c], rest[c]
        )
        _grow(rest[c], np.float32(1), most)
    inverse = np.float32(127) / most
    for c in range(len(codes)):
        _round_row(rest[c], np.float32(1), inverse, codes[c])
    for t in range(num_tokens):
        token_scale[t] = most[t] / np.float32(127) * steps[t]


@njit(nogil=True, cache=True)
def _to_bytes(rows, weight, codes, unit):  # type: ignore[no-untyped-def]
    """Weighted rows [columns, tokens] to 8 bits, with one unit per token."""
    most = np.full(rows.shape[1], 1e-30, np.float32)
    for c in range(len(rows)):
        _grow(rows[c], weight[c], most)
    inverse = np.float32(127) / most
    for c in range(len(rows)):
        _round_row(rows[c], weight[c], inverse, codes[c])
    for t in range(len(most)):
        unit[t] = most[t] / np.float32(127)


@njit(nogil=True, cache=True)
def _leftover_row(rest, missed, coarse, scale, token_scale, inverse, error_inverse, out):  # type: ignore[no-untyped-def]
    largest = np.float32(0)
    for t in range(len(out)):
        error = rest[t] + missed[t] - np.float32(coarse[t]) * (scale * token_scale[t])
        steps = error * (inverse * error_inverse[t])
        largest = max(largest, abs(steps))
        out[t] = np.int32(np.rint(steps))
    return largest


@njit(nogil=True, cache=True)
def leftover(rest, missed, coarse, column_scale, token_scale, error_column, error_token, out):  # type: ignore[no-untyped-def]
    """What all components leave of a group's values, in whole steps of the last level; returns
    the largest, before rounding."""
    largest = np.float32(0)
    error_inverse = np.float32(1) / error_token
    for c in range(rest.shape[0]):
        found = _leftover_row(
            rest[c], missed[c], coarse[c], column_scale[c], token_scale,
            np.float32(1) / error_column[c], error_inverse, out[c],
        )  # fmt: skip
        largest = max(largest, found)
    return largest
