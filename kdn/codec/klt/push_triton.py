"""The encoders of `symbols.py` as Triton kernels: the same bytes, one warp per section.

Which tables a section uses follows from its integers in reading order; coding runs the other way.
So a first kernel finds every token's activity class in every block, and a second one codes
backwards, filling a section's buffer from its end. Integers are `[chunk, group, row, token]`, 16
bits each.
"""

# Kernels are in Triton's language, which has no types, and of Python no `*tuple`.
# mypy: ignore-errors
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl

from kdn.codec.klt.symbols_triton import _classify, _count, _prefetch


@triton.jit
def find_activity(values, rows_of, thresholds, activity, num_rows, num_blocks):
    """Activity classes [chunk, group, block, token] of one section per program (group, chunk)."""
    group, chunk = tl.program_id(0), tl.program_id(1)
    section = (chunk * tl.num_programs(0) + group).to(tl.int64)
    first, rows = tl.load(rows_of + group * 2), tl.load(rows_of + group * 2 + 1)
    token = tl.arange(0, 256)
    values += (section * num_rows + first) * 256
    total = tl.zeros_like(token)
    size = tl.zeros_like(token)
    for block in range((rows + 7) // 8):
        total += 16 * size - (total >> 3)
        found = _classify(total, thresholds + (group * num_blocks + block) * 8)
        tl.store(activity + (section * num_blocks + block) * 256 + token, found.to(tl.uint8))
        size = tl.zeros_like(token)
        for r in tl.static_range(8):
            row = block * 8 + r
            value = tl.load(values + row * 256 + token, mask=row < rows, other=0).to(tl.int32)
            size += tl.minimum(tl.abs(value), 3)


@triton.jit
def push(
    values, coarse, activity, classes, scales, rows_of, tokens_of, intervals, words, begins,
    num_rows, num_scales, num_blocks, capacity, shifted,
    DIGITS: tl.constexpr, STEPS: tl.constexpr, TABLES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes one section per program (group, chunk) into its `capacity` words, from the end;
    `begins` says where they begin. `intervals` [symbols, TABLES] is as in the decoder."""
    group, chunk = tl.program_id(0), tl.program_id(1)
    section = (chunk * tl.num_programs(0) + group).to(tl.int64)
    first, rows = tl.load(rows_of + group * 2), tl.load(rows_of + group * 2 + 1)
    num_tokens = tl.load(tokens_of + chunk)
    lane = tl.arange(0, 32)
    below = (1 << lane) - 1
    lanes = tl.minimum(num_tokens, 32)
    values += (section * num_rows + first) * 256
    coarse += (section * num_rows + first) * 256
    activity += section * num_blocks * 256
    words += section * capacity
    scales += group * num_scales + first
    classes += chunk * 256
    x = tl.zeros((32,), tl.uint32) + 65536
    place = tl.zeros_like(lane) + capacity
    for back in range(rows):
        row = rows - 1 - back
        ahead = tl.maximum(row - 3, 0)
        _prefetch(values + ahead * 256 + 8 * lane, ASM)
        if DIGITS:
            _prefetch(coarse + ahead * 256 + 8 * lane, ASM)
        scale = tl.load(scales + row).to(tl.int32)
        intervals_of = ()
        integers = ()
        for j in tl.static_range(STEPS):
            token = (STEPS - 1 - j) * 32 + lane
            live = (lane < lanes) & (token < num_tokens)
            q = tl.load(values + row * 256 + token, mask=live, other=0).to(tl.int32)
            shift = 2 * (tl.load(classes + token).to(tl.int32) - 2) * shifted
            kind = tl.minimum(tl.maximum(scale + shift, 0), 63)
            act = tl.load(activity + row // 8 * 256 + token).to(tl.int32)
            if DIGITS:
                own = coarse + row * 256 + token
                p = tl.load(own, mask=live, other=0).to(tl.int32)
                left = tl.load(own - 1, mask=live & (token > 0), other=0)
                right = tl.load(own + 1, mask=live & (token + 1 < num_tokens), other=0)
                near = (left != 0).to(tl.int32) + (right != 0).to(tl.int32)
                more = 1536 + kind * 2 + (tl.abs(p) > 1).to(tl.int32)
                table = tl.where(p == 0, (kind * 8 + act) * 3 + near, more)
                digit = q - 3 * p
                digit = tl.where(p < 0, -digit, digit)
                symbol = (digit < 0).to(tl.int32) + 2 * (digit > 0).to(tl.int32)
            else:
                table = kind * 8 + act
                size = tl.abs(q)
                symbol = tl.where(size <= 7, 2 * size - (q < 0).to(tl.int32), 15)
            found = tl.load(intervals + symbol * TABLES + table).to(tl.uint32, bitcast=True)
            intervals_of = intervals_of + (found,)
            integers = integers + (q,)
        for j in tl.static_range(STEPS):
            live = (lane < lanes) & ((STEPS - 1 - j) * 32 + lane < num_tokens)
            freq = intervals_of[j] >> 16
            full = live & ((x >> 18) >= freq)
            total, rank = _count(full, below, ASM)
            spot = place - total + rank
            place = place - total
            if not DIGITS:
                escaped = live & (tl.abs(integers[j]) > 7)
                escapes, before = _count(escaped, below, ASM)
                spot += before - escapes
                after = spot + full.to(tl.int32)
                tl.store(words + after, integers[j].to(tl.int16), mask=escaped)
                place = place - escapes
            tl.store(words + spot, (x & 0xFFFF).to(tl.int16), mask=full)
            x = tl.where(full, x >> 16, x)
            quotient = x // freq
            pushed = (quotient << 14) + (intervals_of[j] & 0xFFFF) + (x - quotient * freq)
            x = tl.where(live, pushed, x)
    place -= 2 * lanes
    own_lane = lane < lanes
    tl.store(words + place + 2 * lane, (x & 0xFFFF).to(tl.int16), mask=own_lane)
    tl.store(words + place + 2 * lane + 1, (x >> 16).to(tl.int16), mask=own_lane)
    tl.store(begins + section, tl.max(place, 0))


@triton.jit
def leave(
    residual, coarse, large, most, halvings, column_scale, fix_step, out, largest, width, columns,
    group, num_groups, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What components leave of one group's residual [tokens, columns], in whole steps of the last
    level, as [chunk, group, column, token]; `largest` [tiles] tells how far it goes."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (token >= 0)[:, None] & (column < columns)[None, :]
    own = column < columns
    place = token.to(tl.int64)[:, None] * columns + column[None, :]
    scale = tl.load(most + token) / 127 * tl.load(halvings + token)
    sums = tl.load(coarse + place, mask=inside, other=0.0) * scale[:, None]
    sums += tl.load(large + place, mask=inside, other=0.0)
    sums *= tl.load(column_scale + column, mask=own, other=0.0)[None, :]
    there = token.to(tl.int64)[:, None] * width + (group * columns + column)[None, :]
    error = tl.load(residual + there, mask=inside, other=0.0) - sums
    error = error / tl.load(fix_step + column, mask=own, other=1.0)[None, :]
    error = error / tl.load(halvings + token)[:, None]
    size = tl.max(tl.max(tl.where(error == error, tl.abs(error), 1e30), 1), 0)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest + tile, size)
    whole = tl.floor(tl.abs(error) + 0.5)
    whole = tl.where(error < 0, -whole, whole)
    whole = tl.trans(tl.minimum(tl.maximum(whole, -32767.0), 32767.0))
    chunk, spot = token // 256, token % 256
    rows = (chunk * num_groups + group).to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(out + rows * 256 + spot[None, :], whole.to(tl.int16), mask=own[:, None])
