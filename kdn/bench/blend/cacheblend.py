"""CacheBlend's choice of tokens (arXiv 2405.16444), and EPIC's.

CacheBlend computes the first layers for all tokens, and keeps on with those whose new keys and
values differ most from the joined ones, fewer from layer to layer. Layer 0 sees nothing but tokens:
there a joined cache is right. Its choice is made in layers 1 and 2, as the paper narrows it down:
half again as many as wanted by the first, the wanted ones among them by the second. The share is of
all tokens. Here layer 2 is computed for all tokens, too, which can only help the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.blend.pieces import Join
from kdn.cache.keys import Tokens
from kdn.engines.reading import forward, new_cache

CHECKED_LAYERS = (1, 2)
CANDIDATES = 1.5
"""Times as many tokens as wanted, by the first of these layers."""

Places = npt.NDArray[np.int64]


class _EnoughError(Exception):
    """The layers that were asked for are computed."""


def first_layers(model: Any, tokens: Tokens, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [heads, tokens, channels] of the model's first layers, as it reads these
    tokens; the others are not computed."""

    def stop(*_: object) -> None:
        raise _EnoughError

    past, layers = new_cache(model), model.get_decoder().layers
    hook = layers[count].register_forward_pre_hook(stop) if count < len(layers) else None
    try:
        forward(model, tokens, past)
    except _EnoughError:
        pass
    finally:
        if hook is not None:
            hook.remove()
    return [(layer.keys[0], layer.values[0]) for layer in past.layers[:count]]


def by_deviation(model: Any, past: Any, tokens: Tokens, num_chosen: int) -> tuple[Places, float]:
    """Positions of the tokens to recompute, in order, and how many passes over all tokens choosing
    them took."""
    num_layers = len(past.layers)
    checked = [layer for layer in CHECKED_LAYERS if layer < num_layers] or [0]
    computed = first_layers(model, tokens, checked[-1] + 1)
    most = [max(num_chosen, round(CANDIDATES * num_chosen)), num_chosen][-len(checked) :]
    left = torch.arange(len(tokens))
    for layer, count in zip(checked, most, strict=True):
        held, end = past.layers[layer], len(tokens)
        joined = (held.keys[0, :, :end], held.values[0, :, :end])
        far = sum(_squared(new, old) for new, old in zip(computed[layer], joined, strict=True))
        assert isinstance(far, torch.Tensor)
        left = left[far.cpu()[left].topk(min(count, len(left))).indices]
    return np.sort(left.numpy()), (checked[-1] + 1) / num_layers


def _squared(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (new.float() - old.float()).square().sum((0, 2))


def first_tokens(join: Join, num_chosen: int) -> Places:
    """EPIC (arXiv 2410.15332): the first tokens of each piece that has moved, as many of each as
    the number allows."""
    lengths = [join.pieces[i].num_own for i in join.moved()]
    starts = [join.starts[i] for i in join.moved()]
    each = _level(lengths, num_chosen)
    runs = [
        np.arange(start, start + min(each, n)) for start, n in zip(starts, lengths, strict=True)
    ]
    return np.concatenate([*runs, np.zeros(0, np.int64)]).astype(np.int64)


def _level(lengths: Sequence[int], total: int) -> int:
    """The most of each that together are at most `total`."""
    most = max(lengths, default=0)
    return max(n for n in range(most + 1) if sum(min(n, one) for one in lengths) <= total)
