"""Hugging Face transformers: a model's spec, and its DynamicCache to and from the canonical layout.

Only public hooks are used: `model(...)`, its state dict and configuration, and `DynamicCache`. What
cannot be carried over exactly is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kdn.cache.fingerprint import fingerprint
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.growing import GrowingLayer, Room, growing_cache
from kdn.engines.handover_probe import check_handover
from kdn.engines.latents import as_cached, canonical, has_latents
from kdn.engines.refusals import refuse_unsupported
from kdn.engines.rope_probe import ropes_of, run_one_token
from kdn.engines.unchanged import refuse_adapters
from kdn.errors import MismatchError, UnsupportedError


def spec_of(model: PreTrainedModel) -> ModelSpec:
    """Shape, rotation, windows and fingerprint of a model, measured on runs of a few tokens."""
    refuse_adapters(model)
    config = model.config.get_text_config(decoder=True)
    refuse_unsupported(model.config, config)
    past = run_one_token(model, 0)
    num_kv_heads, head_dim = cache_shape(past)
    check_handed_over(model)
    return ModelSpec(
        num_layers=len(past.layers),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(config.vocab_size),
        ropes=ropes_of(model, past),
        windows=windows_of(past),
        fingerprint=fingerprint_of(model),
    )


def check_handed_over(model: PreTrainedModel) -> None:
    """UnsupportedError unless the model goes on from its cache in the canonical layout and back."""
    config = model.config.get_text_config(decoder=True)
    check_handover(
        model,
        lambda: growing_cache(config),
        lambda past: to_dynamic_cache(from_dynamic_cache(past), config),
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
    for index, layer in enumerate(past.layers):
        _check_layer(index, layer)
        shapes |= {(t.shape[1], t.shape[3]) for t in canonical(layer.keys, layer.values)}
    if len(shapes) != 1:
        raise UnsupportedError(
            "KV heads and head size must be equal in all layers, for keys and values; "
            f"found (heads, size) {sorted(shapes)}"
        )
    num_kv_heads, head_dim = shapes.pop()
    return int(num_kv_heads), int(head_dim)


def _check_layer(index: int, layer: object) -> None:
    # Exactly these: subclasses keep further state (recurrent, indexer) that would be lost.
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, GrowingLayer):
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
        for layer in past.layers
    )


def from_dynamic_cache(past: Cache, start: int = 0) -> KVCache:
    """The canonical layout of a batch of one. `start` is the position of the cache's first token.

    A layer with a sliding window has dropped its old tokens: they are zero here, and `valid_from`
    says so.
    """
    num_kv_heads, head_dim = cache_shape(past)
    first = past.layers[0].keys
    if first.shape[0] != 1:
        raise UnsupportedError(f"a cache of one sequence was expected, found {first.shape[0]}")
    num_tokens = max(int(layer.get_seq_length()) for layer in past.layers)
    shape = (len(past.layers), num_tokens, num_kv_heads, head_dim)
    keys, values = first.new_zeros(shape), first.new_zeros(shape)
    valid_from = []
    for index, layer in enumerate(past.layers):
        missing = num_tokens - layer.keys.shape[2]
        for whole, held in zip((keys, values), canonical(layer.keys, layer.values), strict=True):
            whole[index, missing:] = held[0].transpose(0, 1)
        valid_from.append(start + missing)
    return KVCache(keys, values, start, tuple(valid_from))


def to_dynamic_cache(
    cache: KVCache, config: PreTrainedConfig, room: Room | None = None
) -> DynamicCache:
    """A cache from which the model continues exactly as from its own.

    It must begin with the context's first token, and each layer must hold what it still attends to.
    Where it lies in a `room`, and in the model's memory, nothing is copied.
    """
    if cache.start != 0:
        raise MismatchError(f"the cache must start at position 0, it starts at {cache.start}")
    past = DynamicCache(config=config) if room is None else growing_cache(config)
    if len(past.layers) != cache.num_layers:
        raise MismatchError(
            f"the model caches {len(past.layers)} layers, this cache has {cache.num_layers}"
        )
    # All layers at once: gradients then come back in one piece, not one as large per layer.
    layers = list(zip(cache.keys.unbind(), cache.values.unbind(), strict=True))
    for index, window in enumerate(windows_of(past)):
        needed_from = 0 if window is None else max(0, cache.end - (window - 1))
        if cache.valid_from[index] > needed_from:
            raise MismatchError(
                f"layer {index} needs the tokens from {needed_from} on, "
                f"this cache holds them from {cache.valid_from[index]} on"
            )
        if room is not None and window is None and not has_latents(config):
            past.layers[index] = room.layer(index, cache.num_tokens)
            continue
        keys, values = (side.transpose(0, 1)[None] for side in layers[index])
        # A window layer keeps what it needs of these and counts them all.
        past.update(*as_cached(keys, values, config), index)
    return past
