"""Grouped attention gives what transformers' own gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdn.engines.grouped import NAME, use_grouped_attention
from kdn.engines.reading import forward, new_cache, read

TOKENS = [3 + i * i % 120 for i in range(400)]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("mistral", {"sliding_window": 64}),
    ("qwen3", {"head_dim": 16}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 100}),
]


@pytest.mark.parametrize(("family", "settings"), FAMILIES)
def test_the_same_logits(family: str, settings: dict[str, Any], tiny_model: Any) -> None:
    plain, grouped = tiny_model(family, **settings), tiny_model(family, **settings)
    assert use_grouped_attention(grouped)
    assert grouped.config._attn_implementation == NAME
    both = [(plain, new_cache(plain)), (grouped, new_cache(grouped))]
    for part in (TOKENS[:300], TOKENS[300:320], TOKENS[320:321]):
        a, b = (read(model, part, past) for model, past in both)
        assert torch.allclose(a, b, atol=2e-4), (a - b).abs().max()
    ids = torch.tensor([TOKENS[:9], [0, 0, *TOKENS[2:9]]])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with torch.inference_mode():
        a, b = (model(ids, attention_mask=mask).logits[:, -1] for model, _ in both)
    assert torch.allclose(a, b, atol=2e-4)


def test_it_is_really_used(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    use_grouped_attention(model)
    past = new_cache(model)
    forward(model, TOKENS[:300], past)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("keys were repeated")

    monkeypatch.setattr("kdn.engines.grouped.sdpa_attention_forward", refuse)
    forward(model, TOKENS[300:310], past)
    with pytest.raises(AssertionError, match="repeated"):
        forward(model, TOKENS[:10], new_cache(model))


def test_other_implementations_are_left_alone(tiny_model: Any) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    assert not use_grouped_attention(model)
    assert model.config._attn_implementation == "eager"
