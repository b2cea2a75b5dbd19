"""Reading in pieces that end where chunks end."""

from __future__ import annotations

from typing import Any

import torch

from kdn.engines.reading import forward, last_tokens, new_cache, pieces, read
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
