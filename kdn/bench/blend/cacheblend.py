"""CacheBlend's choice of tokens (arXiv 2405.16444), and EPIC's.

CacheBlend computes the first layers for all tokens, and goes on with those whose new keys and
values differ most from the joined ones: fewer from layer to layer. Layer 0 sees nothing but tokens,
so a joined cache is right there, and the choice is made in layers 1 and 2, as the paper narrows it
down: layer 1 names half again as many tokens as wanted, and layer 2, computed for these alone, the
wanted ones among them. What these layers have computed stays in the cache. The share is of all
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.blend.pieces import Join
from kdn.cache.keys import Tokens
from kdn.engines.reading import forward, new_cache

CHECKED_LAYER = 1
CANDIDATES = 1.5
"""Times as many tokens as wanted, by this layer."""

Places = npt.NDArray[np.int64]
Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [heads, tokens, channels] of a layer."""


class _StopError(Exception):
    """The layers that were asked for are computed; what the next one would have got."""

    def __init__(self, hidden: torch.Tensor, named: dict[str, Any]) -> None:
        super().__init__()
        self.hidden, self.named = hidden, named


def first_layers(
    model: Any, tokens: Tokens, count: int
) -> tuple[list[Pair], Callable[[torch.Tensor], Pair] | None]:
    """The model's first layers, as it reads these tokens; the others are not computed. And the next
    one, of any of the tokens; None if there is none."""

    def stop(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _StopError(given[0], named)

    past, layers, stopped = new_cache(model), model.get_decoder().layers, None
    hook = (
        layers[count].register_forward_pre_hook(stop, with_kwargs=True)
        if count < len(layers)
        else None
    )
    try:
        forward(model, tokens, past)
    except _StopError as error:
        stopped = error
    finally:
        if hook is not None:
            hook.remove()
    found = [(layer.keys[0], layer.values[0]) for layer in past.layers[:count]]
    if stopped is None:
        return found, None
    hidden, named = stopped.hidden, stopped.named
    return found, lambda chosen: _one_layer(model, count, hidden, named, chosen)


def _one_layer(
    model: Any, index: int, hidden: torch.Tensor, named: dict[str, Any], chosen: torch.Tensor
) -> Pair:
    """Of the chosen tokens. What they attend to changes neither keys nor values of this layer."""
    past = new_cache(model)
    turns = tuple(one[:, chosen] for one in named["position_embeddings"])
    own = {"attention_mask": None, "past_key_values": past, "position_embeddings": turns}
    if named.get("position_ids") is not None:
        own["position_ids"] = named["position_ids"][:, chosen]
    model.get_decoder().layers[index](hidden[:, chosen], **{**named, **own})
    return past.layers[index].keys[0], past.layers[index].values[0]


@torch.inference_mode()
def by_deviation(model: Any, past: Any, tokens: Tokens, num_chosen: int) -> tuple[Places, float]:
    """Positions of the tokens to recompute, in order, and how many passes over all tokens choosing
    them took. `past` then holds what that has computed."""
    num_layers, checked = len(past.layers), min(CHECKED_LAYER, len(past.layers) - 1)
    fresh, next_layer = first_layers(model, tokens, checked + 1)
    every = torch.arange(len(tokens), device=model.device)
    wanted = num_chosen if next_layer is None else round(CANDIDATES * num_chosen)
    found = every[_farthest(fresh[checked], past.layers[checked], every, wanted)]
    for layer, new in zip(past.layers, fresh, strict=False):
        _keep(layer, every, new)
    computed = len(fresh) * len(tokens)
    if next_layer is not None:
        new, layer = next_layer(found), past.layers[checked + 1]
        chosen = found[_farthest(new, layer, found, num_chosen)]
        _keep(layer, found, new)
        computed, found = computed + len(found), chosen.sort().values
    return found.cpu().numpy(), computed / len(tokens) / num_layers


def _farthest(new: Pair, layer: Any, places: torch.Tensor, count: int) -> torch.Tensor:
    """Which of the tokens at these places differ most from what the layer holds, in order."""
    far = sum(
        (one.float() - held[0][:, places].float()).square().sum((0, 2))
        for one, held in zip(new, (layer.keys, layer.values), strict=True)
    )
    assert isinstance(far, torch.Tensor)
    return far.topk(min(count, len(places))).indices.sort().values


def _keep(layer: Any, places: torch.Tensor, new: Pair) -> None:
    for held, one in zip((layer.keys, layer.values), new, strict=True):
        held[0][:, places] = one


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
