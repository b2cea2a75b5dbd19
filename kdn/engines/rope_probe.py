"""How a model turns its keys, found by asking the model.

Attention over a single token returns that token's value whatever the position, so a one-token
prompt has the same hidden states at every position: only RoPE tells its cached keys apart. Two such
runs, at position 0 and further on, show for every layer which of the model's frequency tables it
uses, whether its pairs are halves or neighbours, and whether it turns at all. No table of model
names is needed, and a rotation nobody described here is refused instead of mistaken.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from transformers import Cache, PreTrainedModel

from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.codec.rope import redo, undo
from kdn.errors import UnsupportedError

_FAR_POSITION = 1000
_NUM_PROBES = 4


def run_one_token(model: PreTrainedModel, position: int) -> Cache:
    """The cache after a batch of one-token prompts at `position`, each of another token."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = [(i + 1) * vocab_size // (_NUM_PROBES + 1) for i in range(_NUM_PROBES)]
    inputs = {"input_ids": torch.tensor(tokens, device=model.device)[:, None]}
    if _accepts_positions(model):
        inputs["position_ids"] = torch.full_like(inputs["input_ids"], position)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            result = model(**inputs, use_cache=True)
    finally:
        model.train(was_training)
    past = getattr(result, "past_key_values", None)
    if not isinstance(past, Cache):
        raise UnsupportedError(f"{type(model).__name__} keeps no key-value cache of its tokens")
    return past


def ropes_of(model: PreTrainedModel, near: Cache) -> tuple[RopeSpec | None, ...]:
    """The rotation of every cached layer; `near` is the result of `run_one_token` at position 0."""
    candidates = list(_candidates(model))
    num_layers = len(near.layers)
    if not candidates and not _accepts_positions(model):
        return (None,) * num_layers
    position = min(_FAR_POSITION, _max_positions(model) - 1)
    far = run_one_token(model, position)
    values = _stack(near, "values")
    if _distance(values, _stack(far, "values")).max() > _tolerance(near):
        # Positions were added to the hidden states (GPT-2): keys are not turned on top of that.
        if candidates:
            raise UnsupportedError(
                f"{type(model).__name__} has both RoPE and positions in its hidden states"
            )
        return (None,) * num_layers
    return _best(candidates, near, far, position, type(model).__name__)


def _best(
    candidates: list[RopeSpec], near: Cache, far: Cache, position: int, model_name: str
) -> tuple[RopeSpec | None, ...]:
    """Per layer the candidate that turns the near keys into the far keys."""
    keys, wanted = _stack(near, "keys"), _stack(far, "keys")
    options: list[RopeSpec | None] = [None, *candidates]
    errors = torch.stack([_error(option, keys, wanted, position) for option in options])
    smallest, choice = errors.min(dim=0)
    tolerance = _tolerance(near)
    for layer, error in enumerate(smallest.tolist()):
        if not error <= tolerance:
            raise UnsupportedError(
                f"{model_name} turns the keys of layer {layer} in a way that is not plain RoPE "
                f"(relative error {error:.3g} at position {position}, at most {tolerance:.3g})"
            )
    return tuple(options[i] for i in choice.tolist())


def _error(
    rope: RopeSpec | None, keys: torch.Tensor, wanted: torch.Tensor, position: int
) -> torch.Tensor:
    """Relative error per layer, were every layer to turn by `rope`."""
    layers, _, heads, dim = keys.shape
    spec = ModelSpec(layers, heads, dim, 0, (rope,) * layers, (None,) * layers, b"")
    return _distance(redo(undo(keys, spec, 0), spec, position), wanted)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Relative to the size of what was wanted, per layer."""
    error = (found - wanted).square().sum(dim=(1, 2, 3))
    return (error / wanted.square().sum(dim=(1, 2, 3)).clamp_min(1e-30)).sqrt()


def _tolerance(past: Cache) -> float:
    """For rounding alone: another rotation is off by a good part of the keys themselves."""
    return 1e-3 + 8 * torch.finfo(past.layers[0].keys.dtype).eps


def _stack(past: Cache, part: str) -> torch.Tensor:
    """[layers, 1 token, probes * heads, head_dim], float32 on the CPU."""
    parts = [getattr(layer, part)[:, :, -1].flatten(0, 1) for layer in past.layers]
    return torch.stack([p.float().cpu() for p in parts])[:, None]


def _candidates(model: PreTrainedModel) -> Iterator[RopeSpec]:
    """Every frequency table the model's rotary modules hold, with either kind of pairs."""
    found: set[RopeSpec] = set()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            if buffer.dtype != torch.float32:
                raise UnsupportedError(
                    f"RoPE frequencies are {buffer.dtype}, not float32, so keys differ from those "
                    "of the same model elsewhere: load it with dtype=... instead of model.to(...)"
                )
            amplitude = getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0)
            for interleaved in (False, True):
                rope = RopeSpec(tuple(buffer.flatten().tolist()), float(amplitude), interleaved)
                if rope not in found:
                    found.add(rope)
                    yield rope


def _accepts_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _max_positions(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "max_position_embeddings", None) or _FAR_POSITION + 1)
