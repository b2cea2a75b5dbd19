"""The models that are trained: one for each way to cache that SmolLM2 does not have.

- `mha`: as many KV heads as query heads, 8 of 128, and RoPE on a quarter of each (StableLM).
- `gemma`: 5 of 6 layers see a window, their RoPE is another one, keys are normed (Gemma 3).
- `mla`: a latent and one turned key for all heads, of DeepSeek V3's sizes. All its layers are
  dense: experts would change what is computed between caches, not what is cached.

Each comes in the size that a GPU trains in a minute or two, and in one that a CPU trains in
seconds. vLLM knows all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PAD, BOS, EOS = 0, 1, 2
"""Token ids, in every vocabulary made here."""


@dataclass(frozen=True)
class Size:
    """How much of everything: of a shape's settings, and of its training."""

    vocabulary: int
    positions: int
    """Of the longest context, with what follows it."""
    length: int
    """Tokens of a training window."""
    batch: int
    """Windows in a step."""
    rate: float
    """Of learning, at its highest."""
    swapped: float = 0.0
    """Part of the training windows in which tokens stand for others (windows.py)."""
    is_quick: bool = False


FULL = Size(vocabulary=8192, positions=2048, length=2048, batch=8, rate=1e-3, swapped=0.5)
QUICK = Size(vocabulary=512, positions=768, length=128, batch=4, rate=4e-3, is_quick=True)


def settings_of(shape: str, size: Size) -> dict[str, Any]:
    """What transformers makes a configuration of."""
    common = {
        "vocab_size": size.vocabulary, "max_position_embeddings": size.positions,
        "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return common | SHAPES[shape](size.is_quick)


def _mha(is_quick: bool) -> dict[str, Any]:
    sizes = (128, 344, 3, 2) if is_quick else (1024, 2560, 8, 8)
    hidden, inner, layers, heads = sizes
    return {
        "model_type": "stablelm", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip


def _gemma(is_quick: bool) -> dict[str, Any]:
    hidden, inner, layers, heads, head, window = (
        (128, 344, 3, 2, 64, 128) if is_quick else (768, 2048, 12, 4, 256, 512)
    )
    full_every = 3 if is_quick else 6
    return {
        "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 1,
        "head_dim": head, "query_pre_attn_scalar": head, "sliding_window": window,
        "layer_types": [
            "sliding_attention" if (layer + 1) % full_every else "full_attention"
            for layer in range(layers)
        ],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    }  # fmt: skip


def _mla(is_quick: bool) -> dict[str, Any]:
    hidden, inner, layers, heads = (128, 344, 3, 2) if is_quick else (768, 2304, 10, 12)
    return {
        "model_type": "deepseek_v3", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "first_k_dense_replace": layers, "num_nextn_predict_layers": 0,
        "q_lora_rank": hidden // 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64, "v_head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip


SHAPES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "mha": _mha, "gemma": _gemma, "mla": _mla,
}  # fmt: skip


def new_model(shape: str, size: Size) -> Any:
    """With random weights in float32. Attention is what torch has: fast, and the same for all."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = settings_of(shape, size)
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
