"""Models that are refused by name, from their configuration alone, before any computing.

What a configuration does not tell is found by asking the model: `rope_probe.py`,
`handover_probe.py`. docs/models.md lists what becomes of every family.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from kdn.errors import UnsupportedError

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"}
"""Layers that keep a state, perhaps beside keys and values, or nothing."""

_RECURRENT = ("linear", "mamba", "conv", "hybrid", "recurrent", "delta")
"""In names of layers that keep a state which each token changes."""

# Keys under these depend on the length of the whole text, not on their position alone.
_LENGTH_DEPENDENT_ROPES = {"dynamic": "dynamic NTK", "longrope": "longrope", "su": "longrope"}

_BY_NAME = {
    "moshi": "with a cache it attends to a window, without one to everything",
}
"""Families whose own caches lead elsewhere than reading, which shows too late to be probed for."""


def refuse_unsupported(
    whole: PreTrainedConfig, config: PreTrainedConfig, *, by_transformers: bool = False
) -> None:
    """UnsupportedError for what is known not to work. `config` is the text part of `whole`.
    `by_transformers`: the model is one of transformers itself, whose recurrent states are carried,
    too, and whose keys are known as long as a text is short (`longest_text`)."""
    name = config.model_type
    if name in _BY_NAME:
        raise UnsupportedError(f"{name}: not supported, {_BY_NAME[name]}")
    if whole.is_encoder_decoder:
        raise UnsupportedError(f"{name}: encoder-decoder models are not supported")
    known = _LAYER_TYPES | _STATE_TYPES if by_transformers else _LAYER_TYPES
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - known):
        raise UnsupportedError(f"{name}: layers of type {kind!r} are not supported, {_why(kind)}")
    for rope in _rope_parameters(config):
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        if kind in _LENGTH_DEPENDENT_ROPES and not by_transformers:
            raise UnsupportedError(
                f"{name}: {_LENGTH_DEPENDENT_ROPES[kind]} RoPE is not supported, its keys depend "
                "on the total length"
            )
        if "mrope_section" in rope:
            raise UnsupportedError(f"{name}: multimodal RoPE (mrope) is not supported")


def longest_text(config: PreTrainedConfig) -> int | None:
    """How many tokens a text may have whose keys depend on their positions alone; None: any number.

    Dynamic NTK turns by other frequencies from the length on that the model was trained for, ever
    others as a text grows; longrope has one set of frequencies for texts up to some length, and
    another for longer ones. Up to there keys are those of plain RoPE; what crosses the border would
    need all its keys anew.
    """
    limits = [_border(config, rope) for rope in _rope_parameters(config)]
    return min((limit for limit in limits if limit is not None), default=None)


def _border(config: PreTrainedConfig, rope: dict[str, object]) -> int | None:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in _LENGTH_DEPENDENT_ROPES:
        return None
    border = getattr(config, "max_position_embeddings", None)
    if kind != "dynamic":
        own = getattr(config, "original_max_position_embeddings", None)
        border = rope.get("original_max_position_embeddings") or own
    if not isinstance(border, int) or border < 2:
        name = _LENGTH_DEPENDENT_ROPES[kind]
        raise UnsupportedError(
            f"{config.model_type}: {name} RoPE is not supported without the length that the model "
            "was trained for"
        )
    # A model that has read a longer text turns by the usual frequencies again only below it.
    return border - 1 if kind == "dynamic" else border


def _why(kind: str) -> str:
    if any(part in kind for part in _RECURRENT):
        return "they keep a state that every token changes, not keys and values of each token"
    return "they keep more than keys and values of each token"


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, object]]:
    """One dict per kind of RoPE: a model has one, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
