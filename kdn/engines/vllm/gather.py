"""Tokens out of an engine's memory, wherever they lie, into the canonical layout.

On a GPU one kernel does it for all layers and all chunks of a step (`gather_triton.py`); this is
the same in plain torch, a few launches a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdn.cache.rows import Slots, TokenRows


def gather(rows: TokenRows, slots: Slots, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[layers, tokens, heads, channels]` of `dtype`: a copy of what is in these
    slots, times what memory was scaled with."""
    places = torch.from_numpy(slots).to(rows.device, non_blocking=True)
    return (
        _side(rows.keys, places, rows.key_scales, dtype),
        _side(rows.values, places, rows.value_scales, dtype),
    )


def _side(
    layers: Sequence[torch.Tensor],
    places: torch.Tensor,
    scales: Sequence[float],
    dtype: torch.dtype,
) -> torch.Tensor:
    found = []
    for layer, memory in enumerate(layers):
        raw = memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory
        values = raw[places].view(memory.dtype)
        if scales:
            values = values.float() * scales[layer]
        found.append(values.to(dtype))
    return torch.stack(found)
