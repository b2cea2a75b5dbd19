"""Latent attention (MLA) in the canonical layout.

transformers caches two vectors of a token, for all heads together: a latent, in place of keys, and
in place of values the one key that RoPE turns. They differ in size. The canonical layout wants two
vectors of one size, with what is turned at the beginning of the keys. So both are laid end to end,
the turned key first, and cut in the middle:

    canonical keys   = turned key | beginning of the latent
    canonical values = rest of the latent

That is one KV head with partial RoPE. Nothing is added, so nothing is stored or sent in vain.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

Pair = tuple[torch.Tensor, torch.Tensor]


def has_latents(config: PreTrainedConfig) -> bool:
    """Whether a model's cache holds latents."""
    return bool(getattr(config.get_text_config(decoder=True), "kv_lora_rank", None))


def canonical(keys: torch.Tensor, values: torch.Tensor) -> Pair:
    """What a layer caches, as the canonical layout has it: the same, but for latents."""
    if keys.shape[-1] == values.shape[-1] or keys.shape[1] != 1:
        return keys, values
    both = torch.cat([values, keys], dim=-1)
    half = both.shape[-1] // 2
    return both[..., :half], both[..., half:]


def as_cached(keys: torch.Tensor, values: torch.Tensor, config: PreTrainedConfig) -> Pair:
    """The inverse of `canonical`, for a layer of this model."""
    if not has_latents(config):
        return keys, values
    rank = int(config.get_text_config(decoder=True).kv_lora_rank)
    turned = keys.shape[-1] + values.shape[-1] - rank
    both = torch.cat([keys, values], dim=-1)
    return both[..., turned:], both[..., :turned]
