"""A cache that grows in place holds what transformers' own would."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from kdn.engines.growing import GrowingLayer, Room, Rooms, growing_cache
from kdn.engines.reading import forward
from kdn.engines.transformers import from_dynamic_cache, spec_of, to_dynamic_cache

TOKENS = [3 + i * i % 120 for i in range(600)]


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x.keys, y.keys) and torch.equal(x.values, y.values)
        for x, y in zip(a.layers, b.layers, strict=True)
    )


def test_it_is_what_transformers_has(tiny_model: Any) -> None:
    model = tiny_model("llama")
    own, plain = growing_cache(model.config), DynamicCache(config=model.config)
    for start, end in ((0, 300), (300, 301), (301, 302), (302, 600)):
        logits = [forward(model, TOKENS[start:end], past) for past in (own, plain)]
        assert torch.allclose(*logits, atol=1e-4)
    assert same(own, plain)
    assert all(type(layer) is GrowingLayer for layer in own.layers)


def test_most_tokens_copy_nothing(tiny_model: Any) -> None:
    model = tiny_model("llama")
    past = growing_cache(model.config)
    forward(model, TOKENS[:300], past)
    places = set()
    for token in TOKENS[300:400]:
        forward(model, [token], past)
        places.add(past.layers[0].keys.data_ptr())
    assert len(places) == 1


def test_cropped_and_repeated(tiny_model: Any) -> None:
    model = tiny_model("llama")
    own, plain = growing_cache(model.config), DynamicCache(config=model.config)
    for past in (own, plain):
        forward(model, TOKENS[:40], past)
        past.crop(-10)
        forward(model, TOKENS[50:53], past)
    assert same(own, plain)
    kept = own.layers[0].keys.clone()
    for past in (own, plain):
        past.batch_repeat_interleave(2)
        ids = torch.tensor([TOKENS[:2]] * 2)
        with torch.inference_mode():
            model(ids, past_key_values=past, use_cache=True)
    assert same(own, plain)
    assert torch.equal(own.layers[0].keys[:1, :, :33], kept)


def test_windows_stay_as_they_are(tiny_model: Any) -> None:
    model = tiny_model("gemma2", head_dim=16, sliding_window=32)
    kinds = [type(layer).__name__ for layer in growing_cache(model.config).layers]
    assert kinds == ["DynamicSlidingWindowLayer", "GrowingLayer"] * 2


def test_a_room_is_gone_on_from_without_a_copy(tiny_model: Any) -> None:
    model = tiny_model("llama")
    plain = DynamicCache(config=model.config)
    forward(model, TOKENS[:300], plain)
    cache = from_dynamic_cache(plain)
    room = Room.of(spec_of(model), 300, torch.float32)
    out = room.canonical(300)
    out.keys.copy_(cache.keys)
    out.values.copy_(cache.values)
    past = to_dynamic_cache(out, model.config, room)
    assert past.layers[0].keys.data_ptr() == room.keys.data_ptr()
    expected = forward(model, TOKENS[300:320], plain)
    assert torch.allclose(forward(model, TOKENS[300:320], past), expected, atol=1e-4)
    assert past.layers[0].keys.data_ptr() == room.keys.data_ptr()
    assert same(past, plain)
    # Without the room, the same by copying.
    assert torch.equal(from_dynamic_cache(to_dynamic_cache(cache, model.config)).keys, cache.keys)


def test_rooms_are_used_again(tiny_model: Any) -> None:
    model = tiny_model("llama")
    spec = spec_of(model)
    rooms = Rooms(spec, torch.float32, max_spare=2)
    rooms.prepare(300, 1)
    first = rooms.take(200)
    assert first.capacity >= 300
    second = rooms.take(200)
    assert second.keys.data_ptr() != first.keys.data_ptr()
    rooms.give(first)
    assert rooms.take(400).capacity >= 400
    assert rooms.take(300) is first
    small, large = Room.of(spec, 10, torch.float32), Room.of(spec, 5000, torch.float32)
    for room in (small, second, large, None):
        rooms.give(room)
    assert rooms.take(10) is second
    assert rooms.take(10) is large


def test_reading_into_a_room(tiny_model: Any) -> None:
    model = tiny_model("llama")
    room = Room.of(spec_of(model), 100, torch.float32)
    own, plain = growing_cache(model.config, room), DynamicCache(config=model.config)
    for past in (own, plain):
        forward(model, TOKENS[:300], past)
    assert own.layers[0].keys.data_ptr() == room.keys.data_ptr()
    assert same(own, plain)
    for past in (own, plain):
        forward(model, TOKENS[300:], past)  # more than there is room for
    assert own.layers[0].keys.data_ptr() != room.keys.data_ptr()
    assert same(own, plain)
