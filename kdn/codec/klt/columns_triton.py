"""From a cache to the columns that are coded, and to what is left of them after prediction:
`columns.py` and the predictor as Triton kernels, for any rotation of any layer."""

# Kernels are in Triton's language, which has no types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(256)


@triton.jit(do_not_specialize=["first_token", "count"])
def take_columns(
    source, out, first_of, second_of, frequency, begins, cos, sin, first_token, count, width,
    num_pairs, num_frequencies, head_dim, layer_stride, token_stride, head_stride, channel_stride,
    IS_VALUE: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One chunk's keys, turned back, or values, of one layer to `out` [tokens, width], from
    `first_token` on; zeros for tokens from `count` on. `first_of`, `second_of` and `frequency`
    [layers, pairs] say which channels are turned together, and by which of the angles of `cos` and
    `sin` [tokens, frequencies], or -1; `begins` [layers] is where a layer's columns begin."""
    spot, layer = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1)
    pair = tl.program_id(2) * BP + tl.arange(0, BP)
    own = pair < num_pairs
    known = (spot < count)[:, None] & own[None, :]
    one = tl.load(first_of + layer * num_pairs + pair, mask=own, other=0)
    two = tl.load(second_of + layer * num_pairs + pair, mask=own, other=0)
    line = source + layer.to(tl.int64) * layer_stride + spot.to(tl.int64)[:, None] * token_stride
    at_one = one // head_dim * head_stride + one % head_dim * channel_stride
    at_two = two // head_dim * head_stride + two % head_dim * channel_stride
    first = tl.load(line + at_one[None, :], mask=known, other=0.0).to(tl.float32)
    second = tl.load(line + at_two[None, :], mask=known, other=0.0).to(tl.float32)
    token = first_token + spot
    if not IS_VALUE:
        turn = tl.load(frequency + layer * num_pairs + pair, mask=own, other=-1)
        angle = token[:, None] * num_frequencies + turn[None, :]
        turned = known & (turn >= 0)[None, :]
        cosine = tl.load(cos + angle, mask=turned, other=1.0)
        sine = tl.load(sin + angle, mask=turned, other=0.0)
        back = first * cosine + second * sine
        second = second * cosine - first * sine
        first = back
    target = out + token.to(tl.int64)[:, None] * width + tl.load(begins + layer)
    inside = (spot >= 0)[:, None] & own[None, :]
    tl.store(target + one[None, :], first, mask=inside)
    tl.store(target + two[None, :], second, mask=inside)


@triton.jit(do_not_specialize=["first_layer", "group_layers", "num_layers"])
def subtract_prediction(
    columns, predicted, bias, cleared, tokens_of, halves, width, first_column, group_columns,
    layer_columns, first_layer, group_layers, num_layers, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What prediction leaves of a group's columns [tokens, width], in place and as 16-bit floats
    [tokens, group columns]. The first `cleared` [chunk, layer] tokens are not coded, nor are those
    that a chunk lacks."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    chunk, spot = tl.program_id(0) * BT // CHUNK, token % CHUNK
    own = column < group_columns
    inside = (token >= 0)[:, None] & own[None, :]
    layer = first_layer + column // layer_columns % group_layers
    dead = tl.load(cleared + chunk * num_layers + layer, mask=own, other=0)
    alive = (spot[:, None] >= dead[None, :]) & (spot < tl.load(tokens_of + chunk))[:, None]
    place = token.to(tl.int64)[:, None] * width + (first_column + column)[None, :]
    in_group = token.to(tl.int64)[:, None] * group_columns + column[None, :]
    told = tl.load(predicted + in_group, mask=inside, other=0.0)
    told += tl.load(bias + first_column + column, mask=own, other=0.0)[None, :]
    left = tl.load(columns + place, mask=inside, other=0.0) - told
    left = tl.where(alive, left, 0.0)
    tl.store(columns + place, left, mask=inside)
    tl.store(halves + in_group, left.to(tl.float16), mask=inside)
