"""A model's spec from its checkpoint files, for engines that keep weights in a form of their own.

Equal to `kdn.engines.transformers.spec_of` of the loaded model, without loading it:

- The fingerprint reads every weight, once: it is remembered for as long as the files stay as they
  are. They are mapped, so memory is used only as far as there is some.
- Rotation and windows are asked of a model with the same settings, shrunk to one head and random
  weights: they depend on the head size and the settings, not on the widths.

A checkpoint whose tensors are not those of the transformers model (quantised, or rearranged while
loading) is named by its own tensors: still one name for one set of weights, but engines that hold
the model as transformers does will not find its caches.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    PreTrainedConfig,
    PreTrainedModel,
)

from kdn.cache.fingerprint import VERSION, canonical_settings, fingerprint
from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.engines.latents import has_latents
from kdn.engines.refusals import refuse_unsupported
from kdn.engines.remembered import remembered
from kdn.engines.rope_probe import ropes_of, run_one_token
from kdn.engines.states import keeps_states
from kdn.engines.transformers import cache_shape, check_handed_over, settings_of, windows_of
from kdn.errors import FormatError, ModelUnavailableError, UnsupportedError

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_WIDTH = 16
"""Of everything in a shrunk model that rotation does not depend on."""


def spec_of_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, config: PreTrainedConfig | None = None
) -> ModelSpec:
    """The spec of the model in `folder`, as an engine holds it that loads it with `dtype`, and with
    settings of its own if `config` is given."""
    whole = config or _read_config(folder)
    config = whole.get_text_config(decoder=True)
    refuse_unsupported(whole, config)
    if has_latents(config):
        # What they keep of it, and in which order, is another thing in every engine.
        raise UnsupportedError(
            f"{config.model_type}: multi-head latent attention (MLA) is supported with "
            "transformers only"
        )
    hollow = _hollow(config)
    past = _hollow_cache(hollow)
    if keeps_states(past):
        raise UnsupportedError(
            f"{config.model_type}: recurrent layers are supported with transformers only"
        )
    num_kv_heads, head_dim = cache_shape(past)
    return ModelSpec(
        num_layers=len(past.layers),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(config.vocab_size),
        ropes=_ropes(config, head_dim),
        windows=windows_of(past),
        fingerprint=_fingerprint(folder, whole, hollow, dtype),
    )


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        return cast("PreTrainedConfig", AutoConfig.from_pretrained(folder))
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"no model configuration in {folder}: {error}") from error


def _hollow(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without its weights: it knows every shape, also that of its cache."""
    with torch.device("meta"):
        # Mixtures of experts multiply bfloat16 only on tensors that have no values.
        return _made(config, torch.bfloat16)


def _made(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """With random weights, or none."""
    try:
        own = copy.deepcopy(config)  # it is written to, and may be the engine's
        return cast("PreTrainedModel", AutoModelForCausalLM.from_config(own, dtype=dtype))
    except Exception as error:
        raise UnsupportedError(
            f"{config.model_type}: no model can be made of its settings alone, to ask it about its "
            f"cache: {error}"
        ) from error


def _hollow_cache(hollow: PreTrainedModel) -> Cache:
    try:
        return run_one_token(hollow, 0)
    except UnsupportedError as error:
        if error.__cause__ is None:
            raise
        # What a model does that needs values fails on tensors that have none.
        raise UnsupportedError(
            f"{type(hollow).__name__} does not tell the shape of its cache without running: "
            f"{error.__cause__}"
        ) from error


def _fingerprint(
    folder: Path, whole: PreTrainedConfig, hollow: PreTrainedModel, dtype: torch.dtype
) -> bytes:
    """`kdn.cache.fingerprint` of the weights in `folder`, read only if they have changed."""
    settings, wanted = settings_of(whole), _shapes(hollow)
    rounds = dtype == torch.float16
    about = (VERSION, canonical_settings(settings).decode(), rounds, sorted(wanted))

    def read() -> bytes:
        with ExitStack() as stack:
            stored = _chosen(folder, dict(_stored(folder, stack)), wanted)
            return fingerprint(settings, ((n, _cast(t, rounds)) for n, t in stored.items()))

    return remembered(_files(folder), about, read)


def _chosen(
    folder: Path, stored: dict[str, torch.Tensor], wanted: dict[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Those that the transformers model has, if it has them so; else all of them."""
    if all(name in stored and stored[name].shape == wanted[name] for name in wanted):
        return {name: stored[name] for name in wanted}
    logger.warning(
        "the weights of %s are stored in a form of their own: its caches are not shared with "
        "transformers",
        folder,
    )
    return stored


def _stored(folder: Path, stack: ExitStack) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, as a view of its file."""
    for path in _files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
        except Exception as error:
            raise FormatError(f"{path} is not a readable safetensors file: {error}") from error


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            found = sorted(folder / name for name in names)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise FormatError(f"{index} does not tell the files of weights: {error}") from error
    missing = [path.name for path in found if not path.is_file()]
    if missing or not found:
        raise ModelUnavailableError(f"no safetensors files in {folder} {' '.join(missing)}".strip())
    return found


def _cast(tensor: torch.Tensor, rounds: bool) -> torch.Tensor:
    """Only float16 rounds a float32 weight in a way that its fingerprint shows."""
    return tensor.half() if rounds and tensor.dtype == torch.float32 else tensor


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """What the model's state dict holds, tied weights under their first name only."""
    seen: set[int] = set()
    shapes: dict[str, torch.Size] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[name] = tensor.shape
    return shapes


def _ropes(config: PreTrainedConfig, head_dim: int) -> tuple[RopeSpec | None, ...]:
    """Of a model with one narrow head: everything else that has a width is made small."""
    small = type(config)(**config.to_dict())
    sizes = {
        "hidden_size": head_dim,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": _WIDTH,
        "vocab_size": _WIDTH,
    }
    for name, size in sizes.items():
        if isinstance(getattr(small, name, None), int):  # not one that differs by layer
            setattr(small, name, size)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _made(small, torch.float32).eval()
    check_handed_over(model)
    return ropes_of(model, run_one_token(model, 0))
