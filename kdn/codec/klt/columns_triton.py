"""From a cache to the columns that are coded, as a Triton kernel: `columns.py` for layers that all
turn alike, in one pass over memory."""

# Kernels are in Triton's language, which has no types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take_columns(
    source, cos, sin, out, count, width, group_layers, num_pairs, layer_stride, token_stride,
    head_stride, channel_stride, IS_VALUE: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """One layer's keys, turned back, or values, of tokens [BT] to `out` [tokens, width]; zeros for
    tokens from `count` on. Channels c and c + HALF of a head are a pair; `cos` and `sin` are
    [tokens, HALF]."""
    token, layer = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1)
    pair = tl.arange(0, BP)
    head, channel = pair // HALF, pair % HALF
    known = (token < count)[:, None] & (pair < num_pairs)[None, :]
    line = source + layer.to(tl.int64) * layer_stride + token.to(tl.int64)[:, None] * token_stride
    place = line + (head * head_stride + channel * channel_stride)[None, :]
    first = tl.load(place, mask=known, other=0.0).to(tl.float32)
    second = tl.load(place + HALF * channel_stride, mask=known, other=0.0).to(tl.float32)
    if not IS_VALUE:
        angle = token[:, None] * HALF + channel[None, :]
        cosine = tl.load(cos + angle, mask=known, other=0.0)
        sine = tl.load(sin + angle, mask=known, other=0.0)
        turned = first * cosine + second * sine
        second = second * cosine - first * sine
        first = turned
    group, in_group = layer // group_layers, layer % group_layers
    side = 2 * group * group_layers + in_group
    if IS_VALUE:
        side += group_layers
    target = out + token.to(tl.int64)[:, None] * width + side * 2 * num_pairs
    target += (head * 2 * HALF + channel)[None, :]
    own = (token >= 0)[:, None] & (pair < num_pairs)[None, :]
    tl.store(target, first, mask=own)
    tl.store(target + HALF, second, mask=own)
