"""Hugging Face transformers: a model's spec, and its DynamicCache to and from the canonical layout.

Only public hooks are used: `model(...)`, its state dict and configuration, and `DynamicCache`. What
cannot be carried over exactly is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from kdn.cache.fingerprint import fingerprint
from kdn.cache.spec import ModelSpec
from kdn.cache.states import State
from kdn.cache.tensors import KVCache
from kdn.engines.growing import GrowingLayer, Room, growing_cache
from kdn.engines.handover_probe import check_handover
from kdn.engines.latents import as_cached, canonical, has_latents
from kdn.engines.refusals import longest_text, refuse_unsupported
from kdn.engines.rope_probe import ropes_of, run_one_token
from kdn.engines.states import (
    keeps_states,
    kv_indices,
    kv_layers,
    put_state,
    state_of,
)
from kdn.engines.unchanged import refuse_adapters
from kdn.errors import MismatchError, UnsupportedError

_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    GrowingLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def spec_of(model: PreTrainedModel) -> ModelSpec:
    """Shape, rotation, windows and fingerprint of a model, measured on runs of a few tokens."""
    refuse_adapters(model)
    config = model.config.get_text_config(decoder=True)
    refuse_unsupported(model.config, config, by_transformers=True)
    past = run_one_token(model, 0)
    num_kv_heads, head_dim = cache_shape(past)
    check_handed_over(model)
    return ModelSpec(
        num_layers=len(kv_layers(past)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(config.vocab_size),
        ropes=ropes_of(model, past),
        windows=windows_of(past),
        fingerprint=fingerprint_of(model),
        has_states=keeps_states(past),
        max_tokens=longest_text(config),
    )


def check_handed_over(model: PreTrainedModel) -> None:
    """UnsupportedError unless the model goes on from its cache in the canonical layout and back."""
    config = model.config.get_text_config(decoder=True)
    check_handover(
        model,
        lambda: growing_cache(config),
        lambda past: to_dynamic_cache(from_dynamic_cache(past), config, state=state_of(past)),
    )


def fingerprint_of(model: PreTrainedModel) -> bytes:
    """`kdn.cache.fingerprint` of a loaded model."""
    return fingerprint(settings_of(model.config), _weights(model))


def settings_of(config: PreTrainedConfig) -> dict[str, object]:
    """All settings that are not as the class of the configuration has them by itself.

    Equal for a loaded model and its config.json, in which most defaults are left out; and a release
    of transformers may add a setting without giving every model a new name.
    """
    settings = config.to_dict()
    usual = _usual_settings(type(config))
    settings = {k: v for k, v in settings.items() if k == "model_type" or v != usual.get(k)}
    if getattr(config, "rope_parameters", None):
        # Users set it at will. Only learned positions are counted from it, in some models.
        settings.pop("pad_token_id", None)
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            settings[name] = settings_of(part)
    return settings


def _usual_settings(kind: type[PreTrainedConfig]) -> dict[str, object]:
    try:
        return cast("dict[str, object]", kind().to_dict())
    except Exception:
        return {}  # a class that cannot be made of nothing: all settings count


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict, with tied weights under their first name only."""
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        identity = (tensor.data_ptr(), tensor.shape)
        if tensor.data_ptr() == 0 or identity not in seen:
            seen.add(identity)
            yield name, tensor


def cache_shape(past: Cache) -> tuple[int, int]:
    """KV heads and head size, equal in all layers, for keys and values."""
    shapes = set()
    for index, layer in zip(kv_indices(past), kv_layers(past), strict=True):
        _check_layer(index, layer)
        shapes |= {(t.shape[1], t.shape[3]) for t in canonical(layer.keys, layer.values)}
    if not shapes:
        raise UnsupportedError(
            "no layer keeps keys and values of each token: models with recurrent states alone are "
            "not supported"
        )
    if len(shapes) != 1:
        raise UnsupportedError(
            "KV heads and head size must be equal in all layers, for keys and values; "
            f"found (heads, size) {sorted(shapes)}"
        )
    num_kv_heads, head_dim = shapes.pop()
    return int(num_kv_heads), int(head_dim)


def _check_layer(index: int, layer: object) -> None:
    # Exactly these: other subclasses keep further state (of indexers) that would be lost.
    if type(layer) not in _LAYERS:
        raise UnsupportedError(
            f"cache layer {index} is a {type(layer).__name__}, not supported: it keeps more than "
            "keys and values"
        )
    if not layer.is_initialized:  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"layer {index} caches nothing of a text: it looks at images, or at another layer's "
            "cache"
        )


def windows_of(past: Cache) -> tuple[int | None, ...]:
    """How many tokens each layer attends to, None for all."""
    return tuple(
        int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None
        for layer in kv_layers(past)
    )


def from_dynamic_cache(past: Cache, start: int = 0) -> KVCache:
    """The canonical layout of a batch of one. `start` is the position of the cache's first token.

    A layer with a sliding window has dropped its old tokens: they are zero here, and `valid_from`
    says so.
    """
    num_kv_heads, head_dim = cache_shape(past)
    layers = kv_layers(past)
    first = layers[0].keys
    if first.shape[0] != 1:
        raise UnsupportedError(f"a cache of one sequence was expected, found {first.shape[0]}")
    num_tokens = max(int(layer.get_seq_length()) for layer in layers)
    shape = (len(layers), num_tokens, num_kv_heads, head_dim)
    keys, values = first.new_zeros(shape), first.new_zeros(shape)
    valid_from = []
    for index, layer in enumerate(layers):
        missing = num_tokens - layer.keys.shape[2]
        for whole, held in zip((keys, values), canonical(layer.keys, layer.values), strict=True):
            whole[index, missing:] = held[0].transpose(0, 1)
        valid_from.append(start + missing)
    return KVCache(keys, values, start, tuple(valid_from))


def to_dynamic_cache(
    cache: KVCache,
    config: PreTrainedConfig,
    room: Room | None = None,
    state: State | None = None,
) -> DynamicCache:
    """A cache from which the model continues exactly as from its own.

    It must begin with the context's first token, and each layer must hold what it still attends to.
    Where it lies in a `room`, and in the model's memory, nothing is copied. A model with recurrent
    layers needs their `state` after the cache's last token.
    """
    if cache.start != 0:
        raise MismatchError(f"the cache must start at position 0, it starts at {cache.start}")
    past = DynamicCache(config=config) if room is None else growing_cache(config)
    indices = kv_indices(past)
    if len(indices) != cache.num_layers:
        raise MismatchError(
            f"the model caches {len(indices)} layers, this cache has {cache.num_layers}"
        )
    if keeps_states(past):
        if state is None:
            raise MismatchError("the model's recurrent layers need a state: this cache has none")
        put_state(past, state, cache.keys.device)
    # All layers at once: gradients then come back in one piece, not one as large per layer.
    layers = list(zip(cache.keys.unbind(), cache.values.unbind(), strict=True))
    for index, window in enumerate(windows_of(past)):
        needed_from = 0 if window is None else max(0, cache.end - (window - 1))
        if cache.valid_from[index] > needed_from:
            raise MismatchError(
                f"layer {index} needs the tokens from {needed_from} on, "
                f"this cache holds them from {cache.valid_from[index]} on"
            )
        place = indices[index]
        grows = type(past.layers[place]) is GrowingLayer
        if room is not None and grows and not has_latents(config):
            past.layers[place] = room.layer(index, cache.num_tokens)
            continue
        keys, values = (side.transpose(0, 1)[None] for side in layers[index])
        # A window layer keeps what it needs of these and counts them all.
        past.update(*as_cached(keys, values, config), place)
    return past
