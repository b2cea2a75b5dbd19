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
    `begins` says where they begin. `intervals` [symbols, TABLES] is as in the decoder. Rows have
    room for 32 * STEPS tokens."""
    ROW: tl.constexpr = 32 * STEPS
    group, chunk = tl.program_id(0), tl.program_id(1)
    section = (chunk * tl.num_programs(0) + group).to(tl.int64)
    first, rows = tl.load(rows_of + group * 2), tl.load(rows_of + group * 2 + 1)
    num_tokens = tl.load(tokens_of + chunk)
    lane = tl.arange(0, 32)
    below = (1 << lane) - 1
    lanes = tl.minimum(num_tokens, 32)
    values += (section * num_rows + first) * ROW
    coarse += (section * num_rows + first) * ROW
    activity += section * num_blocks * ROW
    words += section * capacity
    scales += group * num_scales + first
    classes += chunk * 256
    x = tl.zeros((32,), tl.uint32) + 65536
    place = tl.zeros_like(lane) + capacity
    for back in range(rows):
        row = rows - 1 - back
        ahead = tl.maximum(row - 3, 0)
        _prefetch(values + ahead * ROW + STEPS * lane, ASM)
        if DIGITS:
            _prefetch(coarse + ahead * ROW + STEPS * lane, ASM)
        scale = tl.load(scales + row).to(tl.int32)
        intervals_of = ()
        integers = ()
        for j in tl.static_range(STEPS):
            token = (STEPS - 1 - j) * 32 + lane
            live = (lane < lanes) & (token < num_tokens)
            q = tl.load(values + row * ROW + token, mask=live, other=0).to(tl.int32)
            shift = 2 * (tl.load(classes + token).to(tl.int32) - 2) * shifted
            kind = tl.minimum(tl.maximum(scale + shift, 0), 63)
            act = tl.load(activity + row // 8 * ROW + token).to(tl.int32)
            if DIGITS:
                own = coarse + row * ROW + token
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
def push_classes(classes, tokens_of, intervals, words, begins, capacity):
    """Codes the step classes of one chunk per program: one lane, one table. As `push`, from the
    end."""
    chunk = tl.program_id(0)
    num_tokens = tl.load(tokens_of + chunk)
    words += chunk.to(tl.int64) * capacity
    x = tl.full((), 65536, tl.uint32)
    place = tl.full((), 0, tl.int32) + capacity
    for back in range(num_tokens):
        symbol = tl.load(classes + chunk * 256 + num_tokens - 1 - back).to(tl.int32)
        interval = tl.load(intervals + symbol).to(tl.uint32, bitcast=True)
        freq = interval >> 16
        full = (x >> 18) >= freq
        tl.store(words + place - 1, (x & 0xFFFF).to(tl.int16), mask=full)
        place -= full.to(tl.int32)
        x = tl.where(full, x >> 16, x)
        quotient = x // freq
        x = (quotient << 14) + (interval & 0xFFFF) + (x - quotient * freq)
    tl.store(words + place - 2, (x & 0xFFFF).to(tl.int16))
    tl.store(words + place - 1, (x >> 16).to(tl.int16))
    tl.store(begins + chunk, place - 2)


@triton.jit(do_not_specialize=["count"])
def gather(words, places, out, count, BLOCK: tl.constexpr):
    """Sections, one after the other: `places` [3, section] is where each begins in `words`, how
    many it has, and where they go."""
    section = tl.program_id(0)
    source = words + tl.load(places + section)
    length = tl.load(places + count + section)
    target = out + tl.load(places + 2 * count + section)
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        known = at < length
        tl.store(target + at, tl.load(source + at, mask=known, other=0), mask=known)
