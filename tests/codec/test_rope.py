"""Undoing RoPE gives what the model had before it turned its keys, for every kind of rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kdn.codec.rope
from kdn.cache.spec import ModelSpec
from kdn.codec.rope import redo, undo
from kdn.engines.transformers import from_dynamic_cache, spec_of
from kdn.errors import MismatchError
from tests.codec.rotations import MIXED


def random_keys(num_layers: int, num_tokens: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_layers, num_tokens, 3, 16, generator=generator)


def by_hand(keys: torch.Tensor, spec: ModelSpec, start: int) -> torch.Tensor:
    """One complex number at a time."""
    turned = keys.double().clone()
    for layer, rope in enumerate(spec.ropes):
        for pair, frequency in enumerate(rope.inv_freq if rope else ()):
            assert rope is not None
            a = 2 * pair if rope.interleaved else pair
            b = a + 1 if rope.interleaved else pair + len(rope.inv_freq)
            for token in range(keys.shape[1]):
                angle = torch.tensor((start + token) * frequency, dtype=torch.float64)
                factor = torch.polar(torch.tensor(rope.amplitude, dtype=torch.float64), angle)
                number = torch.complex(turned[layer, token, :, a], turned[layer, token, :, b])
                number = number * factor
                turned[layer, token, :, a], turned[layer, token, :, b] = number.real, number.imag
    return turned.float()


@pytest.mark.parametrize("start", [0, 777])
def test_redo_turns_each_pair_as_by_hand(start: int) -> None:
    keys = random_keys(6)
    torch.testing.assert_close(redo(keys, MIXED, start), by_hand(keys, MIXED, start))


@pytest.mark.parametrize("start", [0, 1, 1_000_000])
@pytest.mark.parametrize("block_values", [1, 1 << 18])
def test_undo_inverts_redo(start: int, block_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kdn.codec.rope, "_BLOCK_VALUES", block_values)
    keys = random_keys(6)
    back = undo(redo(keys, MIXED, start), MIXED, start)
    torch.testing.assert_close(back, keys, rtol=0, atol=2e-6)


def test_positions_count_from_start() -> None:
    keys = random_keys(6)
    assert torch.equal(redo(keys, MIXED, 40)[:, 3:], redo(keys[:, 3:], MIXED, 43))


def test_part_of_the_layers() -> None:
    keys = random_keys(6)
    part = redo(keys[3:5], MIXED, 40, first_layer=3)
    assert torch.equal(part, redo(keys, MIXED, 40)[3:5])


@pytest.mark.parametrize("turn", [undo, redo])
def test_in_place_and_into_another_dtype(turn: Callable[..., torch.Tensor]) -> None:
    keys = random_keys(6)
    expected = turn(keys, MIXED, 40)
    assert torch.equal(keys, random_keys(6))  # untouched
    half = torch.empty_like(keys, dtype=torch.float16)
    assert turn(keys, MIXED, 40, out=half) is half
    assert torch.equal(half, expected.half())
    assert turn(keys, MIXED, 40, out=keys) is keys
    assert torch.equal(keys, expected)


def test_half_precision_keys_are_undone_in_float32() -> None:
    keys = random_keys(6).half()
    assert torch.equal(undo(keys, MIXED, 40), undo(keys.float(), MIXED, 40))


@pytest.mark.parametrize("shape", [(0, 9, 3, 16), (6, 0, 3, 16)])
def test_nothing_to_turn(shape: tuple[int, ...]) -> None:
    assert redo(torch.zeros(shape), MIXED, 0).shape == shape


@pytest.mark.parametrize(
    ("shape", "first_layer"), [((6, 9, 3, 8), 0), ((6, 9, 16), 0), ((6, 9, 3, 16), 1)]
)
def test_other_shapes_are_refused(shape: tuple[int, ...], first_layer: int) -> None:
    with pytest.raises(MismatchError):
        redo(torch.zeros(shape), MIXED, 0, first_layer=first_layer)


WINDOWED = {"sliding_window": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
}
GEMMA3 = {
    "head_dim": 32,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    **WINDOWED,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, MHA": ("llama", {"num_key_value_heads": 4}),
    "llama, head of 6": ("llama", {"head_dim": 6}),
    "llama3 scaling": ("llama", {"rope_parameters": LLAMA3}),
    "linear scaling": ("llama", {"rope_parameters": LINEAR}),
    "yarn scaling": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "mistral": ("mistral", WINDOWED),
    "gemma2": ("gemma2", {"head_dim": 32, **WINDOWED}),
    "gemma3": ("gemma3_text", GEMMA3),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {}),
    "glm": ("glm", {"head_dim": 16}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", WINDOWED),
    "smollm3": ("smollm3", {}),
}


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_undo_gives_what_the_model_had(family: str, start: int, tiny_model: Any) -> None:
    """Against the output of each layer's own key projection (and key norm)."""
    name, settings = FAMILIES[family]
    model = tiny_model(name, **settings)
    num_tokens = 12  # less than the windows
    before = record_keys(model)
    tokens = torch.arange(3, 3 + num_tokens)[None]
    positions = torch.arange(start, start + num_tokens)[None]
    spec = spec_of(model)
    before.clear()
    with torch.no_grad():
        past = model(tokens, position_ids=positions, use_cache=True).past_key_values
    undone = undo(from_dynamic_cache(past, start).keys, spec, start)
    expected = torch.stack(before).reshape(undone.shape)
    # The model's own angles are float32 products: off by up to 6e-5 at position 1000.
    torch.testing.assert_close(undone, expected, rtol=1e-4, atol=2e-3 if start else 1e-4)
    torch.testing.assert_close(redo(undone, spec, start), from_dynamic_cache(past).keys)


def record_keys(model: Any) -> list[torch.Tensor]:
    """Collects, per layer and in order, [tokens, kv_heads, head_dim] keys before RoPE."""
    found: list[torch.Tensor] = []
    config = model.config
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.ndim == 3 and output.shape[-1] > heads * dim:  # query, key and value as one
            skip = config.num_attention_heads * dim
            output = output[..., skip : skip + heads * dim]
        if output.ndim == 4 and output.shape[1] == heads and output.shape[2] != heads:
            output = output.transpose(1, 2)
        found.append(output[0].reshape(-1, heads, dim))

    for layer in model.model.layers:
        parts = dict(layer.self_attn.named_children())
        next(
            parts[n] for n in ("k_norm", "k_proj", "qkv_proj") if n in parts
        ).register_forward_hook(keep)
    return found
