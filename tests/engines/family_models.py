"""Tiny models of every causal-LM family that transformers registers, with random weights.

Configurations call the same size by many names: `_SIZES` has them all, and each family is given
those that its configuration knows. `_SETTINGS` is what single families need besides: what cannot be
guessed, and whatever makes a tiny model have every kind of layer that the real ones have.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WINDOW = 100
"""Of attention with a window or in blocks: shorter than a chunk."""
MAX_WEIGHTS = 20_000_000

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "max_target_positions": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # GPT-2 and what came after it
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 2048,
    "n_ctx": 2048,
    "n_inner": 96,
    "rotary_dim": 8,
    # T5, OPT, MPT, CPM
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 16,
    "dim_ff": 96,
    "dim_head": 16,
    "num_layers": 4,
    "num_heads": 4,
    "n_layers": 4,
    "n_heads": 4,
    "kv_channels": 16,
    "ffn_dim": 96,
    "attention_heads": 4,
    # decoders of encoder-decoders. transformers counts cache layers by the encoder's.
    "decoder_layers": 4,
    "encoder_layers": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "num_decoder_layers": 4,
    "num_encoder_layers": 4,
    "num_decoder_attention_heads": 4,
    # BERTs
    "embedding_size": 64,
    "is_decoder": True,
    # mixtures of experts
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    # windows
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "window_size": WINDOW,
    # latent attention
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # recurrent states
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MIXED = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
_CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
_SHARING = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}
_GEMMA4 = {**_SHARING, "global_head_dim": 32}
_GEMMA4_ASSISTANT = {**_GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_QWEN4 = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
}
_RECURRENT = {"layer_types": ["linear_attention", "hybrid"] * 2}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16}
_EVERY_SECOND = {"layer_types": ["linear_attention", "full_attention"] * 2}

_SETTINGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 128},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        **_MIXED,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "doge": {"sliding_window": None},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "gemma3": {"text_config": _MIXED},
    "gemma3_text": _MIXED,
    "gemma3n": {"text_config": _SHARING},
    "gemma3n_text": _SHARING,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_assistant": {"text_config": _GEMMA4_ASSISTANT},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_assistant": {"text_config": _GEMMA4_ASSISTANT},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_MAMBA2, **_EVERY_SECOND},
    "inkling_text": {
        "layer_types": ["hybrid_sliding"] * 3 + ["hybrid"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": WINDOW,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_linear": {
        **_EVERY_SECOND,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2,
        "num_experts_per_token": 2,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "laguna": _MIXED,
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "longcat_flash": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mamba2": {"head_dim": 16, "num_heads": 8},
    "mellum": _MIXED,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "axial_pos_embds_dim": (32, 32),
        "axial_pos_shape": (32, 64),
        "attention_head_size": 16,
        "feed_forward_size": 96,
    },
    "xlm": {"emb_dim": 64},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
    "zamba": _RECURRENT,
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def build(family: str, **settings: Any) -> PreTrainedModel:
    """A random model, equal on every call. Its weights are larger than at usual initialisation, so
    that attention is not uniform. Raises whatever its configuration or its modules raise."""
    config = tiny_config(family, **settings)
    with torch.device("meta"):
        num_weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if num_weights > MAX_WEIGHTS:
        raise ValueError(f"{num_weights / 1e6:.0f} million weights remain of it")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(0.2 * noise if parameter.ndim > 1 else 1 + 0.5 * noise)
    return model.eval()


def tiny_config(family: str, **settings: Any) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[family]
    return kind(**_merged(_shrunk(kind()), {**_SETTINGS.get(family, {}), **settings}))


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """Those sizes that a configuration knows, and the same for its parts."""
    known = config.to_dict()
    sizes = {name: size for name, size in _SIZES.items() if name in known}
    if "kv_lora_rank" in sizes:  # latents are expanded to keys and values of every head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            sizes[name] = {**_shrunk(part), "model_type": part.model_type}
    return sizes


def _merged(sizes: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a part change that part alone."""
    merged = dict(sizes)
    for name, value in settings.items():
        is_part = isinstance(value, dict) and isinstance(sizes.get(name), dict)
        merged[name] = _merged(sizes[name], value) if is_part else value
    return merged
