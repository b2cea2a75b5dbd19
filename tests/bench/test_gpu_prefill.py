"""The step that `kdn bench gpu` times, on a small model and on any machine."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kdn.bench.gpu_prefill import next_logits, transformers_step
from kdn.cache.tensors import KVCache


@torch.no_grad()
def test_the_step_is_that_of_transformers_and_writes_in_place() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, vocab_size=50, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    cache = KVCache(torch.randn(3, 21, 2, 8), torch.randn(3, 21, 2, 8))
    known, ids = cache.keys.clone(), torch.tensor([7])
    wanted = transformers_step(model, ids, cache)
    assert torch.equal(cache.keys, known)
    found = next_logits(model, ids, cache)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.equal(cache.keys[:, :-1], known[:, :-1])
    assert not torch.isclose(cache.keys[:, -1], known[:, -1]).any()
    cache.keys[1, 4] += 1.0
    assert not torch.allclose(next_logits(model, ids, cache), wanted, atol=1e-3)
