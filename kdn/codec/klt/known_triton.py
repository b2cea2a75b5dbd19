"""The parts of a chunk that follow from token ids and positions alone, as Triton kernels: the
predicted part of the matrix A, and the rotation of each token's keys. Each takes one launch; as
tensor operations they would take a dozen, at 10 us of host time each."""

# Kernels are in Triton's language, which has no types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a small number and taken off again, it leaves the nearest whole one."""


@triton.jit(do_not_specialize=["num_sinks"])
def place_latents(
    sums, scale, factor, out, sum_width, out_width, rank, num_fine, num_latents, num_sinks,
    BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Products [tokens, rank] to latent variables, rounded as `transform.Predictor` does, in A; the
    first `num_sinks` tokens are not predicted."""
    token, column = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BR)
    known = column < rank
    place = sums + token[:, None] * sum_width + column[None, :]
    whole = tl.load(place, mask=known[None, :], other=0)
    value = whole.to(tl.float32) * tl.load(scale + column, mask=known, other=0.0)[None, :]
    is_rest = (column >= num_fine)[None, :]
    most = tl.max(tl.where(is_rest, tl.abs(value), 0.0), 1)
    unit = tl.div_rn(tl.maximum(most, 1e-30), tl.full((BT,), 127.0, tl.float32))
    steps = tl.div_rn(value, tl.broadcast_to(unit[:, None], (BT, BR)))
    rounded = ((steps + ROUNDING) - ROUNDING) * unit[:, None]
    value = tl.where(is_rest, rounded, value)
    value = value * tl.load(factor + column, mask=known, other=0.0)[None, :]
    value = tl.where((token < num_sinks)[:, None], 0.0, value)
    line = out + token.to(tl.int64)[:, None] * out_width + column[None, :]
    tl.store(line, value.to(tl.float16), mask=(column < num_latents)[None, :])


@triton.jit
def turn_tables(positions, turns, cos, sin, num_frequencies, BT: tl.constexpr, BF: tl.constexpr):
    """Cosines and sines [tokens, frequencies] of `turns` [2, frequencies]: angle per position, and
    amplitude; angles in float64."""
    token, column = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BF)
    known = column < num_frequencies
    angle = tl.load(positions + token).to(tl.float64)[:, None]
    angle = angle * tl.load(turns + column, mask=known, other=0.0)[None, :]
    size = tl.load(turns + num_frequencies + column, mask=known, other=0.0)[None, :]
    place = token[:, None] * num_frequencies + column[None, :]
    cosine, sine = (tl.cos(angle) * size).to(tl.float32), (tl.sin(angle) * size).to(tl.float32)
    tl.store(cos + place, cosine.to(cos.dtype.element_ty), mask=known[None, :])
    tl.store(sin + place, sine.to(sin.dtype.element_ty), mask=known[None, :])
