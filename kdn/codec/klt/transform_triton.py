"""From integers to the finished cache as Triton kernels: one matrix product does it all.

    values = (A B) * column scale + bias, then RoPE, then the write

A `[tokens, k]` holds, in 16-bit floats, what the token ids predict (all groups share it) and the
components of the groups at hand. B `[columns, k]`, made once from the profile, holds the rows that
belong to them. Of groups of two stages (`gpu_stages.py`), A also holds the leading components of
each layer, in place of all but the precise components of the group. Sums are float32; rounding A
and B adds about 3e-4 of a value. B's columns are
ordered so that the two channels that RoPE turns together are neighbours, which one thread holds:
the turn costs no exchange. A tile of columns lies within one layer's keys or values, so that it has
one destination.
"""

# Kernels are in Triton's language, which has no types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

ROW = tl.constexpr(256)
BLOCK_TILES = tl.constexpr(32)


@triton.jit
def _amounts(
    low, high, scales, row_factor, centroids, own, section, group, row, spot, count, num_rows,
    num_scales, wide, any_wide,
):  # fmt: skip
    """Integers of rows and tokens of a section, and how large each of them is, in its token's
    steps; `own` are the tokens' step classes."""
    known = (row < count)[:, None] & (spot >= 0)[None, :]
    place = row[:, None] * ROW + spot[None, :]
    q = tl.load(low + section * num_rows * ROW + place, mask=known, other=0).to(tl.int32)
    if any_wide:
        has_high = known & (row < wide)[:, None]
        upper = tl.load(high + section * wide * ROW + place, mask=has_high, other=0).to(tl.int32)
        q = tl.where((row < wide)[:, None], (upper << 8) | (q & 0xFF), q)
    scale = tl.load(scales + group * num_scales + row, mask=row < count, other=0).to(tl.int32)
    kind = tl.minimum(tl.maximum(scale[:, None] + 2 * (own - 2)[None, :], 0), 63)
    size = tl.abs(q)
    offset = tl.load(centroids + kind * 4 + tl.minimum(size, 3))
    factor = tl.load(row_factor + group * num_scales + row, mask=row < count, other=0.0)
    return q, (size.to(tl.float32) + offset) * factor[:, None]


@triton.jit
def _token_at(spot):
    """Which token of a chunk has this place in a plane, which holds four of a lane's side by
    side."""
    return (spot // 128 * 4 + spot % 4) * 32 + spot % 128 // 4


@triton.jit
def find_largest(
    low, high, scales, row_factor, centroids, classes, counts, num_fine, largest, num_rows,
    num_scales, wide, BR: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Of each section and token: the largest of the components that are rounded to bytes, those
    after the first `num_fine` [group]."""
    spot, section = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1).to(tl.int64)
    total_groups = tl.load(counts)
    chunk, group = tl.program_id(1) // total_groups, tl.program_id(1) % total_groups
    count, fine = tl.load(counts + 1 + group), tl.load(num_fine + group)
    token = _token_at(spot)
    own = tl.load(classes + chunk * ROW + token).to(tl.int32)
    most = tl.full((BT,), 1e-30, tl.float32)
    for part in range(fine // BR, (count + BR - 1) // BR):
        row = part * BR + tl.arange(0, BR)
        _, value = _amounts(low, high, scales, row_factor, centroids, own, section, group, row,
                            spot, count, num_rows, num_scales, wide, part * BR < wide)  # fmt: skip
        value = tl.where((row >= fine)[:, None], tl.abs(value), 0.0)
        most = tl.maximum(most, tl.max(value, 0))
    tl.store(largest + section * ROW + token, most)


@triton.jit(do_not_specialize=["first_group", "num_groups"])
def pack_components(
    low, high, scales, row_factor, centroids, classes, class_factor, counts, skipped, out, status,
    num_fine, largest, first_group, num_groups, num_rows, num_scales, wide, level_factor, width,
    latents, BR: tl.constexpr, BT: tl.constexpr, BYTES: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Integers of rows [BR] and tokens [BT] of a (group, chunk) to components, turned into A.
    With BYTES those that are not fine are rounded to bytes, as `transform.pack` does: the last
    level corrects what that leaves. With CHECK nothing is written but what is too large for A."""
    part, block = tl.program_id(0), tl.program_id(1)
    in_batch = tl.program_id(2) % num_groups
    chunk, group = tl.program_id(2) // num_groups, first_group + in_batch
    total_groups = tl.load(counts)
    count = tl.load(counts + 1 + group)
    row, spot = part * BR + tl.arange(0, BR), block * BT + tl.arange(0, BT)
    token = _token_at(spot)
    section = (chunk * total_groups + group).to(tl.int64)
    own = tl.load(classes + chunk * ROW + token).to(tl.int32)
    q, value = _amounts(low, high, scales, row_factor, centroids, own, section, group, row, spot,
                        count, num_rows, num_scales, wide, part * BR < wide)  # fmt: skip
    if BYTES:
        most = tl.load(largest + section * ROW + token)
        code = value * tl.div_rn(127.0, most)[None, :]
        # To the nearest integer, to the even one of two: all lower bits are lost here.
        code = (code + 12582912.0) - 12582912.0
        rounded = code * tl.div_rn(most, 127.0)[None, :]
        value = tl.where((row >= tl.load(num_fine + group))[:, None], rounded, value)
    steps = tl.load(class_factor + own) * level_factor
    steps = tl.where(token < tl.load(skipped + chunk), 0.0, steps)
    value *= steps[None, :]
    # Over all at once: each thread first looks at its own.
    if tl.max(value) > 65000.0:
        tl.atomic_or(status + chunk, 1)
    if not CHECK:
        value = tl.trans(tl.where(q < 0, -value, value).to(tl.float16))
        line = out + (chunk * ROW + token).to(tl.int64)[:, None] * width
        tl.store(line + latents + in_batch * num_rows + row[None, :], value)


@triton.jit
def _errors(errors, token, column):
    """What the last level adds to the values of tokens and columns."""
    low, high, row_of, column_step, token_step = errors
    in_half = token % 128
    spot = token % ROW // 128 * 128 + in_half % 32 * 4 + in_half // 32
    place = tl.load(row_of + column)[None, :] * ROW + spot[:, None]
    whole = (tl.load(high + place).to(tl.int32) << 8) | (tl.load(low + place).to(tl.int32) & 0xFF)
    step = tl.load(token_step + token)[:, None] * tl.load(column_step + column)[None, :]
    return whole.to(tl.float32) * step


@triton.jit
def _stored(values, inverse_scale, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    """As memory holds them. 8-bit floats have no infinity: what is too large becomes the
    largest."""
    if SCALED:
        values *= inverse_scale
    if DTYPE == tl.float8e4nv:  # noqa: SIM300
        values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    return values.to(DTYPE)


@triton.jit
def _write(
    sums, column, pair, token, is_value, sinks, sink_width, column_scale, bias, frequency, cos, sin,
    num_frequencies, line, slot, first_channel, second_channel, errors, inverse_scale,
    EXACT: tl.constexpr, DTYPE: tl.constexpr, ERRORS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sums [tokens, columns] of one layer's keys or values to where they belong."""
    BM: tl.constexpr = sums.shape[0]
    HALF: tl.constexpr = sums.shape[1] // 2
    sums = sums * tl.load(column_scale + column)[None, :] + tl.load(bias + column)[None, :]
    if sink_width > 0:
        more = sinks + token[:, None] * sink_width + column[None, :]
        sums += tl.load(more, mask=(token < 16)[:, None], other=0.0)
    if ERRORS:
        sums += _errors(errors, token, column)
    even, odd = tl.split(tl.reshape(sums, (BM, HALF, 2)))
    if is_value == 0:
        turn = tl.load(frequency + pair)
        if EXACT:
            turn = tl.max_contiguous(tl.multiple_of(turn, 8), 8)
            angle = token[:, None] * num_frequencies + turn[None, :]
            cosine = tl.load(cos + angle).to(tl.float32)
            sine = tl.load(sin + angle).to(tl.float32)
        else:
            angle = token[:, None] * num_frequencies + turn[None, :]
            cosine = tl.load(cos + angle, mask=(turn >= 0)[None, :], other=1.0).to(tl.float32)
            sine = tl.load(sin + angle, mask=(turn >= 0)[None, :], other=0.0).to(tl.float32)
        turned = even * cosine - odd * sine
        odd = odd * cosine + even * sine
        even = turned
    one, two = tl.load(first_channel + pair), tl.load(second_channel + pair)
    if EXACT:
        one = tl.max_contiguous(tl.multiple_of(one, 8), 8)
        two = tl.max_contiguous(tl.multiple_of(two, 8), 8)
        wanted = (slot >= 0)[:, None] & (tl.arange(0, HALF) >= 0)[None, :]
    else:
        wanted = (slot >= 0)[:, None] & (one >= 0)[None, :]
    even = _stored(even, inverse_scale, DTYPE, SCALED)
    odd = _stored(odd, inverse_scale, DTYPE, SCALED)
    tl.store(line + one[None, :], even, mask=wanted)
    tl.store(line + two[None, :], odd, mask=wanted)


# Numbers that change from batch to batch: to compile anew for some of them would take seconds.
@triton.jit(
    do_not_specialize=[
        "first_tile", "num_tiles", "first_group", "sink_width", "num_token_tiles", "error_groups",
        "first_error_group", "leading_from",
    ]
)  # fmt: skip
def restore(
    a_matrix, b_matrix, tiles, first_tile, num_tiles, blocks_of, latents, group_width, first_group,
    column_scale, bias, bias_stride, first_channel, second_channel, frequency, cos, sin,
    num_frequencies, slots, pointers, key_stride, value_stride, sinks, sink_width, num_token_tiles,
    num_pairs, value_channels, status, inverse_scales, error_low, error_high, error_row_of,
    error_column_step, error_token_step, error_groups, error_columns, first_error_group,
    leading_begins, leading_blocks, leading_from, leading_width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
    DTYPE: tl.constexpr, HALVES: tl.constexpr, FLATTEN: tl.constexpr, ERRORS: tl.constexpr,
    HAS_SCALES: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Tiles of tokens and columns, one after the other. `tiles` [tile, 4]: group, layer, whether
    values, and with which of a layer's pairs it begins; `pointers` [layers, 2]: where each layer's
    keys and values are; `slots` [tokens]: each token's place there, or -1; of a chunk whose
    `status` is set nothing is written. `first_channel` and `second_channel` [2, layers, pairs] say
    how far a pair's channels are from there in keys and, `value_channels` further, in values. EXACT
    says that pairs come in whole runs of eight neighbours, all of them turned, in memory where
    every run begins at a whole vector. With HAS_SCALES values are multiplied by `inverse_scales`
    [layers, 2]. With ERRORS the last level is added, before the turn: 16-bit integers in two planes
    [chunk, group, row, spot] as `symbols_triton.py` writes them, of groups from `first_error_group`
    on, whose row is `error_row_of` [columns], in steps of a column and of a token. With STAGED
    a layer has `leading_blocks` [layers] more blocks of A and B, in A from `leading_from` and, in
    its group's `leading_width`, from `leading_begins` [layers] on. A `bias_stride` above zero says
    that each chunk has a bias of its own."""
    latent_blocks = latents // BK
    for item in tl.range(tl.program_id(0), num_tiles * num_token_tiles, tl.num_programs(0),
                         flatten=FLATTEN):  # fmt: skip
        # Blocks of tokens whose A stays in the nearest cache while all columns are done.
        block_tiles = num_tiles * BLOCK_TILES
        token_block = item // block_tiles * BLOCK_TILES
        height = tl.minimum(num_token_tiles - token_block, BLOCK_TILES)
        token_tile = token_block + item % block_tiles % height
        tile = first_tile + item % block_tiles // height
        group, layer = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
        is_value, first_pair = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
        begin = latents + (group - first_group) * group_width
        sums = tl.zeros((BM, BN), tl.float32)
        shared_blocks = latent_blocks + tl.load(blocks_of + group)
        num_blocks = shared_blocks
        leading = 0
        if STAGED:
            num_blocks += tl.load(leading_blocks + layer)
            leading = leading_from + (group - first_group) * leading_width
            leading += tl.load(leading_begins + layer)
        for block in range(num_blocks):
            own = begin + (block - latent_blocks) * BK
            place = tl.where(block < latent_blocks, block * BK, own)
            if STAGED:
                place = tl.where(block < shared_blocks, place,
                                 leading + (block - shared_blocks) * BK)  # fmt: skip
            a = a_matrix.load([token_tile * BM, place])
            b = b_matrix.load([tile * BN, block * BK])
            sums = tl.dot(a, b.T, sums)
        token = token_tile * BM + tl.arange(0, BM)
        chunk = token_tile * BM // ROW
        own_bias = bias + chunk * bias_stride
        slot = tl.where(tl.load(status + chunk) == 0, tl.load(slots + token), -1)
        first_of = first_channel + is_value * value_channels
        second_of = second_channel + is_value * value_channels
        base = tl.load(pointers + layer * 2 + is_value).to(tl.pointer_type(DTYPE))
        stride = tl.where(is_value == 0, key_stride, value_stride)
        line = base + slot[:, None] * stride
        if EXACT:
            line = tl.multiple_of(line, (16, 16))
        pair = layer * num_pairs + first_pair
        own_sinks = tl.where(token_tile == 0, sink_width, 0)
        errors = ()
        if ERRORS:
            section = (chunk * error_groups + group - first_error_group).to(tl.int64)
            plane = section * error_columns * ROW
            errors = (error_low + plane, error_high + plane, error_row_of, error_column_step,
                      error_token_step)  # fmt: skip
        inverse_scale = 1.0
        if HAS_SCALES:
            inverse_scale = tl.load(inverse_scales + layer * 2 + is_value)
        if HALVES:
            HALF: tl.constexpr = BN // 2
            left, right = tl.split(tl.permute(tl.reshape(sums, (BM, 2, HALF)), (0, 2, 1)))
            _write(left, tile * BN + tl.arange(0, HALF), pair + tl.arange(0, HALF // 2), token,
                   is_value, sinks, own_sinks, column_scale, own_bias, frequency, cos,
                   sin, num_frequencies, line, slot, first_of, second_of, errors,
                   inverse_scale, EXACT, DTYPE, ERRORS, HAS_SCALES)  # fmt: skip
            _write(right, tile * BN + HALF + tl.arange(0, HALF),
                   pair + HALF // 2 + tl.arange(0, HALF // 2), token,
                   is_value, sinks, own_sinks, column_scale, own_bias, frequency, cos,
                   sin, num_frequencies, line, slot, first_of, second_of, errors,
                   inverse_scale, EXACT, DTYPE, ERRORS, HAS_SCALES)  # fmt: skip
        else:
            _write(sums, tile * BN + tl.arange(0, BN), pair + tl.arange(0, BN // 2), token,
                   is_value, sinks, own_sinks, column_scale, own_bias, frequency, cos,
                   sin, num_frequencies, line, slot, first_of, second_of, errors,
                   inverse_scale, EXACT, DTYPE, ERRORS, HAS_SCALES)  # fmt: skip
