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
from contextlib import contextmanager

import torch
from transformers import Cache, PreTrainedModel

from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.codec.rope import redo, undo
from kdn.engines.latents import canonical
from kdn.engines.refusals import longest_text
from kdn.engines.states import kv_layers
from kdn.errors import KdnError, UnsupportedError

_FAR_POSITION = 1000
_NUM_PROBES = 4
_NUM_REPEATS = 8


def probe_tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Token ids from all over the vocabulary, where the model is."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = [(i + 1) * vocab_size // (count + 1) for i in range(count)]
    return torch.tensor(tokens, device=model.device)


@contextmanager
def running(model: PreTrainedModel, what: str) -> Iterator[None]:
    """Around probing passes. Whatever goes wrong in them means that a model cannot do `what`."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    except (KdnError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnsupportedError(f"{type(model).__name__} cannot {what}: {why}") from error
    finally:
        model.train(was_training)


def run_one_token(model: PreTrainedModel, position: int) -> Cache:
    """The cache after a batch of one-token prompts at `position`, each of another token."""
    inputs = {"input_ids": probe_tokens(model, _NUM_PROBES)[:, None]}
    if _accepts_positions(model):
        inputs["position_ids"] = torch.full_like(inputs["input_ids"], position)
    return _cache_after(model, inputs)


def _cache_after(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Cache:
    with running(model, "read a prompt of token ids alone"):
        result = model(**inputs, use_cache=True)
    past = getattr(result, "past_key_values", None)
    if not isinstance(past, Cache):
        raise UnsupportedError(f"{type(model).__name__} keeps no key-value cache of its tokens")
    if not hasattr(past, "layers"):  # an EncoderDecoderCache is two caches
        kind = type(past).__name__
        raise UnsupportedError(
            f"{type(model).__name__} keeps its cache as {kind}, which is not supported"
        )
    return past


def ropes_of(model: PreTrainedModel, near: Cache) -> tuple[RopeSpec | None, ...]:
    """The rotation of every cached layer; `near` is the result of `run_one_token` at position 0."""
    if not _accepts_positions(model):
        return _without_positions(model, len(kv_layers(near)))
    candidates = list(_candidates(model))
    position = min(_FAR_POSITION, _max_positions(model) - 1)
    far = run_one_token(model, position)
    values = _stack(near, "values")
    if _distance(values, _stack(far, "values")).max() > _tolerance(near):
        # Positions were added to the hidden states (GPT-2): keys are not turned on top of that.
        if candidates:
            raise UnsupportedError(
                f"{type(model).__name__} has both RoPE and positions in its hidden states"
            )
        return (None,) * len(kv_layers(near))
    ropes = _best(candidates, near, far, position, type(model).__name__)
    return ropes if any(ropes) else _without_positions(model, len(ropes))


def _without_positions(model: PreTrainedModel, num_layers: int) -> tuple[None, ...]:
    """No rotation at all, of a model whose keys do not follow the positions it is told.

    The same token, read again and again, has the same value at every position. If only its keys
    differ, they are turned by positions that the model counts itself.
    """
    tokens = probe_tokens(model, 1)[None].expand(1, _NUM_REPEATS)
    past = _cache_after(model, {"input_ids": tokens})
    for layer in kv_layers(past):
        keys, values = (t[0].float() for t in (layer.keys, layer.values))
        moved = [(one[:, -1] - one[:, 0]).norm() / one[:, 0].norm() for one in (keys, values)]
        if moved[0] > _tolerance(past) >= moved[1]:
            raise UnsupportedError(
                f"{type(model).__name__} turns its keys by positions that it counts itself, so how "
                "it turns them cannot be found out"
            )
    return (None,) * num_layers


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
    return 1e-3 + 8 * torch.finfo(kv_layers(past)[0].keys.dtype).eps


def _stack(past: Cache, part: str) -> torch.Tensor:
    """[layers, 1 token, probes * heads, head_dim], float32 on the CPU."""
    pairs = [canonical(layer.keys, layer.values) for layer in kv_layers(past)]
    parts = [(keys if part == "keys" else values)[:, :, -1] for keys, values in pairs]
    return torch.stack([p.flatten(0, 1).float().cpu() for p in parts])[:, None]


def _candidates(model: PreTrainedModel) -> list[RopeSpec]:
    """Every frequency table the model's rotary modules hold, in all ways to turn by it."""
    found: list[RopeSpec] = []
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
            found += _turning(buffer.flatten().tolist(), float(amplitude))
    if rotary_dim := getattr(model.config, "rotary_dim", None):
        # GPT-J and CodeGen keep a table of sines instead of its frequencies.
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.int64) / rotary_dim
        found += _turning((1.0 / 10000**steps).tolist(), 1.0)
    return list(dict.fromkeys(found))


def _turning(frequencies: list[float], amplitude: float) -> list[RopeSpec]:
    """To the usual side and, as NanoChat does, to the other, each with both kinds of pairs."""
    return [
        RopeSpec(tuple(side * one for one in frequencies), amplitude, interleaved)
        for side in (1, -1)
        for interleaved in (False, True)
    ]


def _accepts_positions(model: PreTrainedModel) -> bool:
    """Whether it takes `position_ids`, or may pass them on to the model inside it."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters)


def _max_positions(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_target_positions")
    most = int(next(filter(None, (getattr(config, n, None) for n in names)), _FAR_POSITION + 1))
    return min(most, longest_text(config) or most)
