"""Models that do not go on from a handed-over cache as they read are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from kdn.engines.handover_probe import check_handover
from kdn.errors import UnsupportedError

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    initializer_range=0.2,
)  # fmt: skip


class Remembering(LlamaForCausalLM):  # type: ignore[misc]
    """Prefers the token that the text began with, which its cache does not tell."""

    began_with = 0

    def forward(self, input_ids: Any, past_key_values: Any = None, **options: Any) -> Any:
        if past_key_values is None or not past_key_values.get_seq_length():
            self.began_with = int(input_ids[0, 0])
        told = super().forward(input_ids, past_key_values=past_key_values, **options)
        told.logits[..., self.began_with] += 10.0
        return told


class Masking(LlamaForCausalLM):  # type: ignore[misc]
    """Never gives some tokens."""

    def forward(self, *given: Any, **options: Any) -> Any:
        told = super().forward(*given, **options)
        told.logits[..., 5:9] = torch.finfo(told.logits.dtype).min
        return told


def made(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind(CONFIG).eval()


def new_cache() -> Cache:
    return DynamicCache(config=CONFIG)


def test_what_the_model_keeps_beside_its_cache_is_noticed() -> None:
    check_handover(made(LlamaForCausalLM), new_cache, lambda past: past)
    with pytest.raises(UnsupportedError, match="other logits"):
        check_handover(made(Remembering), new_cache, lambda past: past)


def test_tokens_that_are_never_given_hide_nothing() -> None:
    def spoilt(past: Cache) -> Cache:
        for layer in past.layers:
            layer.values *= -1
        return past

    check_handover(made(Masking), new_cache, lambda past: past)
    with pytest.raises(UnsupportedError, match="other logits"):
        check_handover(made(Masking), new_cache, spoilt)
