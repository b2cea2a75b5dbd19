"""Tokens of a step's chunks out of an engine's memory, in one launch: all layers, keys and values.

`gather.py` is the same in plain torch. Here every chunk goes to memory of its own, and a table has
a row for each token: its slot, where its first layer's key goes (an address), and how far apart
layers are there. A program copies some tokens of one side of one layer, head by head.
"""

# Kernels are in Triton's language, which has no types.
# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kdn.cache.rows import TokenRows

TOKENS = 4
"""Of one program. With 8 heads of 128 channels that is 8 KiB to read at once."""


@triton.jit
def _copy_tokens(
    memory_ptr, scales_ptr, table_ptr, num_tokens,
    slot_stride, head_stride,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, SCALED: tl.constexpr,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    side_layer = tl.program_id(1)  # keys of all layers, then values
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_there = token < num_tokens
    slot = tl.load(table_ptr + 3 * token, is_there, 0)
    goes_to = tl.load(table_ptr + 3 * token + 1, is_there, 0)
    plane = tl.load(table_ptr + 3 * token + 2, is_there, 0)
    memory = tl.load(memory_ptr + side_layer)
    scale = tl.load(scales_ptr + side_layer)
    item = tl.arange(0, WIDTH)
    head, channel = item // CHANNELS, item % CHANNELS
    inside = is_there[:, None] & (head < HEADS)[None, :]
    goes_to += side_layer * plane
    origin, out = memory.to(tl.pointer_type(SOURCE)), goes_to.to(tl.pointer_type(TARGET))
    if ALIGNED:  # so that 16 bytes are moved at a time
        origin, out = tl.multiple_of(origin, 16), tl.multiple_of(out, 16)
    found = tl.load(
        origin + slot[:, None] * slot_stride + (head * head_stride + channel)[None, :], inside, 0.0
    )
    if SCALED:
        found = found.to(tl.float32) * scale
    tl.store(out[:, None] + item[None, :], found.to(TARGET), inside)


_KINDS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


class Gatherer:
    """Of one engine's memory."""

    def __init__(self, rows: TokenRows, dtype: torch.dtype) -> None:
        """`dtype`: of the values that come out."""
        self._rows, self._dtype = rows, dtype
        sides = [*rows.keys, *rows.values]
        ones = [1.0] * rows.num_layers
        scales = [*(rows.key_scales or ones), *(rows.value_scales or ones)]
        self._memory = torch.tensor([one.data_ptr() for one in sides], device=rows.device)
        self._scales = torch.tensor(scales, dtype=torch.float32, device=rows.device)
        self._strides = rows.keys[0].stride()[:2]
        sizes = (
            rows.head_dim * dtype.itemsize,
            *(step * rows.dtype.itemsize for step in self._strides),
        )
        self._aligned = not any(size % 16 for size in (*sizes, *(one.data_ptr() for one in sides)))

    def gather(self, slots: Sequence[npt.NDArray[np.int64]], out: Sequence[torch.Tensor]) -> None:
        """The tokens in `slots[i]` to `out[i]`, which is `[2, layers, tokens, heads, channels]`,
        contiguous, of keys and of values. Queued in the current stream."""
        rows = self._rows
        pairs = zip(slots, out, strict=True)
        table = torch.from_numpy(np.concatenate([self._entries(*pair) for pair in pairs]))
        if rows.device.type == "cuda":
            table = table.pin_memory().to(rows.device, non_blocking=True)
        heads, channels = len(rows.heads), rows.head_dim
        grid = (triton.cdiv(len(table), TOKENS), 2 * rows.num_layers)
        _copy_tokens[grid](
            self._memory, self._scales, table, len(table), *self._strides,
            SOURCE=_KINDS[rows.dtype], TARGET=_KINDS[self._dtype],
            SCALED=bool(rows.key_scales or rows.value_scales),
            HEADS=heads, CHANNELS=channels, WIDTH=triton.next_power_of_2(heads * channels),
            TOKENS=TOKENS, ALIGNED=self._aligned and all(one.data_ptr() % 16 == 0 for one in out),
        )  # fmt: skip

    def _entries(self, slots: npt.NDArray[np.int64], place: torch.Tensor) -> npt.NDArray[np.int64]:
        row = len(self._rows.heads) * self._rows.head_dim * place.element_size()
        entries = np.empty((len(slots), 3), dtype=np.int64)
        entries[:, 0] = slots
        entries[:, 1] = place.data_ptr() + row * np.arange(len(slots))
        entries[:, 2] = row * len(slots)
        return entries
