"""Seams as bytes, which come from outside, and what they do to values."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from kdn.blend import seams as home
from kdn.blend.seams import Block, Seams
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.errors import FormatError, MismatchError
from tests.codec.conftest import Tiny

SPEC = Tiny.with_layers(4).spec
PER_LAYER = 2 * SPEC.num_kv_heads * SPEC.head_dim


def random_seams(rank: int = 3, seed: int = 0, model: bytes = SPEC.fingerprint) -> Seams:
    """Two blocks, of one layer and of three; numbers that float16 holds."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.1).half().float()

    blocks = []
    for layers in ((0, 1), (1, SPEC.num_layers)):
        columns = (layers[1] - layers[0]) * PER_LAYER
        blocks.append(Block(layers, some(columns, rank), some(rank, columns), some(columns)))
    return Seams(model, blocks, {0.0: (0.05, 0.1), 0.15: (0.01, 0.04)}, (0.3, 0.2))


def test_bytes_hold_all_of_it() -> None:
    seams = random_seams()
    data = seams.to_bytes()
    back = Seams.from_bytes(data)
    assert back.to_bytes() == data
    assert replace(back, blocks=()) == replace(seams, blocks=())
    for own, found in zip(seams.blocks, back.blocks, strict=True):
        assert own.layers == found.layers
        for name in ("down", "up", "bias"):
            assert torch.equal(getattr(own, name), getattr(found, name))
    back.check_for(SPEC)


def test_intervals_are_kept_and_older_bytes_have_none() -> None:
    plain = random_seams()
    data = plain.to_bytes()
    assert b"interval" not in data  # as they were before there were any
    assert not Seams.from_bytes(data).intervals
    sure = replace(
        plain,
        intervals={0.0: ((0.03, 0.08), (0.07, 0.2)), 0.15: ((0.005, 0.02), (0.0, 0.04))},
        joined_intervals=((0.2, 0.5), (0.1, 0.3)),
    )
    back = Seams.from_bytes(sure.to_bytes())
    assert (back.intervals, back.joined_intervals) == (sure.intervals, sure.joined_intervals)
    assert (back.expected, back.joined) == (plain.expected, plain.joined)
    assert back.to_bytes() == sure.to_bytes()


def test_fields_of_later_versions_are_left_alone() -> None:
    """So a reader from before there were intervals reads seams that have some."""
    data = changed(nothing, lambda meta: meta.update(later=[1]))
    assert Seams.from_bytes(data).to_bytes() == random_seams().to_bytes()


def test_a_repair_adds_the_map_of_unrotated_values() -> None:
    seams = random_seams()
    shape = (SPEC.num_layers, 5, SPEC.num_kv_heads, SPEC.head_dim)
    keys, values = torch.randn(shape), torch.randn(shape)
    fixed = seams.repair(KVCache(rope.redo(keys, SPEC, 7), values, 7), SPEC, at=40)
    assert fixed.start == 40
    unturned = rope.undo(fixed.keys, SPEC, 40)
    for block in seams.blocks:
        own = slice(*block.layers)
        for token in range(5):
            row = torch.cat([keys[own, token].flatten(), values[own, token].flatten()])
            expected = row + row @ block.down @ block.up + block.bias
            found = torch.cat([unturned[own, token].flatten(), fixed.values[own, token].flatten()])
            assert torch.allclose(found, expected, atol=1e-5)


def changed(change: Any, meta_change: Any = lambda meta: None) -> bytes:
    data = random_seams().to_bytes()
    tensors = load(data)
    size = int.from_bytes(data[:8], "little")
    meta = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["kdn"])
    change(tensors)
    meta_change(meta)
    return save(tensors, metadata={"kdn": json.dumps(meta)})


def nothing(tensors: Any) -> None:
    pass


def put(**parts: Any) -> Any:
    return lambda found: found.update({k.replace("_", ".", 1): v for k, v in parts.items()})


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "text": b"no seams",
    "cut": random_seams().to_bytes()[:-2],
    "no metadata": save({"b0.down": torch.zeros(2)}),
    "not a number": changed(put(b0_bias=torch.full((PER_LAYER,), torch.nan))),
    "infinite": changed(put(b0_up=torch.full((3, PER_LAYER), torch.inf).half())),
    "wide map": changed(put(b0_down=torch.zeros(PER_LAYER, 4).half())),
    "no rank": changed(
        put(b0_down=torch.zeros(PER_LAYER, 0).half(), b0_up=torch.zeros(0, PER_LAYER).half())
    ),
    "float32 map": changed(put(b0_up=torch.zeros(3, PER_LAYER))),
    "flat map": changed(put(b0_up=torch.zeros(3 * PER_LAYER).half())),
    "one number": changed(put(b0_bias=torch.tensor(0.0))),
    "more": changed(put(b7_bias=torch.zeros(3))),
    "less": changed(lambda tensors: tensors.pop("b1.up")),
    "a gap": changed(nothing, lambda meta: meta.update(blocks=[[0, 1], [2, 4]])),
    "backwards": changed(nothing, lambda meta: meta.update(blocks=[[0, 4], [4, 1]])),
    "no blocks": changed(nothing, lambda meta: meta.update(blocks=[])),
    "odd blocks": changed(nothing, lambda meta: meta.update(blocks=[[0, True], [1, 4]])),
    "blocks of text": changed(nothing, lambda meta: meta.update(blocks="01")),
    "no model": changed(nothing, lambda meta: meta.update(model="00")),
    "version": changed(nothing, lambda meta: meta.update(version=2)),
    "negative": changed(nothing, lambda meta: meta.update(expected=[[0.1, -1.0, 0.0]])),
    "endless": changed(nothing, lambda meta: meta.update(expected=[[0.1, 1e999, 0.0]])),
    "huge": changed(nothing, lambda meta: meta.update(expected=[[0.1, 10**400, 0.0]])),
    "far layers": changed(nothing, lambda meta: meta.update(blocks=[[0, 1], [1, 10**400]])),
    "a model of numbers": changed(nothing, lambda meta: meta.update(model=[1])),
    "twice": changed(nothing, lambda meta: meta.update(expected=[[0.1, 1, 0.0]] * 2)),
    "one divergence": changed(nothing, lambda meta: meta.update(joined=[0.1])),
    "an interval of text": changed(nothing, lambda meta: meta.update(intervals="0")),
    "a backward interval": changed(
        nothing, lambda meta: meta.update(intervals=[[0.0, [0.2, 0.1], [0.1, 0.2]]])
    ),
    "half an interval": changed(nothing, lambda meta: meta.update(intervals=[[0.0, [0.1, 0.2]]])),
    "an endless interval": changed(
        nothing, lambda meta: meta.update(joined_intervals=[[0.1, 1e999], [0.1, 0.2]])
    ),
    "a list": changed(nothing, lambda meta: meta.update(expected=None)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_seams_is_refused(what: str) -> None:
    with pytest.raises(FormatError):
        Seams.from_bytes(HOSTILE[what])


def test_a_size_is_checked_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_seams().to_bytes()
    monkeypatch.setattr(home, "MAX_SEAMS_BYTES", len(data) - 1)
    with pytest.raises(FormatError, match="at most"):
        Seams.from_bytes(data)


def test_seams_of_another_model_are_refused() -> None:
    seams = random_seams()
    for other in (
        replace(SPEC, fingerprint=b"?" * 16),
        replace(SPEC, head_dim=2 * SPEC.head_dim),
        replace(SPEC, num_layers=5),
    ):
        with pytest.raises(MismatchError):
            seams.check_for(other)
