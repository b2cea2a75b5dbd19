"""A tiny model really learns, and one that was trained before is not trained again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kdn.bench.models.documents import Split
from kdn.bench.models.material import Material
from kdn.bench.models.shapes import FULL, QUICK, SHAPES, new_model, settings_of
from kdn.bench.models.training import Order, rate_at, recall_losses, trained
from kdn.bench.models.windows import Windows
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
    assert 0 < told.recalled < told.unigram
    assert "s left" in said[1]
    model, tokenizer = load_model(tmp_path / "mha")
    assert prompt_head(tokenizer).tolist() == [1]
    assert model.dtype == torch.float32
    again = trained(tmp_path / "mha", order, material, said.append, ticks())
    assert (again, "trained before" in said[-1]) == (told, True)


def test_a_model_that_looks_back_knows_what_comes_again() -> None:
    """One that copies what stood behind the same token before, in text without any other order."""
    vocabulary = 5000
    tokens = np.random.default_rng(0).permutation(np.arange(10, 10 + 40 * 100)).astype(np.uint32)

    class Copies(torch.nn.Linear):
        def forward(self, batch: torch.Tensor, use_cache: bool) -> Any:
            logits = torch.zeros(*batch.shape, vocabulary)
            for at, token in enumerate(batch[0].tolist()):
                before = (batch[0, :at] == token).nonzero().flatten().tolist()
                if before:
                    logits[0, at, batch[0, before[-1] + 1]] = 20.0
            return SimpleNamespace(logits=logits)

    new, recalled = recall_losses(Copies(1, 1), Windows(tokens, 200, seed=0, repeating=0))
    assert new == pytest.approx(np.log(vocabulary), abs=1e-3)
    assert recalled < 0.01


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
