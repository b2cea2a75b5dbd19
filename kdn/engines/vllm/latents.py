"""The order in which vLLM keeps what latent attention (MLA) caches of a token.

vLLM's row is the latent, then the turned key, in which the two channels of each pair lie side by
side. The canonical layout has the turned key first, in the order that transformers has: that of
DeepSeek V2 is the same, V3 takes the first channels of all pairs, then the second ones. Both are
then cut in the middle (`kdn/engines/latents.py`).
"""

from __future__ import annotations

import torch

from kdn.cache.spec import ModelSpec
from kdn.errors import UnsupportedError


def places_of_channels(spec: ModelSpec) -> torch.Tensor:
    """Of each canonical channel, those of keys before those of values, its place in vLLM's row."""
    rope = spec.ropes[0]
    if rope is None or len(set(spec.ropes)) > 1:
        raise UnsupportedError("kdn expects latents (MLA) with keys that all layers turn alike")
    turned, width = rope.rotary_dim, 2 * spec.head_dim
    pairs = torch.arange(turned)
    if not rope.interleaved:
        pairs = pairs.view(-1, 2).T.flatten()
    rank = width - turned
    return torch.cat([rank + pairs, torch.arange(rank)])


def latent_rows(layer: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """A layer's cache as `[blocks, tokens, channels]`, of the same memory."""
    rows = layer.squeeze(1) if layer.ndim == 4 and layer.shape[1] == 1 else layer
    if rows.ndim != 3 or spec.num_kv_heads != 1 or rows.shape[2] != 2 * spec.head_dim:
        raise UnsupportedError(
            f"vLLM's cache of {tuple(layer.shape)} is in no layout that kdn knows for latents of "
            f"{2 * spec.head_dim} channels"
        )
    return rows
