"""Whether a model goes on from a handed-over cache as if it had read everything itself.

Models differ in what they keep between tokens: states beside keys and values, positions counted
somewhere else, masks that only a whole prompt gets right. No table of names can tell them all, so
the model is asked: it reads a few tokens at once, and the same tokens in two parts with the cache
between them taken out and put back as kdn does. The logits must agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedModel

from kdn.engines.rope_probe import probe_tokens, running
from kdn.engines.states import kv_layers
from kdn.errors import UnsupportedError

_READ, _GO_ON = 6, 5
"""Tokens before the handover, and after it."""


def check_handover(
    model: PreTrainedModel, new_cache: Callable[[], Cache], hand_over: Callable[[Cache], Cache]
) -> None:
    """UnsupportedError if a cache that went through `hand_over` leads to other logits."""
    tokens = probe_tokens(model, _READ + _GO_ON)[None]
    first, rest = tokens[:, :_READ], tokens[:, _READ:]
    with running(model, "go on from a cache of keys and values"):
        whole = model(tokens, use_cache=False).logits[0, _READ:]
        past = new_cache()
        model(first, past_key_values=past, use_cache=True)
        handed = _where_it_was(hand_over(past), past)
        # Whatever the model itself keeps of what it read is now of something else.
        model(tokens.flip(1), past_key_values=new_cache(), use_cache=True)
        found = model(rest, past_key_values=handed, use_cache=True).logits[0]
    if found.shape != whole.shape:
        raise UnsupportedError(
            f"{type(model).__name__} gives logits of another shape when it goes on from a cache"
        )
    # The median: rounding may send a token or two of a mixture of experts to another expert, but
    # what is missing in a cache shows in every token that follows.
    # State that reaches only a little way shows in the first ones.
    distances, most = _distances(found, whole), _tolerance(model.dtype)
    error = max(float(distances.median()), float(distances[:2].min()))
    if not error <= most:
        raise UnsupportedError(
            f"{type(model).__name__} gives other logits when it goes on from a cache of keys and "
            f"values than when it reads everything (relative error {error:.3g}, at most {most:.3g})"
        )


def _where_it_was(handed: Cache, past: Cache) -> Cache:
    """Each layer on the device that it came from: a model may be spread over several."""
    for own, before in zip(kv_layers(handed), kv_layers(past), strict=True):
        own.keys, own.values = (one.to(before.keys.device) for one in (own.keys, own.values))
    return handed


def _distances(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Per token, relative to how much logits vary: what all of them share changes nothing. Of
    tokens that a model never gives (their logits are as low as can be) nothing is to be seen."""
    lowest = torch.finfo(wanted.dtype).min / 2
    seen = ((found > lowest) & (wanted > lowest)).all(0)
    found, wanted = (one[:, seen].float() for one in (found, wanted))
    found, wanted = (one - one.mean(-1, keepdim=True) for one in (found, wanted))
    distances: torch.Tensor = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    return distances


def _tolerance(dtype: torch.dtype) -> float:
    """For rounding alone, which adds up over all layers; other logits are off by about 1."""
    return 0.01 if dtype == torch.float32 else 0.15
