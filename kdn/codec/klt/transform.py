"""Between a group's columns `[tokens, columns]` and the components that are coded,
`[components, tokens]`.

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
cores of an Ice Lake server). Analysis does the same, after the large components are taken away, and
so does prediction: its few largest latent variables are precise, the others have 8 bits. Writer and
reader round alike, so that only what the rounding adds to the residual remains, outside the span of
the basis: 0.4 % of the error at the finest level that has no correction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from kdn.cache.keys import Chunk
from kdn.codec.klt.columns import Floats, Scaled
from kdn.codec.klt.duals import Dual
from kdn.codec.klt.profile import CONTEXT_TOKENS, Group, Profile
from kdn.errors import MismatchError

Bytes = npt.NDArray[np.int8]
ALL = slice(None)
_TILE = 16  # integers in a cache line


@dataclass(frozen=True)
class Latent:
    """What the token ids tell of each token: the largest variables as they are, of the others
    `codes * unit`, all [variables, tokens]. Each group's values follow from them."""

    fine: torch.Tensor
    codes: torch.Tensor
    unit: Floats


class Predictor:
    """The latent variables of a chunk's tokens, the same on every machine: sums of integers."""

    def __init__(self, profile: Profile) -> None:
        t = profile.tensors
        self._codes = torch.from_numpy(t["embed.codes"])
        self._mix = torch.from_numpy(t["predict.mix"])
        self._mix_scale = torch.from_numpy(t["predict.mix_scale"])[:, None]
        self._num_fine = len(t["predict.fine"])

    def __call__(self, chunk: Chunk) -> Latent:
        latent = int8_product(self._mix.T, self._features(chunk)) * self._mix_scale
        rest = latent[self._num_fine :]
        most = rest.abs().amax(dim=0) if len(rest) else rest.new_zeros(chunk.num_tokens)
        unit = most.clamp_(min=1e-30) / 127
        codes = (rest / unit).round_().to(torch.int8)
        return Latent(latent[: self._num_fine], codes, unit.numpy())

    def _features(self, chunk: Chunk) -> torch.Tensor:
        """Embeddings of each token and under them of those before it, [3 E, tokens]; zero before
        the beginning."""
        before = CONTEXT_TOKENS - 1
        history = chunk.history[-before:]
        ids = torch.from_numpy(np.concatenate([history, chunk.tokens]).astype(np.int64))
        if len(ids) and int(ids.max()) >= len(self._codes):
            raise MismatchError(
                f"expected token ids below {len(self._codes)}, found {int(ids.max())}"
            )
        known = self._codes[ids]
        padded = torch.cat([known.new_zeros(before - len(history), known.shape[1]), known])
        count = chunk.num_tokens
        shifted = [padded[before - i : before - i + count] for i in range(before + 1)]
        return torch.cat(shifted, 1).T.contiguous()


@dataclass(frozen=True)
class PackedComponents:
    """Components ready to be summed: the large ones as they are, of the others
    `codes * token_scale` (their basis rows' scales included)."""

    large: Floats
    codes: Bytes
    token_scale: Floats


class GroupTransform:
    """The matrices of a group, from what the profile stores of them."""

    def __init__(self, group: Group, profile: Profile) -> None:
        self.group = group
        t, columns = profile.tensors, group.columns
        fine = torch.from_numpy(t["predict.fine"][:, columns]).float()
        large = torch.from_numpy(group.fine).float() / torch.from_numpy(group.weight)
        self._num_latent = len(fine)
        # One product sums what is precise of prediction and components.
        self._float_rows = torch.cat([fine, large])
        self._latent_rows = torch.from_numpy(np.ascontiguousarray(t["predict.out"][:, columns]))
        self._coarse_rows = torch.from_numpy(group.basis)
        self._large_rows = large.numpy()
        self.latent_scale: Floats = np.ascontiguousarray(t["predict.out_scale"][columns])
        self.column_scale: Floats = np.reciprocal(group.weight)
        self.bias: Floats = np.ascontiguousarray(t["predict.bias"][columns])

    @property
    def num_large(self) -> int:
        return len(self.group.fine)

    def predict(self, latent: Latent) -> torch.Tensor:
        out = self.sum_latent(latent).float()
        out *= torch.from_numpy(self.latent_scale)
        out *= torch.from_numpy(latent.unit)[:, None]
        out += torch.from_numpy(self.bias)
        return out.addmm_(latent.fine.T, self._float_rows[: self._num_latent])

    def sum_latent(self, latent: Latent, columns: slice = ALL) -> torch.Tensor:
        """The small latent variables' part of the prediction, in units of theirs and of
        `latent_scale`."""
        return _sum_bytes(self._latent_rows[:, columns], latent.codes)

    def sum_large(self, latent: Latent, large: Floats, columns: slice = ALL) -> torch.Tensor:
        """The large latent variables' part of the prediction and the large components; the last
        of these may be missing."""
        weights = torch.cat([latent.fine, torch.from_numpy(large)])
        return weights.T @ self._float_rows[: len(weights), columns]

    def sum_missed(self, large: torch.Tensor) -> torch.Tensor:
        """The same of large components alone."""
        first = self._num_latent
        return large.T @ self._float_rows[first : first + len(large)]

    @property
    def at_once(self) -> Sequence[slice]:
        """Columns that one sum of the other components is made of: all, or fewer at a time."""
        return [slice(0, len(self.bias))]

    def coarse(self, packed: PackedComponents) -> Callable[[slice], Scaled]:
        """The sums of the other components, of some columns that are summed at once."""
        return lambda columns: Scaled(
            self.sum_coarse(packed.codes, columns).numpy(),
            packed.token_scale,
            self.column_scale[columns],
        )

    def sum_coarse(self, codes: Bytes, columns: slice = ALL) -> torch.Tensor:
        """The other components, in units of token and column scale; the last may be missing."""
        return _sum_bytes(self._coarse_rows[: len(codes), columns], torch.from_numpy(codes))

    def sum_alike(self, components: Floats, first: int) -> Floats:
        """What components from `first` on add to the columns of tokens that all have these."""
        num_large = max(0, self.num_large - first)
        out = np.zeros(len(self.bias), np.float32)
        begin = first - self.num_large + num_large
        self._add_coarse(components[num_large:], begin, out)
        out *= self.column_scale
        out += components[:num_large] @ self._large_rows[first:]
        return out

    def _add_coarse(self, components: Floats, begin: int, out: Floats) -> None:
        """The others, from that row of them on, to weighted columns."""
        rows = slice(begin, begin + len(components))
        weights = components * self.group.basis_scale[rows]
        add_rows(weights, self.group.basis[rows], out)

    def analyse(self, residual: torch.Tensor, dual: Dual) -> tuple[torch.Tensor, torch.Tensor]:
        """Components of a residual, and what the large ones leave of it."""
        large = dual.large @ residual.T
        rest = torch.addmm(residual, large.T, self._float_rows[self._num_latent :], alpha=-1)
        codes = np.empty(tuple(rest.shape), dtype=np.int8)
        unit = np.empty(len(rest), dtype=np.float32)
        _to_bytes(rest.numpy(), self.group.weight, codes, unit)
        coarse = int8_product(dual.codes, torch.from_numpy(codes).T).float()
        coarse *= dual.scale[:, None]
        coarse *= torch.from_numpy(unit)
        return torch.cat([large, coarse]), rest


def _sum_bytes(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[tokens, columns] of codes [rows, tokens]."""
    if not len(codes):
        return torch.zeros((codes.shape[1], rows.shape[1]), dtype=torch.int32)
    return int8_product(codes.T, rows)


def int8_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The exact product of int8 matrices, as int32."""
    if hasattr(torch, "_int_mm"):
        return torch._int_mm(_plain(left), _plain(right))
    # Exact as well: float64 holds every sum.
    return (left.double() @ right.double()).to(torch.int32)


def _plain(matrix: torch.Tensor) -> torch.Tensor:
    """A single row or column may have any strides, and torch multiplies some of them wrongly (a row
    of strides (1, 1), seen in 2.13): such a one is copied."""
    if min(matrix.shape) > 1:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


@njit(nogil=True, cache=True)
def add_rows(weights, rows, out):  # type: ignore[no-untyped-def]
    """weights @ rows, where many weights are zero."""
    for r in range(len(weights)):
        weight = weights[r]
        if weight != 0:
            row = rows[r]
            for c in range(len(out)):
                out[c] += weight * np.float32(row[c])


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
def _grow(row, most):  # type: ignore[no-untyped-def]
    for t in range(len(row)):
        most[t] = max(most[t], abs(row[t]))


@njit(nogil=True, cache=True)
def _round_row(row, inverse, out):  # type: ignore[no-untyped-def]
    for t in range(len(row)):
        out[t] = np.int8(np.rint(row[t] * inverse[t]))


@njit(nogil=True, cache=True)
def pack(values, scales, shifts, centroids, steps, row_scale, large, codes, token_scale):  # type: ignore[no-untyped-def]
    """Integers [components, tokens] to what is summed. An integer stands for itself and its
    centroid's offset; `steps` [tokens] is the size of one."""
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
        _grow(rest[c], most)
    inverse = np.float32(127) / most
    for c in range(len(codes)):
        _round_row(rest[c], inverse, codes[c])
    for t in range(num_tokens):
        token_scale[t] = most[t] / np.float32(127) * steps[t]


@njit(nogil=True, cache=True)
def _largest(row, weight):  # type: ignore[no-untyped-def]
    most = np.float32(1e-30)
    for c in range(len(row)):
        most = max(most, abs(row[c]) * weight[c])
    return most


@njit(nogil=True, cache=True)
def _weighted_bytes(row, weight, inverse, out):  # type: ignore[no-untyped-def]
    for c in range(len(row)):
        out[c] = np.int8(np.rint(row[c] * weight[c] * inverse))


@njit(nogil=True, cache=True)
def _to_bytes(rows, weight, codes, unit):  # type: ignore[no-untyped-def]
    """Weighted rows [tokens, columns] to 8 bits, with one unit per token."""
    for t in range(len(rows)):
        most = _largest(rows[t], weight)
        _weighted_bytes(rows[t], weight, np.float32(127) / most, codes[t])
        unit[t] = most / np.float32(127)


@njit(nogil=True, cache=True)
def _leftover_row(rest, missed, coarse, token_scale, column_scale, error_token, error_column, out):  # type: ignore[no-untyped-def]
    largest = np.float32(0)
    for c in range(len(out)):
        error = rest[c] + missed[c] - np.float32(coarse[c]) * (token_scale * column_scale[c])
        steps = error * (error_token * error_column[c])
        largest = max(largest, abs(steps))
        out[c] = np.int32(np.rint(steps))
    return largest


@njit(nogil=True, cache=True)
def leftover(rest, missed, coarse, token_scale, column_scale, error_token, error_column, out):  # type: ignore[no-untyped-def]
    """What all components leave of a group's values, in whole steps of the last level, `out`
    [columns, tokens]; returns the largest, before rounding."""
    largest = np.float32(0)
    inverse = np.float32(1) / error_column
    found = np.empty(rest.shape, np.int32)
    for t in range(len(rest)):
        most = _leftover_row(
            rest[t], missed[t], coarse[t], token_scale[t], column_scale,
            np.float32(1) / error_token[t], inverse, found[t],
        )  # fmt: skip
        largest = max(largest, most)
    transpose(found, out)
    return largest


@njit(nogil=True, cache=True)
def transpose(source, target):  # type: ignore[no-untyped-def]
    """Tile by tile, so that both sides stay in the nearest cache."""
    rows, columns = source.shape
    for begin in range(0, columns, _TILE):
        for first in range(0, rows, _TILE):
            last, end = min(first + _TILE, rows), min(begin + _TILE, columns)
            for j in range(begin, end):
                for i in range(first, last):
                    target[j, i] = source[i, j]
