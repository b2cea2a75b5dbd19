"""Live weights: whatever replaces them is noticed, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kdn.engines.vllm import weights as weights_module
from kdn.engines.vllm.checks import live_weights
from kdn.engines.vllm.weights import Weights, models_of
from kdn.errors import UnsupportedError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(48, 64)
        self.attn = nn.Identity()  # as vLLM's attention, it has no weights of its own


class Model(nn.Module):
    def __init__(self, num_layers: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(1000, 48)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype).requires_grad_(False)

    def attention(self) -> list[nn.Module]:
        return [layer.attn for layer in self.layers]  # type: ignore[misc]


def test_a_model_is_found_by_its_layers() -> None:
    model, other = Model(), Model()
    assert models_of(model.attention()) == [model]
    assert models_of([*other.attention()]) == [other]
    lonely = nn.Identity()
    assert models_of([lonely]) == [lonely]
    with pytest.raises(UnsupportedError, match="weights"):
        live_weights([lonely])
    assert not live_weights(model.attention()).have_changed()


def add_a_little(model: Model) -> None:
    """As a step of training does: `.data` is changed, so no version of a tensor tells."""
    for parameter in model.parameters():
        parameter.data.add_(1e-3)


def replace_one(model: Model) -> None:
    layer: Any = model.layers[1]
    layer.proj.weight = nn.Parameter(layer.proj.weight + 1e-3, requires_grad=False)


def move_and_change(model: Model) -> None:
    layer: Any = model.layers[2]
    layer.proj.bias.data = layer.proj.bias.data + 1e-3


def remove_one(model: Model) -> None:
    layer: Any = model.layers[2]
    del layer.proj.weight


def reshape_one(model: Model) -> None:
    model.norm.weight = nn.Parameter(torch.ones(24), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "change", [add_a_little, replace_one, move_and_change, remove_one, reshape_one]
)
def test_other_weights_are_noticed(change: Callable[[Model], None], dtype: torch.dtype) -> None:
    model = Model(dtype=dtype)
    weights = Weights([model])
    assert not weights.have_changed()
    change(model)
    assert weights.have_changed()


def test_the_same_values_elsewhere_are_the_same_weights() -> None:
    """vLLM may move weights, as it does when it sleeps. And what is not a number is equal, too."""
    model = Model()
    model.norm.bias.data.fill_(float("nan"))
    weights = Weights([model])
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert not weights.have_changed()
    model.norm.bias.data[0] = 0.0
    assert weights.have_changed()


def test_packed_weights_are_known_by_their_function() -> None:
    """vLLM's CPU kernels keep the weights themselves out of sight."""
    model = Model()
    layer: Any = model.layers[0]
    layer.proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    layer.proj.cpu_linear = lambda: 1
    weights = Weights([model])
    assert not weights.have_changed()
    layer.proj.cpu_linear = lambda: 2
    assert weights.have_changed()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_all_kinds_of_elements(dtype: torch.dtype, transposed: bool) -> None:
    model = nn.Module()
    values = torch.arange(96 * 64).view(96, 64).remainder(100).to(dtype)
    model.w = nn.Parameter(values.t() if transposed else values, requires_grad=False)
    weights = Weights([model])
    assert weights.num_sampled == 96 * 64
    assert not weights.have_changed()
    values[5, 7] = 1
    assert weights.have_changed()


def test_memory_with_gaps() -> None:
    model = nn.Module()
    values = torch.zeros(96, 128)
    model.w = nn.Parameter(values[:, :64], requires_grad=False)
    weights = Weights([model])
    assert not weights.have_changed()
    values += 1
    assert weights.have_changed()


def test_the_sample_is_bounded_and_comes_by_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "SAMPLE", 2000)
    model = Model()
    weights = Weights([model])
    assert 1500 <= weights.num_sampled < 3500
    for column in range(48):
        model.embed.weight.data[:, column] += 1
        assert weights.have_changed()
        model.embed.weight.data[:, column] -= 1
