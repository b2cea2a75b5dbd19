"""A checkpoint of Llama-3.1-8B's shape with random weights: real speed, no meaning.

Written as files that vLLM and kdn read like any other's, without a tokenizer: prompts are token
ids. One that was written before is used again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

WEIGHT = 0.02
"""Deviation of most weights, as at usual initialisation."""
CACHED = 0.4
"""Of that, for weights that make keys and values. These are then as large as those that streams are
drawn for (`gpu_model.py`), so that what kdn publishes has about as many bits as theirs."""
SHARD_LAYERS = 8


@dataclass(frozen=True)
class Shape:
    num_layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values, at 16 bits."""
        return 2 * 2 * self.num_layers * self.kv_heads * self.head_dim

    def settings(self) -> dict[str, object]:
        """As config.json has them."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocabulary, "max_position_embeddings": 131072,
            "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
        }  # fmt: skip

    def of_layer(self, number: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of one layer's weights."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inside = {
            "self_attn.q_proj": (queries, self.hidden), "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden), "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.inner, self.hidden), "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner), "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }  # fmt: skip
        return {f"model.layers.{number}.{name}.weight": size for name, size in inside.items()}


SHAPES = {
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "tiny": Shape(4, 256, 512, 4, 4, 64, 512),
}


def write_checkpoint(folder: Path, shape: Shape, device: torch.device, seed: int) -> Path:
    """The folder, with the model in it. Its settings are written last: without them there is no
    model yet."""
    settings = json.dumps(shape.settings() | {"kdn_bench_seed": seed}, indent=1)
    config = folder / "config.json"
    if config.is_file() and config.read_text() == settings:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator(device).manual_seed(seed)
    places: dict[str, str] = {}
    for number, names in enumerate(_shards(shape)):
        file = f"model-{number:05d}.safetensors"
        weights = {name: _weight(name, size, rng) for name, size in names.items()}
        save_file(weights, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": places}  # transformers asks for both
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.write_text(settings)
    return folder


def _shards(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    """What goes into each file."""
    yield {
        "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    for first in range(0, shape.num_layers, SHARD_LAYERS):
        layers = range(first, min(first + SHARD_LAYERS, shape.num_layers))
        yield {name: size for layer in layers for name, size in shape.of_layer(layer).items()}


def _weight(name: str, size: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    if len(size) == 1:  # a norm's
        return torch.ones(size, dtype=torch.bfloat16)
    drawn = torch.empty(size, dtype=torch.bfloat16, device=rng.device)
    is_cached = "k_proj" in name or "v_proj" in name
    return drawn.normal_(0, WEIGHT * (CACHED if is_cached else 1.0), generator=rng).cpu()
