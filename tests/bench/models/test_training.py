"""A tiny model really learns, and one that was trained before is not trained again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.bench.models.documents import Split
from kdn.bench.models.material import Material
from kdn.bench.models.shapes import FULL, QUICK, SHAPES, new_model, settings_of
from kdn.bench.models.training import Order, rate_at, trained
from kdn.calibrate.corpus import Text, prompt_head
from kdn.engines.models import load_model
from kdn.engines.transformers import spec_of

CPU = torch.device("cpu")


def ticks() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is looked at: a step takes one."""
    every = count()
    return lambda: float(next(every))


@pytest.fixture(scope="module")
def material() -> Material:
    """A language of a few sentences, which more than frequencies tell about."""
    words = ["the cat sat on a mat", "a dog ran to the park", "one bird flew over my house"]
    texts = [Text(str(i), ". ".join(words[(i + j * j) % 3] for j in range(150))) for i in range(6)]
    return Material(Split(texts[:4], texts[4:5], texts[5:]), QUICK)


def test_a_tiny_model_learns_more_than_frequencies(material: Material, tmp_path: Path) -> None:
    said: list[str] = []
    order = Order("mha", 40.0, CPU)
    told = trained(tmp_path / "mha", order, material, said.append, ticks())
    assert told.steps == 40
    assert told.held_out < 0.6 * told.unigram
    assert "s left" in said[1]
    model, tokenizer = load_model(tmp_path / "mha")
    assert prompt_head(tokenizer).tolist() == [1]
    assert model.dtype == torch.float32
    again = trained(tmp_path / "mha", order, material, said.append, ticks())
    assert (again, "trained before" in said[-1]) == (told, True)


def test_other_orders_are_trained_anew(material: Material, tmp_path: Path) -> None:
    for seconds in (2.0, 3.0):
        made = trained(tmp_path / "m", Order("mha", seconds, CPU), material, str, ticks())
        assert made.steps == seconds
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_one_that_kdn_knows_and_learns_in_bfloat16(shape: str) -> None:
    """As on a GPU: weights in float32, products in bfloat16."""
    torch.manual_seed(0)
    model = new_model(shape, QUICK)
    spec = spec_of(model)
    batch = torch.randint(3, 500, (2, 160))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch, use_cache=False).logits
    targets = batch[:, 1:].flatten()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets).backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
    first, last = spec.ropes[0], spec.ropes[-1]
    assert first is not None
    described = {
        "mha": (spec.num_kv_heads, first.rotary_dim / spec.head_dim),
        "gemma": (spec.windows, first == last),
        "mla": (spec.num_kv_heads, spec.head_dim),
    }
    wanted = {"mha": (2, 0.25), "gemma": ((128, 128, None), False), "mla": (1, 288)}
    assert described[shape] == wanted[shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_models_for_a_gpu_are_of_the_size_that_is_said(shape: str) -> None:
    with torch.device("meta"):
        model: Any = new_model(shape, FULL)
    assert 40e6 < sum(one.numel() for one in model.parameters()) < 115e6
    if shape == "mha":
        settings = settings_of("mha", FULL)
        assert settings["num_key_value_heads"] == 8
        assert settings["hidden_size"] == 8 * 128


def test_the_rate_rises_then_falls_to_its_least() -> None:
    rates = [rate_at(i / 100) for i in range(101)]
    assert max(rates) == pytest.approx(rates[4]) == 1.0
    assert rates == sorted(rates[:5]) + sorted(rates[5:], reverse=True)
    assert (rates[0], rates[-1]) == (pytest.approx(0.02), pytest.approx(0.05))
