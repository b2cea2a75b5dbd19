"""From components to integers, and what these leave of the values, as Triton kernels: what
`transform.py` and `symbols.split_levels` do, rounded alike."""

# Kernels are in Triton's language, which has no types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(256)
LARGEST = tl.constexpr(32767.0)
TO_WHOLE = tl.constexpr(12582912.0)
"""Added and taken away again it leaves the nearest integer, the even one of two."""


@triton.jit
def _rounded(
    exact, scales, centroids, token, row, own, halving, count
):  # fmt: skip
    """Integers of tokens and rows, and how large each of them is restored, in its token's steps."""
    known = (token >= 0)[:, None] & (row < count)[None, :]
    value = tl.load(exact + token.to(tl.int64)[:, None] * count + row[None, :], mask=known,
                    other=0.0)  # fmt: skip
    value = tl.div_rn(value, tl.broadcast_to(halving[:, None], value.shape))
    # What is not a number is reported by its chunk's sum: see `encoder_triton.py`.
    value = tl.where(value == value, tl.minimum(tl.maximum(value, -LARGEST), LARGEST), 0.0)
    q = ((value + TO_WHOLE) - TO_WHOLE).to(tl.int32)
    scale = tl.load(scales + row, mask=row < count, other=0).to(tl.int32)
    kind = tl.minimum(tl.maximum(scale[None, :] + 2 * (own - 2)[:, None], 0), 63)
    size = tl.abs(q)
    return q, size.to(tl.float32) + tl.load(centroids + kind * 4 + tl.minimum(size, 3))


@triton.jit(do_not_specialize=["group"])
def quantise(
    exact, classes, class_factor, scales, centroids, row_scale, planes, codes, large, most, group,
    num_groups, num_rows, level_stride, count, num_fine, LEVELS: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Of one group's components [tokens, count] in finest steps: the integers of all levels
    [level, chunk, group, row, token]; what a reader makes of them, the large ones as two 16-bit
    floats each [tokens, 2 * num_fine], the others as bytes [tokens, count - num_fine] (in 16-bit
    floats, which hold them) in units of `most` [tokens] / 127."""
    token, chunk = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(0) * BT // CHUNK
    own = tl.load(classes + token).to(tl.int32)
    halving = tl.load(class_factor + own)
    plane = planes + (chunk * num_groups + group).to(tl.int64) * num_rows * CHUNK
    plane += (token % CHUNK)[None, :]
    biggest = tl.full((BT,), 1e-30, tl.float32)
    for first in range(0, count, BR):
        row = first + tl.arange(0, BR)
        q, amount = _rounded(exact, scales, centroids, token, row, own, halving, count)
        is_coarse = (row >= num_fine) & (row < count)
        unit = tl.load(row_scale + row - num_fine, mask=is_coarse, other=0.0)
        biggest = tl.maximum(biggest, tl.max(tl.abs(amount * unit[None, :]), 1))
        for back in tl.static_range(LEVELS):
            at = plane + (LEVELS - 1 - back) * level_stride + row[:, None] * CHUNK
            tl.store(at, tl.trans(q).to(tl.int16), mask=(row < count)[:, None])
            size = (tl.abs(q) + 1) // 3
            q = tl.where(q < 0, -size, size)
    tl.store(most + token, biggest)
    inverse = tl.div_rn(127.0, biggest)
    for first in range(0, count, BR):
        row = first + tl.arange(0, BR)
        q, amount = _rounded(exact, scales, centroids, token, row, own, halving, count)
        amount = tl.where(q < 0, -amount, amount)
        is_coarse = (row >= num_fine) & (row < count)
        unit = tl.load(row_scale + row - num_fine, mask=is_coarse, other=0.0)
        code = (amount * unit[None, :]) * inverse[:, None]
        code = (code + TO_WHOLE) - TO_WHOLE
        line = codes + token.to(tl.int64)[:, None] * (count - num_fine)
        tl.store(line + (row - num_fine)[None, :], code.to(tl.float16), mask=is_coarse[None, :])
        whole = amount * halving[:, None]
        upper = whole.to(tl.float16)
        is_fine = (row < num_fine)[None, :]
        line = large + token.to(tl.int64)[:, None] * (2 * num_fine)
        tl.store(line + row[None, :], upper, mask=is_fine)
        lower = (whole - upper.to(tl.float32)).to(tl.float16)
        tl.store(line + (num_fine + row)[None, :], lower, mask=is_fine)


@triton.jit(do_not_specialize=["group"])
def leave(
    residual, coarse, large, most, classes, class_factor, column_scale, fix_step, out, largest,
    width, first_column, columns, most_columns, group, num_groups, num_tiles,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What components leave of one group's residual [tokens, width], in whole steps of the last
    level, as [chunk, group, column, token]; `largest` [group, token tile, column tile] tells how
    far it goes."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    own = column < columns
    inside = (token >= 0)[:, None] & own[None, :]
    place = token.to(tl.int64)[:, None] * columns + column[None, :]
    halving = tl.load(class_factor + tl.load(classes + token).to(tl.int32))
    scale = tl.load(most + token) / 127 * halving
    sums = tl.load(coarse + place, mask=inside, other=0.0) * scale[:, None]
    sums += tl.load(large + place, mask=inside, other=0.0)
    sums *= tl.load(column_scale + column, mask=own, other=0.0)[None, :]
    there = token.to(tl.int64)[:, None] * width + (first_column + column)[None, :]
    error = tl.load(residual + there, mask=inside, other=0.0) - sums
    error = error / tl.load(fix_step + column, mask=own, other=1.0)[None, :]
    error = error / halving[:, None]
    size = tl.max(tl.max(tl.where(error == error, tl.abs(error), 1e30), 1), 0)
    tile = (group * tl.num_programs(0) + tl.program_id(0)) * num_tiles + tl.program_id(1)
    tl.store(largest + tile, size)
    whole = tl.floor(tl.abs(error) + 0.5)
    whole = tl.where(error < 0, -whole, tl.where(error == error, whole, 0.0))
    whole = tl.trans(tl.minimum(tl.maximum(whole, -LARGEST), LARGEST))
    chunk, spot = token // CHUNK, token % CHUNK
    rows = (chunk * num_groups + group).to(tl.int64)[None, :] * most_columns + column[:, None]
    tl.store(out + rows * CHUNK + spot[None, :], whole.to(tl.int16), mask=own[:, None])
