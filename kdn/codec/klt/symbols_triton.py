"""The decoders of `symbols.py` as Triton kernels: the same symbols, one warp per section.

A section's 32 lanes are the 32 threads of a warp; a program walks down the rows of its section and
takes a row's tokens 32 at a time. All sections of one kind (level, entering or digits) of all
chunks and groups run in one launch. Lanes that need a word find its place by a ballot.

Integers are kept as two planes of bytes, `[chunk, group, row, half, lane, step]`, so that four of a
lane's tokens of a row (32 apart) are one word: the low byte of every row, and the high byte of the
first `wide` rows only, whose components are the largest. Sinks have a word for each. A value that
does not fit, like a stream that does not end as it should, sets its chunk's status: the caller lets
the reference decode that chunk, and it says what is wrong. A damaged section may read on into what
follows it, as far as two words a token and row: the buffer of words is so much longer.

**Speed.** What waits is the chain from one state to the next: so what does not depend on the state
(bounds of tables, the level before) is loaded before it, nothing is stored until a row is done, and
a symbol is found by comparing with all bounds at once, two of them in each 32-bit word and
instruction. What a row needs is asked for a row ahead, words too: one that is missing holds up all
lanes. Rows of a block that have the same scale class share what was loaded. Tables are stored bound
by bound: what the lanes of a warp read then lies in a few lines.
"""

# Kernels are in Triton's language, which has no types, and of Python no `*tuple`.
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM108
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

LANES = tl.constexpr(32)
CHUNK = tl.constexpr(256)
AHEAD_WORDS = tl.constexpr(64)
MAX_RUNS = tl.constexpr(64)


@triton.jit
def _count(flag, below, ASM: tl.constexpr):
    """How many lanes are marked, and how many of those before each lane."""
    marked = flag.to(tl.int32)
    if ASM:
        total, rank = tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .b32 m, t;
            setp.ne.s32 p, $2, 0;
            vote.sync.ballot.b32 m, p, 0xffffffff;
            and.b32 t, m, $3;
            popc.b32 $0, m; popc.b32 $1, t; }""",
            "=r,=r,r,r",
            [marked, below],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        rank = tl.cumsum(marked, 0) - marked
        total = tl.sum(marked, 0) + tl.zeros_like(marked)
    return total, rank


@triton.jit
def _mask(flag, lane, ASM: tl.constexpr):
    """Bit i of the result, the same in all lanes, is lane i's mark."""
    marked = flag.to(tl.int32)
    if ASM:
        found = tl.inline_asm_elementwise(
            """{ .reg .pred p;
            setp.ne.s32 p, $1, 0;
            vote.sync.ballot.b32 $0, p, 0xffffffff; }""",
            "=r,r",
            [marked],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        found = tl.sum(marked << lane, 0) + tl.zeros_like(marked)
    return found.to(tl.uint32, bitcast=True)


@triton.jit
def _word(words, at, wanted):
    return (tl.load(words + at, mask=wanted, other=0).to(tl.int32) & 0xFFFF).to(tl.uint32)


@triton.jit
def _fill(x, at, live, words, below, FULL: tl.constexpr, ASM: tl.constexpr):
    """Lanes whose state fell below the least take the next words, in lane order."""
    hungry = x < 65536
    if not FULL:
        hungry = hungry & live
    total, rank = _count(hungry, below, ASM)
    filled = (x << 16) | _word(words, at + rank, hungry)
    return tl.where(hungry, filled, x), at + total


@triton.jit
def _fill_escaping(x, at, live, escaped, words, below, FULL: tl.constexpr, ASM: tl.constexpr):
    """The same where a lane may need a second word for its escape; that word comes too."""
    hungry = x < 65536
    if not FULL:
        hungry = hungry & live
    total, rank = _count(hungry, below, ASM)
    escapes, escapes_before = _count(escaped, below, ASM)
    place = at + rank + escapes_before
    filled = (x << 16) | _word(words, place, hungry)
    raw = _word(words, place + hungry.to(tl.int32), escaped).to(tl.int32)
    return tl.where(hungry, filled, x), at + total + escapes, (raw << 16) >> 16


@triton.jit
def _prefetch(place, ASM: tl.constexpr):
    """Towards the nearest cache: a load would be moved down to where its value is first used."""
    if ASM:
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [place.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _search(slot, pairs, FIRST: tl.constexpr, ASM: tl.constexpr):
    """How many of the bounds in eight words each slot reaches; a word holds `1 - bound` twice."""
    if ASM & cuda_capability_geq(9, 0):
        # Of each half: min(slot + 1 - bound, 1), or 0 if that is negative. One instruction each.
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, one, a, b, c, d;
            mov.b32 one, 65537;
            prmt.b32 s, $1, 0, 0x1010;
            add.s16x2 a, s, $2; min.s16x2.relu a, a, one;
            add.s16x2 b, s, $3; min.s16x2.relu b, b, one;
            add.s16x2 c, s, $4; min.s16x2.relu c, c, one;
            add.s16x2 d, s, $5; min.s16x2.relu d, d, one;
            add.u32 a, a, b; add.u32 c, c, d;
            add.s16x2 b, s, $6; min.s16x2.relu b, b, one;
            add.s16x2 d, s, $7; min.s16x2.relu d, d, one;
            add.u32 a, a, b; add.u32 c, c, d;
            add.s16x2 b, s, $8; min.s16x2.relu b, b, one;
            add.s16x2 d, s, $9; min.s16x2.relu d, d, one;
            add.u32 a, a, b; add.u32 c, c, d; add.u32 a, a, c;
            dp4a.u32.u32 $0, a, 0x01010101, 0; }""",
            "=r,r,r,r,r,r,r,r,r,r",
            [slot, pairs[FIRST], pairs[FIRST + 1], pairs[FIRST + 2], pairs[FIRST + 3],
             pairs[FIRST + 4], pairs[FIRST + 5], pairs[FIRST + 6], pairs[FIRST + 7]],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )  # fmt: skip
    found = tl.zeros_like(slot)
    for k in tl.static_range(8):
        for shift in tl.static_range(0, 32, 16):
            below = slot + (pairs[FIRST + k] >> shift) - 1
            found += 1 - ((below >> 15) & 1)
    return found.to(tl.int32)


@triton.jit
def _classify(total, bounds):
    found = tl.zeros_like(total)
    for k in tl.static_range(7):
        found += (total >= tl.load(bounds + k)).to(tl.int32)
    return found


@triton.jit
def _find_run(words, places, section, rows, run, RUN_ROWS: tl.constexpr):
    """Where a run of a section of so many rows begins, how many words it has, and whether the
    numbers of words before the runs are wrong: then it is somewhere within the section."""
    own = words + tl.load(places + section * 2)
    count = tl.load(places + section * 2 + 1).to(tl.int32)
    wrong = count < 0
    if RUN_ROWS > 0:
        num_runs = (rows + RUN_ROWS - 1) // RUN_ROWS
        if num_runs > 1:
            k = tl.arange(0, MAX_RUNS)
            known = (k < num_runs) & (2 * k + 1 < count)
            sizes = _word(own, 2 * k, known) | (_word(own, 2 * k + 1, known) << 16)
            sizes = sizes.to(tl.int64)
            begin = tl.sum(tl.where(k < run, sizes, 0), 0) + 2 * num_runs
            size = tl.sum(tl.where(k == run, sizes, 0), 0)
            wrong = tl.sum(sizes, 0) + 2 * num_runs != count
            begin = tl.minimum(begin, count).to(tl.int32)
            own += begin
            count = tl.minimum(size, count - begin).to(tl.int32)
    return own, count, wrong


@triton.jit
def _open(own, count, wrong, lane, num_tokens):
    """First states of a run, the place of its next word and of its end, and whether all is sound so
    far."""
    lanes = tl.minimum(num_tokens, LANES)
    known = (lane < lanes) & (2 * lane + 1 < count)
    x = _word(own, 2 * lane, known) | (_word(own, 2 * lane + 1, known) << 16)
    bad = ((lane < lanes) & (x < 65536)) | wrong
    x = tl.where(lane < lanes, x, 65536).to(tl.uint32)
    return x, tl.zeros_like(lane) + 2 * lanes, bad


@triton.jit
def _rows_of_run(rows, run, RUN_ROWS: tl.constexpr):
    """First row of a run in its section, and how many it has; none where there is no such run."""
    first = run * RUN_ROWS
    own = rows
    if RUN_ROWS > 0:
        own = tl.maximum(tl.minimum(rows - first, RUN_ROWS), 0)
    return tl.where(own > 0, first, 0), own


@triton.jit
def _close(x, at, limit, bad, rows, status, chunk):
    wrong = bad | (x != 65536) | (at != limit)
    found = tl.max(wrong.to(tl.int32), 0)
    if (rows > 0) & (found > 0):
        tl.atomic_or(status + chunk, 1)


@triton.jit
def _repeat(value, N: tl.constexpr):
    found = (value,)
    for _ in tl.static_range(N - 1):
        found = found + (value,)
    return found


@triton.jit
def _shifts(classes, lane, STEPS: tl.constexpr):
    """By how many scale classes each token's components are larger in its own steps."""
    found = ()
    for j in tl.static_range(STEPS):
        found = found + (2 * (tl.load(classes + j * 32 + lane).to(tl.int32) - 2),)
    return found


@triton.jit
def _enter_block(sums, sizes, bounds, STEPS: tl.constexpr):
    """Every token's running activity, and its class in the block that begins."""
    totals = ()
    classes = ()
    for j in tl.static_range(STEPS):
        total = sums[j] + 16 * sizes[j] - (sums[j] >> 3)
        totals = totals + (total,)
        classes = classes + (_classify(total, bounds),)
    return totals, classes


@triton.jit
def _load_tables(scale, shifts, activity, bounds, intervals, STEPS: tl.constexpr):
    """Where every token's table in a row of this scale class begins, and the bounds in it."""
    tables = ()
    pairs = ()
    for j in tl.static_range(STEPS):
        table = tl.minimum(tl.maximum(scale + shifts[j], 0), 63) * 8 + activity[j]
        tables = tables + (intervals + table,)
        for k in tl.static_range(8):
            pairs = pairs + (tl.load(bounds + k * 512 + table).to(tl.uint32, bitcast=True),)
    return tables, pairs


@triton.jit
def _store_row(values, low, high, is_wide, excess, STEPS: tl.constexpr):
    """A row's integers into the planes; `excess` gets bits where one does not fit."""
    lane = tl.arange(0, 32)
    reach = tl.where(is_wide, 32768, 128)
    for j in tl.static_range(STEPS):
        excess = excess | ((values[j] + reach) & -(2 * reach))
    for w in tl.static_range(STEPS // 4):
        tl.store(low + w * 32 + lane, _bytes(values, w * 4, 0))
    if is_wide:
        for w in tl.static_range(STEPS // 4):
            tl.store(high + w * 32 + lane, _bytes(values, w * 4, 8))
    return excess


@triton.jit
def _bytes(values, first: tl.constexpr, shift: tl.constexpr):
    """One byte of each of four values in a word."""
    word = (values[first] >> shift) & 0xFF
    for b in tl.static_range(1, 4):
        word = word | (((values[first + b] >> shift) & 0xFF) << (8 * b))
    return word


@triton.jit
def decode_entering(
    words, places, rows_of, tokens_of, classes, scales, thresholds, bounds, intervals,
    low, high, status, num_rows, num_scales, num_blocks, wide,
    STEPS: tl.constexpr, FULL: tl.constexpr, ASM: tl.constexpr, RUN_ROWS: tl.constexpr,
    KEEP: tl.constexpr = True,
):  # fmt: skip
    """Integers of one run of one section per program (group, chunk, run). `places`
    [chunk, group, 2] is where a section's 16-bit words begin and how many they are; `rows_of`
    [group, 2] its first row and how many; `bounds` [8, tables] holds two bounds a word, `intervals`
    [16, tables] a symbol's cumulative frequency and frequency. FULL says that no chunk lacks a
    token. RUN_ROWS is 0 where each section is one run. Without KEEP nothing is written but the
    status."""
    ROW: tl.constexpr = 8 * STEPS
    group, chunk, run = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    section = chunk * tl.num_programs(0) + group
    every = tl.load(rows_of + group * 2 + 1)
    own, limit, wrong = _find_run(words, places, section, every, run, RUN_ROWS)
    skipped, rows = _rows_of_run(every, run, RUN_ROWS)
    first = tl.load(rows_of + group * 2) + skipped
    num_tokens = tl.load(tokens_of + chunk)
    lane = tl.arange(0, 32)
    below = (1 << lane) - 1
    x, at, bad = _open(own, limit, wrong, lane, num_tokens)
    in_lane = lane < tl.minimum(num_tokens, LANES)
    low += section.to(tl.int64) * num_rows * ROW + first * ROW
    high += section.to(tl.int64) * wide * ROW + first * ROW
    thresholds += group * num_blocks * 8 + skipped
    scales += group * num_scales + first
    zero = tl.zeros_like(lane)
    excess = zero
    shifts = _shifts(classes + chunk * CHUNK, lane, STEPS)
    sums = _repeat(zero, STEPS)
    sizes = _repeat(zero, STEPS)
    scale = tl.load(scales, mask=rows > 0, other=0).to(tl.int32)
    for block in range((rows + 7) // 8):
        sums, activity = _enter_block(sums, sizes, thresholds + block * 8, STEPS)
        sizes = _repeat(zero, STEPS)
        tables, pairs = _load_tables(scale, shifts, activity, bounds, intervals, STEPS)
        # Not the last row's scale beside this one's: Triton does not carry a name through a loop
        # if all that it is given there is another name's value, and both begin as the same.
        changed = scale < 0
        for row in range(block * 8, tl.minimum(block * 8 + 8, rows)):
            if changed:
                tables, pairs = _load_tables(scale, shifts, activity, bounds, intervals, STEPS)
            following = tl.load(scales + tl.minimum(row + 1, rows - 1)).to(tl.int32)
            changed = following != scale
            scale = following
            _prefetch(own + at + AHEAD_WORDS + 2 * lane, ASM)
            new_sizes = ()
            values = ()
            for j in tl.static_range(STEPS):
                live = in_lane & (j * 32 + lane < num_tokens)
                slot = x & 16383
                symbol = _search(slot, pairs, j * 8, ASM)
                interval = tl.load(tables[j] + symbol * 512)
                interval = interval.to(tl.uint32, bitcast=True)
                stepped = (interval >> 16) * (x >> 14) + slot - (interval & 0xFFFF)
                escaped = symbol == 15
                if FULL:
                    x = stepped
                else:
                    x = tl.where(live, stepped, x)
                    escaped = escaped & live
                x, at, raw = _fill_escaping(x, at, live, escaped, own, below, FULL, ASM)
                size = (symbol + 1) >> 1
                value = tl.where(escaped, raw, tl.where((symbol & 1) != 0, -size, size))
                if not FULL:
                    value = tl.where(live, value, 0)
                values = values + (value,)
                new_sizes = new_sizes + (sizes[j] + tl.minimum(tl.abs(value), 3),)
            sizes = new_sizes
            if KEEP:
                excess = _store_row(
                    values, low + row * ROW, high + row * ROW, first + row < wide, excess, STEPS
                )
    _close(x, at, limit, bad | (excess != 0), rows, status, chunk)


@triton.jit
def _row_pairs(bounds, scale):
    """Bounds of the table of a row, the same for all lanes."""
    pairs = ()
    for k in tl.static_range(8):
        pairs = pairs + (tl.load(bounds + k * 512 + scale * 8).to(tl.uint32, bitcast=True),)
    return pairs


@triton.jit(do_not_specialize=["num_lanes"])
def decode_plain(
    words, places, rows_of, scales, bounds, intervals, out, status, num_lanes, num_rows,
    KEPT: tl.constexpr, ASM: tl.constexpr, RUN_ROWS: tl.constexpr,
):  # fmt: skip
    """Integers [chunk, group, row, lane] of first tokens, or of means, one run per program (group,
    run, chunk). A row is one step, and there are many, each with a scale of its own: so a row's
    table is loaded while the row before is decoded. No activity, no classes."""
    group, run, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    section = chunk * tl.num_programs(0) + group
    every = tl.load(rows_of + group * 2 + 1)
    own, limit, wrong = _find_run(words, places, section, every, run, RUN_ROWS)
    first, rows = _rows_of_run(every, run, RUN_ROWS)
    lane = tl.arange(0, 32)
    live = lane < num_lanes
    below = (1 << lane) - 1
    x, at, bad = _open(own, limit, wrong, lane, num_lanes)
    scales += group * num_rows + first
    out += (section.to(tl.int64) * num_rows + first) * KEPT
    scale = tl.load(scales).to(tl.int32)
    ahead = tl.load(scales + tl.maximum(tl.minimum(1, rows - 1), 0)).to(tl.int32)
    pairs = _row_pairs(bounds, scale)
    for row in range(rows):
        following = _row_pairs(bounds, ahead)
        beyond = tl.load(scales + tl.minimum(row + 2, rows - 1)).to(tl.int32)
        _prefetch(own + at + AHEAD_WORDS + 2 * lane, ASM)
        slot = x & 16383
        symbol = _search(slot, pairs, 0, ASM)
        interval = tl.load(intervals + scale * 8 + symbol * 512).to(tl.uint32, bitcast=True)
        stepped = (interval >> 16) * (x >> 14) + slot - (interval & 0xFFFF)
        x = tl.where(live, stepped, x)
        escaped = (symbol == 15) & live
        x, at, raw = _fill_escaping(x, at, live, escaped, own, below, False, ASM)
        size = (symbol + 1) >> 1
        value = tl.where(escaped, raw, tl.where((symbol & 1) != 0, -size, size))
        tl.store(out + row * KEPT + lane, tl.where(live, value, 0), mask=lane < KEPT)
        pairs, scale, ahead = following, ahead, beyond
    _close(x, at, limit, bad, rows, status, chunk)


@triton.jit
def _load_row(low, high, is_wide, STEPS: tl.constexpr, ASM: tl.constexpr):
    """A row's integers, and masks of which are not zero, with an empty one at either end."""
    lane = tl.arange(0, 32)
    found = ()
    for w in tl.static_range(STEPS // 4):
        word = tl.load(low + w * 32 + lane)
        for b in tl.static_range(4):
            found = found + ((word << (24 - 8 * b)) >> 24,)
    if is_wide:
        both = ()
        for w in tl.static_range(STEPS // 4):
            word = tl.load(high + w * 32 + lane)
            for b in tl.static_range(4):
                upper = ((word << (24 - 8 * b)) >> 24) << 8
                both = both + (upper | (found[w * 4 + b] & 0xFF),)
        found = both
    none = tl.zeros((32,), tl.uint32)
    masks = (none,)
    for j in tl.static_range(STEPS):
        masks = masks + (_mask(found[j] != 0, lane, ASM),)
    return found, masks + (none,)


@triton.jit
def _near(before, own, after, lane, ASM: tl.constexpr):
    """How many of the two tokens beside each lane's are marked in masks of 32 tokens each."""
    if ASM:
        bit = (1 << lane).to(tl.uint32, bitcast=True)
        sides = (bit << 1) | (bit >> 1)
        first = tl.where(lane == 0, 0x80000000, 0).to(tl.uint32)
        last = (lane == 31).to(tl.uint32)
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;",
            "=r,r",
            [(own & sides) | (before & first) | (after & last)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    left = (own << 1) | (before >> 31)
    right = (own >> 1) | (after << 31)
    return (((left >> lane) & 1) + ((right >> lane) & 1)).to(tl.int32)


@triton.jit
def _digit_tables(
    coarse, masks, scale, shifts, activity, bounds, STEPS: tl.constexpr, ASM: tl.constexpr
):
    """Both bounds of every token's table, given the level before."""
    lane = tl.arange(0, 32)
    pairs = ()
    for j in tl.static_range(STEPS):
        near = _near(masks[j], masks[j + 1], masks[j + 2], lane, ASM)
        kind = tl.minimum(tl.maximum(scale + shifts[j], 0), 63)
        if_zero = (kind * 8 + activity[j]) * 3 + near
        if_more = 1536 + kind * 2 + (tl.abs(coarse[j]) > 1).to(tl.int32)
        table = tl.where(coarse[j] == 0, if_zero, if_more)
        pairs = pairs + (tl.load(bounds + table).to(tl.uint32, bitcast=True),)
    return pairs


@triton.jit
def decode_digits(
    words, places, rows_of, tokens_of, classes, scales, thresholds, bounds,
    low, high, status, num_rows, num_scales, num_blocks, wide,
    STEPS: tl.constexpr, FULL: tl.constexpr, ASM: tl.constexpr, RUN_ROWS: tl.constexpr,
):  # fmt: skip
    """Refines the rows of one run of one section per program (group, chunk, run) in place. `bounds`
    [tables] holds a table's two inner bounds."""
    ROW: tl.constexpr = 8 * STEPS
    group, chunk, run = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    section = chunk * tl.num_programs(0) + group
    every = tl.load(rows_of + group * 2 + 1)
    own, limit, wrong = _find_run(words, places, section, every, run, RUN_ROWS)
    first, rows = _rows_of_run(every, run, RUN_ROWS)
    num_tokens = tl.load(tokens_of + chunk)
    lane = tl.arange(0, 32)
    below = (1 << lane) - 1
    x, at, bad = _open(own, limit, wrong, lane, num_tokens)
    in_lane = lane < tl.minimum(num_tokens, LANES)
    low += section.to(tl.int64) * num_rows * ROW + first * ROW
    high += section.to(tl.int64) * wide * ROW + first * ROW
    thresholds += group * num_blocks * 8 + first
    scales += group * num_scales + first
    zero = tl.zeros_like(lane)
    excess = zero
    shifts = _shifts(classes + chunk * CHUNK, lane, STEPS)
    sums = _repeat(zero, STEPS)
    sizes = _repeat(zero, STEPS)
    coarse, masks = _load_row(low, high, first < wide, STEPS, ASM)
    scale = tl.load(scales, mask=rows > 0, other=0).to(tl.int32)
    for block in range((rows + 7) // 8):
        sums, activity = _enter_block(sums, sizes, thresholds + block * 8, STEPS)
        sizes = _repeat(zero, STEPS)
        for row in range(block * 8, tl.minimum(block * 8 + 8, rows)):
            _prefetch(low + tl.minimum(row + 2, rows - 1) * ROW + 2 * lane, ASM)
            _prefetch(own + at + AHEAD_WORDS + 2 * lane, ASM)
            pairs = _digit_tables(coarse, masks, scale, shifts, activity, bounds, STEPS, ASM)
            scale = tl.load(scales + tl.minimum(row + 1, rows - 1)).to(tl.int32)
            new_sizes = ()
            values = ()
            for j in tl.static_range(STEPS):
                live = in_lane & (j * 32 + lane < num_tokens)
                zeros, minuses = pairs[j] & 0xFFFF, pairs[j] >> 16
                slot = x & 16383
                is_zero, is_minus = slot < zeros, slot < minuses
                begin = tl.where(is_zero, 0, tl.where(is_minus, zeros, minuses)).to(tl.uint32)
                end = tl.where(is_zero, zeros, tl.where(is_minus, minuses, 16384)).to(tl.uint32)
                stepped = (end - begin) * (x >> 14) + slot - begin
                if FULL:
                    x = stepped
                else:
                    x = tl.where(live, stepped, x)
                x, at = _fill(x, at, live, own, below, FULL, ASM)
                digit = tl.where(is_zero, 0, tl.where(is_minus, -1, 1))
                value = 3 * coarse[j] + tl.where(coarse[j] < 0, -digit, digit)
                if not FULL:
                    value = tl.where(live, value, 0)
                values = values + (value,)
                new_sizes = new_sizes + (sizes[j] + tl.minimum(tl.abs(value), 3),)
            sizes = new_sizes
            ahead = tl.minimum(row + 1, rows - 1)
            coarse, masks = _load_row(
                low + ahead * ROW, high + ahead * ROW, first + ahead < wide, STEPS, ASM
            )
            excess = _store_row(
                values, low + row * ROW, high + row * ROW, first + row < wide, excess, STEPS
            )
    _close(x, at, limit, bad | (excess != 0), rows, status, chunk)


@triton.jit
def decode_classes(words, places, tokens_of, bounds, classes, status):
    """The step class of every token of a chunk per program: one lane, one table of five."""
    chunk = tl.program_id(0)
    num_tokens = tl.load(tokens_of + chunk)
    limit = tl.load(places + chunk * 2 + 1).to(tl.int32)
    own = words + tl.load(places + chunk * 2)
    x = _word(own, 0, limit > 1) | (_word(own, 1, limit > 1) << 16)
    bad = x < 65536
    at = 2
    bound1, bound2 = tl.load(bounds + 1).to(tl.uint32), tl.load(bounds + 2).to(tl.uint32)
    bound3, bound4 = tl.load(bounds + 3).to(tl.uint32), tl.load(bounds + 4).to(tl.uint32)
    for token in range(num_tokens):
        slot = x & 16383
        at1, at2, at3, at4 = slot >= bound1, slot >= bound2, slot >= bound3, slot >= bound4
        begin = tl.where(at4, bound4, tl.where(at3, bound3, tl.where(at2, bound2,
                         tl.where(at1, bound1, 0)))).to(tl.uint32)  # fmt: skip
        end = tl.where(at3, tl.where(at4, 16384, bound4), tl.where(at2, bound3,
                       tl.where(at1, bound2, bound1))).to(tl.uint32)  # fmt: skip
        symbol = at1.to(tl.int32) + at2.to(tl.int32) + at3.to(tl.int32) + at4.to(tl.int32)
        x = (end - begin) * (x >> 14) + slot - begin
        hungry = x < 65536
        x = tl.where(hungry, (x << 16) | _word(own, at, hungry & (at < limit)), x)
        at += hungry.to(tl.int32)
        tl.store(classes + chunk * CHUNK + token, symbol.to(tl.uint8))
    if bad | (x != 65536) | (at != limit):
        tl.atomic_or(status + chunk, 1)
