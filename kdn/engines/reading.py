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
from kdn.cache.states import State, StateLayout
from kdn.cache.tensors import KVCache
from kdn.engines.growing import growing_cache
from kdn.engines.latents import canonical
from kdn.engines.rope_probe import probe_tokens
from kdn.engines.states import keeps_states, kv_layers, layout_of, state_of
from kdn.engines.transformers import from_dynamic_cache, windows_of
from kdn.errors import UnsupportedError

STATE_TOKENS = 32
"""More than convolutions look back."""


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Empty, for a model to fill."""
    return growing_cache(model.config.get_text_config(decoder=True))


def forward(
    model: PreTrainedModel,
    tokens: Tokens,
    past: Cache,
    *,
    every: bool = False,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read `tokens` after what `past` holds, into it: logits [vocabulary] after the last one, or
    after every one [tokens, vocabulary]. At `positions`, under a `mask`, if they are not those of
    tokens that follow each other."""
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=model.device)[None]
    logits = forward_rows(model, ids, past, every=every, mask=mask, positions=positions)[0]
    return logits if every else logits[-1]


def forward_rows(
    model: PreTrainedModel,
    ids: torch.Tensor,
    past: Cache,
    *,
    every: bool = False,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """`forward` of several contexts, which are as long: token ids [rows, tokens] after as many rows
    of `past`. Logits [rows, tokens, vocabulary]; unless `every`, those of the last one are last."""
    options: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    if positions is not None:
        options["position_ids"] = positions[None]
    if not every and _keeps_logits(model):
        options["logits_to_keep"] = 1
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, past_key_values=past, use_cache=True, **options).logits
    return logits


def pieces(start: int, end: int, chunks: int = 1) -> Iterator[tuple[int, int]]:
    """[start, end) cut where chunks end, or every so many of them."""
    size = chunks * CHUNK_TOKENS
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield start, stop
        start = stop


def read(model: PreTrainedModel, tokens: Tokens, past: Cache) -> torch.Tensor:
    """`forward`, piece by piece. `tokens` are those that `past` lacks."""
    start = past.get_seq_length()
    assert len(tokens), "expected at least one token to read"
    for at, stop in pieces(start, start + len(tokens)):
        logits = forward(model, tokens[at - start : stop - start], past)
    return logits


def state_layout(model: PreTrainedModel) -> StateLayout | None:
    """What the model's recurrent layers keep after some tokens; None if it has none."""
    past = new_cache(model)
    if not keeps_states(past):
        return None
    forward(model, probe_tokens(model, STATE_TOKENS).tolist(), past)
    return layout_of(past)


def state_after(model: PreTrainedModel, tokens: Tokens) -> State | None:
    """Of the model's recurrent layers, when it has read these; None if it has none."""
    past = new_cache(model)
    if not keeps_states(past):
        return None
    forward(model, tokens, past)
    return state_of(past)


def read_whole(model: PreTrainedModel, tokens: Tokens) -> KVCache:
    """The complete cache of a context. A layer with a window drops tokens as it reads on: a model
    with such layers reads in pieces that the shortest window holds, and the values of each piece
    are taken at once."""
    past = new_cache(model)
    held = min((window - 1 for window in windows_of(past) if window is not None), default=None)
    if held is None or held >= len(tokens):
        forward(model, tokens, past)
        return from_dynamic_cache(past)
    if held < 1:
        raise UnsupportedError("a layer with a window of one token keeps nothing to calibrate on")
    size, parts = min(CHUNK_TOKENS, held), []
    for at in range(0, len(tokens), size):
        piece = tokens[at : at + size]
        forward(model, piece, past)
        parts.append(last_tokens(past, at, at + len(piece)))
    keys, values = (torch.cat([getattr(p, side) for p in parts], 1) for side in ("keys", "values"))
    return KVCache(keys, values)


def last_tokens(past: Cache, start: int, end: int | None = None) -> KVCache:
    """A copy of what `past` holds from `start` on, up to `end`: `valid_from` tells what it has
    dropped."""
    held_until = past.get_seq_length()
    end = held_until if end is None else end
    layers = kv_layers(past)
    first, _ = canonical(*(t[:, :, :1] for t in (layers[0].keys, layers[0].values)))
    shape = (len(layers), end - start, first.shape[1], first.shape[3])
    keys, values = first.new_empty(shape), first.new_empty(shape)
    valid_from = []
    for index, layer in enumerate(layers):
        held_from = held_until - layer.keys.shape[2]
        begin = min(max(start, held_from), end)
        own = slice(begin - held_from, end - held_from)
        found = canonical(layer.keys[:, :, own], layer.values[:, :, own])
        for whole, held in zip((keys, values), found, strict=True):
            if begin > start:
                whole[index, : begin - start] = 0
            if begin < end:
                whole[index, begin - start :] = held[0].transpose(0, 1)
        valid_from.append(begin)
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
