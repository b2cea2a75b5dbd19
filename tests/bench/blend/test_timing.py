"""Joins timed from a node: every way once, on a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdn.bench.blend import timing
from kdn.bench.blend.items import Item
from kdn.bench.blend.methods import FULL, JOINED, REPAIRED, Method
from kdn.bench.blend.timing import texts_of, time_joins
from kdn.blend.seams import Block, Seams
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError
from tests.client.letters import Letters

WORDS = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 1500)))
ITEMS = [Item("a", "?", ("x",), (WORDS[:700], WORDS[700:]))]
TIMED = (
    FULL,
    Method("cacheblend", JOINED, 0.15),
    Method("seams", REPAIRED),
    Method("seams+question", REPAIRED, 0.15),
)


def seams_of(model: Any) -> Seams:
    spec = spec_of(model)
    columns = spec.values_per_token // spec.num_layers

    def nothing(layer: int) -> Block:
        down, up = torch.zeros(columns, 1), torch.zeros(1, columns)
        return Block((layer, layer + 1), down, up, torch.zeros(columns))

    return Seams(spec.fingerprint, [nothing(layer) for layer in range(spec.num_layers)])


def test_every_way_from_a_node(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "CODEC", "exact")
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "TIMED", TIMED)
    model = tiny_model("llama")

    async def rows() -> list[dict[str, Any]]:
        found = time_joins(model, Letters(), ITEMS, seams_of(model), 1024, ())
        return [row async for row in found]

    full, blend, seams, both = asyncio.run(rows())
    assert [row["link"] for row in (full, blend, seams, both)] == ["loopback"] * 4
    assert 960 <= full["tokens"] <= 1024
    assert full["pieces"] == 16
    assert full["times_faster"] == 1
    assert full["bytes"] == 0
    asked = full["computed_tokens"] - full["tokens"]
    # So small a model may be faster than any delivery: then it reads, as it should.
    share = round(0.15 * full["tokens"])
    for row, least in ((seams, asked), (both, asked), (blend, asked + share)):
        assert least <= row["computed_tokens"] <= 2 * full["computed_tokens"]
    assert all(row["ttft_s"] > 0 for row in (blend, seams, both))


def test_texts_are_as_long_as_asked_or_refused() -> None:
    texts = texts_of(ITEMS, Letters(), 1024, 20)
    assert len(texts) == timing.NUM_PIECES
    assert {len(text) for text in texts} <= {60, 59, 58}
    with pytest.raises(UnsupportedError, match="expected at least"):
        texts_of(ITEMS, Letters(), 4096, 20)
