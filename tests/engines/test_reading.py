"""Reading in pieces that end where chunks end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdn.engines.reading import forward, last_tokens, new_cache, pieces, read, read_whole
from kdn.engines.spread import placed
from kdn.engines.transformers import from_dynamic_cache

TOKENS = [3 + i * i % 120 for i in range(600)]


def test_pieces_end_where_chunks_end() -> None:
    assert list(pieces(0, 600)) == [(0, 256), (256, 512), (512, 600)]
    assert list(pieces(300, 512)) == [(300, 512)]
    assert list(pieces(512, 512)) == []
    assert list(pieces(300, 1200, 2)) == [(300, 512), (512, 1024), (1024, 1200)]


def test_reading_in_pieces_is_reading(tiny_model: Any) -> None:
    model = tiny_model("llama")
    whole, parts = new_cache(model), new_cache(model)
    expected = forward(model, TOKENS, whole)
    assert torch.allclose(read(model, TOKENS, parts), expected, atol=1e-4)
    every = forward(model, TOKENS[:5], new_cache(model), every=True)
    assert every.shape == (5, 128)
    last = forward(model, TOKENS[:5], new_cache(model))
    assert torch.allclose(every[-1], last, atol=1e-5)


def test_last_tokens(tiny_model: Any) -> None:
    model = tiny_model("mistral", sliding_window=64)
    past = new_cache(model)
    read(model, TOKENS, past)
    values, whole = last_tokens(past, 512), from_dynamic_cache(past)
    assert (values.start, values.end) == (512, 600)
    assert set(values.valid_from) == {600 - 63}
    assert torch.equal(values.keys[:, 25:], whole.keys[:, 537:])
    assert values.keys[:, :25].abs().max() == 0
    for start, end in ((512, 560), (300, 500), (540, 600)):
        part, same = last_tokens(past, start, end), whole.slice(start, end)
        assert (part.start, part.end, part.valid_from) == (start, end, same.valid_from)
        assert torch.equal(part.keys, same.keys)
        assert torch.equal(part.values, same.values)


@pytest.mark.parametrize("window", [64, 400, 2_000])
def test_a_whole_cache_has_what_windows_drop(tiny_model: Any, window: int) -> None:
    layers = ["sliding_attention", "full_attention"] * 2
    model = tiny_model("gemma3_text", head_dim=16, sliding_window=window, layer_types=layers)
    whole = read_whole(model, TOKENS)
    assert whole.is_complete
    assert whole.keys.requires_grad_(True).requires_grad  # may be differentiated by
    for end in (150, 600):
        past = new_cache(model)
        forward(model, TOKENS[:end], past)
        plain = from_dynamic_cache(past)
        for layer, held_from in enumerate(plain.valid_from):
            for ours, theirs in ((whole.keys, plain.keys), (whole.values, plain.values)):
                part = ours[layer, held_from:end].detach()
                torch.testing.assert_close(part, theirs[layer, held_from:], atol=2e-4, rtol=1e-3)


def test_a_cache_follows_its_layers_to_their_devices() -> None:
    cpu, other = torch.device("cpu"), torch.device("meta")
    layers = [torch.nn.Linear(1, 1, device=device) for device in (cpu, other)]
    model = SimpleNamespace(
        hf_device_map={"0": cpu, "1": other}, get_decoder=lambda: SimpleNamespace(layers=layers)
    )
    past: Any = SimpleNamespace(
        layers=[SimpleNamespace(keys=torch.ones(1), values=torch.ones(1)) for _ in layers]
    )
    placed(past, model)
    assert [layer.keys.device for layer in past.layers] == [cpu, other]
    assert [layer.values.device for layer in past.layers] == [cpu, other]
    placed(past, SimpleNamespace())  # one device: nothing is moved
    assert past.layers[1].keys.device == other
