"""Latents in the canonical layout: where each value goes, and that all come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kdn.engines.checkpoint import spec_of_checkpoint
from kdn.engines.latents import as_cached, canonical
from kdn.engines.reading import last_tokens, new_cache
from kdn.engines.transformers import from_dynamic_cache, spec_of, to_dynamic_cache
from kdn.errors import UnsupportedError
from tests.engines.family_models import build, tiny_config


def test_turned_channels_come_first_and_nothing_is_added() -> None:
    latent, turned = torch.arange(24.0)[None, None, None], -torch.arange(1, 17.0)[None, None, None]
    keys, values = canonical(latent, turned)
    assert keys.shape == values.shape == (1, 1, 1, 20)
    assert keys.flatten().tolist() == [*(-i for i in range(1, 17)), 0, 1, 2, 3]
    assert values.flatten().tolist() == list(range(4, 24))
    back = as_cached(keys, values, tiny_config("deepseek_v3"))
    assert torch.equal(back[0], latent)
    assert torch.equal(back[1], turned)


def test_keys_and_values_of_one_size_stay_as_they_are() -> None:
    keys, values = torch.rand(1, 2, 3, 16), torch.rand(1, 2, 3, 16)
    assert canonical(keys, values) == (keys, values)
    assert as_cached(keys, values, tiny_config("llama")) == (keys, values)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_cache_of_latents_goes_there_and_back(family: str) -> None:
    model = build(family)
    spec = spec_of(model)
    assert (spec.num_kv_heads, spec.head_dim) == (1, 20)
    assert {rope.rotary_dim if rope else 0 for rope in spec.ropes} == {16}
    past = new_cache(model)
    with torch.inference_mode():
        model(torch.arange(3, 60)[None], past_key_values=past, use_cache=True)
    whole = from_dynamic_cache(past)
    assert whole.num_tokens == 57
    end = last_tokens(past, 40)
    assert torch.equal(end.keys, whole.keys[:, 40:])
    assert torch.equal(end.values, whole.values[:, 40:])
    back = to_dynamic_cache(whole, model.config)
    for one, other in zip(back.layers, past.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_other_engines_are_refused(tmp_path: Path) -> None:
    build("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="transformers only"):
        spec_of_checkpoint(tmp_path)


def test_sizes_with_an_odd_sum_are_refused() -> None:
    model = build("deepseek_v3", kv_lora_rank=23)
    with pytest.raises(UnsupportedError, match="equal in all layers"):
        spec_of(model)


def test_several_heads_of_different_sizes_are_no_latents() -> None:
    past: Any = DynamicCache()
    past.update(torch.zeros(1, 2, 5, 24), torch.zeros(1, 2, 5, 16), 0)
    with pytest.raises(UnsupportedError, match="equal in all layers"):
        from_dynamic_cache(past)
