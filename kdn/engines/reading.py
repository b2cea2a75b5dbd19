"""Letting a model read tokens, a chunk at a time, on top of what it has.

Pieces end where chunks end. So the values of each chunk can be taken at once, before a layer with a
sliding window drops them: whatever its window, it then holds what a continuation from there needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kdn.cache.keys import CHUNK_TOKENS, Tokens
from kdn.cache.tensors import KVCache
from kdn.engines.growing import growing_cache


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Empty, for a model to fill."""
    return growing_cache(model.config.get_text_config(decoder=True))


def forward(
    model: PreTrainedModel, tokens: Tokens, past: Cache, *, every: bool = False
) -> torch.Tensor:
    """Read `tokens` after what `past` holds, into it: logits [vocabulary] after the last one, or
    after every one [tokens, vocabulary]."""
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=model.device)[None]
    options: dict[str, Any] = {}
    if not every and _keeps_logits(model):
        options["logits_to_keep"] = 1
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, past_key_values=past, use_cache=True, **options).logits[0]
    return logits if every else logits[-1]


def pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
    """[start, end) cut where chunks end."""
    while start < end:
        stop = min(end, (start // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
        yield start, stop
        start = stop


def read(model: PreTrainedModel, tokens: Tokens, past: Cache) -> torch.Tensor:
    """`forward`, piece by piece. `tokens` are those that `past` lacks."""
    start = past.get_seq_length()
    assert len(tokens), "expected at least one token to read"
    for at, stop in pieces(start, start + len(tokens)):
        logits = forward(model, tokens[at - start : stop - start], past)
    return logits


def last_tokens(past: Cache, start: int) -> KVCache:
    """A copy of what `past` holds from `start` on: `valid_from` tells what it has dropped."""
    end = past.get_seq_length()
    first = past.layers[0].keys
    shape = (len(past.layers), end - start, first.shape[1], first.shape[3])
    keys, values = first.new_empty(shape), first.new_empty(shape)
    valid_from = []
    for index, layer in enumerate(past.layers):
        count = min(end - start, layer.keys.shape[2])
        for whole, held in ((keys, layer.keys), (values, layer.values)):
            whole[index, : end - start - count] = 0
            if count:
                whole[index, -count:] = held[0, :, -count:].transpose(0, 1)
        valid_from.append(end - count)
    return KVCache(keys, values, start, tuple(valid_from))


def _keeps_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@contextmanager
def layer_by_layer(model: Any, tell: Callable[[float], None]) -> Iterator[None]:
    """Tells which part of its layers a model has gone through."""
    layers = model.get_decoder().layers

    def hook(number: int) -> Callable[..., None]:
        return lambda *_: tell((number + 1) / len(layers))

    hooks = [layer.register_forward_hook(hook(number)) for number, layer in enumerate(layers)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
