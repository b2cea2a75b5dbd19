"""Attention on a CPU where several query heads share a key head, without copying keys for each.

Reading a question after a long context, transformers repeats all keys and values once for every
query head of a group, in each layer: most of the time goes into that. Here the queries of a group
are laid side by side instead, as if they were more tokens of one head. The same sums, less memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kdn_grouped"


def use_grouped_attention(model: PreTrainedModel) -> bool:
    """Switch a model on the CPU over; False if it is none that this is for."""
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


@contextmanager
def grouped_reading(model: PreTrainedModel) -> Iterator[None]:
    """Switch a model over for a while, if it is one that this is for."""
    before = model.config._attn_implementation
    is_switched = use_grouped_attention(model)
    try:
        yield
    finally:
        if is_switched:
            model.set_attn_implementation(before)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Like transformers' "sdpa", which does all but going on after a context."""
    groups = query.shape[1] // key.shape[1]
    batch, heads, length, channels = query.shape
    plain = groups == 1 or length == key.shape[2] or options.get("position_bias") is not None
    if plain or not _is_simple(attention_mask, length) or options.get("softcap") is not None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return result
    together = query.reshape(batch, heads // groups, groups * length, channels)
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(
        together, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(batch, heads, length, -1).transpose(1, 2).contiguous(), None


def _is_simple(mask: torch.Tensor | None, length: int) -> bool:
    """The same for all heads; none at all only for a single token, which sees everything."""
    return length == 1 if mask is None else mask.ndim == 4 and mask.shape[1] == 1
