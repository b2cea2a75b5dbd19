"""What `kdn bench gpu` compares with: a Llama of random weights reads a context, and then runs one
token after it.

That token's step is timed as an engine would run it: over a cache `[tokens, heads, channels]` per
layer, the layout that the decoder writes, with the new token's keys and values written into their
place. (transformers' own cache copies the whole context in every step.) Kernels are PyTorch's, as a
CUDA graph; an engine fuses more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kdn.bench.gpu_timing import cuda_ms, replayed
from kdn.cache.tensors import KVCache

VOCABULARY, KV_HEADS = 128256, 8


@dataclass(frozen=True)
class Shape:
    """A Llama's shape; `timed_layers` of it are run, and the time scaled."""

    name: str
    num_layers: int
    hidden: int
    inner: int
    heads: int
    timed_layers: int


SHAPES = {
    "8b": Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 32),
    "70b": Shape("Llama-3.1-70B", 80, 8192, 28672, 64, 8),
}


class PrefillBench:
    """A model of random weights: how long reading takes, and the first token after a context."""

    def __init__(self, shape: Shape) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self._shape = shape
        config = LlamaConfig(
            hidden_size=shape.hidden, intermediate_size=shape.inner, vocab_size=VOCABULARY,
            num_hidden_layers=shape.timed_layers, num_attention_heads=shape.heads,
            num_key_value_heads=KV_HEADS, max_position_embeddings=131072, rope_theta=500000.0,
            attn_implementation="sdpa", dtype=torch.bfloat16,
        )  # fmt: skip
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to(torch.bfloat16).to_empty(device="cuda")
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to("cuda")
        self._model = model.eval()

    @property
    def scale(self) -> float:
        return self._shape.num_layers / self._shape.timed_layers

    @torch.no_grad()
    def prefill_ms(self, num_tokens: int) -> float:
        ids = torch.randint(0, VOCABULARY, (1, num_tokens), device="cuda")
        once = lambda: self._model(ids, use_cache=True, logits_to_keep=1)  # noqa: E731
        return self.scale * cuda_ms(once, repeat=3, warmup=1)

    @torch.no_grad()
    def step(self, num_tokens: int) -> tuple[float, float]:
        """Milliseconds of one more token after a context whose cache is at hand, and how far its
        logits are from those of transformers' own step, relative to their size."""
        size = self._shape.hidden // self._shape.heads
        shape = (self._shape.timed_layers, num_tokens + 1, KV_HEADS, size)
        keys, values = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        cache, ids = KVCache(keys, values), torch.randint(0, VOCABULARY, (1,), device="cuda")
        wanted = transformers_step(self._model, ids, cache).float()
        found = next_logits(self._model, ids, cache).float()
        error = float((found - wanted).norm() / wanted.norm())
        once = replayed(lambda: next_logits(self._model, ids, cache))
        return self.scale * cuda_ms(once, repeat=5, warmup=2), error


def next_logits(model: Any, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Logits of one token, the last of a cache that holds all before it; its own keys and values
    are written there."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    eps, last = model.config.rms_norm_eps, cache.num_tokens - 1
    hidden = model.model.embed_tokens(ids)
    turn = model.model.rotary_emb(hidden, torch.full((1, 1), last, device=ids.device))
    for layer, keys, values in zip(model.model.layers, cache.keys, cache.values, strict=True):
        own = layer.self_attn
        normed = _norm(hidden, layer.input_layernorm, eps)
        queries, key, value = (
            project(normed).view(1, -1, 1, cache.head_dim)
            for project in (own.q_proj, own.k_proj, own.v_proj)
        )
        queries, key = apply_rotary_pos_emb(queries, key, *turn)
        keys[last], values[last] = key[0, :, 0], value[0, :, 0]
        # Heads share keys and values, which are not repeated for it.
        found = F.scaled_dot_product_attention(
            queries, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], enable_gqa=True
        )
        hidden = hidden + own.o_proj(found.reshape(1, -1))
        hidden = hidden + layer.mlp(_norm(hidden, layer.post_attention_layernorm, eps))
    logits: torch.Tensor = model.lm_head(_norm(hidden, model.model.norm, eps))
    return logits


def transformers_step(model: Any, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """The same by transformers, from all tokens of the cache but the last."""
    from transformers import DynamicCache

    past = DynamicCache()
    for layer in range(cache.num_layers):
        sides = (x[layer, :-1].transpose(0, 1)[None] for x in (cache.keys, cache.values))
        past.update(*sides, layer)
    logits: torch.Tensor = model(ids[None], past_key_values=past, use_cache=True).logits[0]
    return logits


def _norm(hidden: torch.Tensor, module: Any, eps: float) -> torch.Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], module.weight, eps)
