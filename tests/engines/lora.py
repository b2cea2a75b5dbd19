"""Adapters as PEFT attaches them: by PEFT itself where it is installed, or by a stand-in.

The stand-in does what matters here in PEFT's way: it puts layers of its own, from a package called
`peft`, in place of a model's, keeps several adapters in each, and merges them through `.data`.
"""

from __future__ import annotations

from typing import Any, Protocol

import pytest
import torch

TARGETS = ("q_proj", "k_proj")


class Adapters(Protocol):
    model: Any
    """The model that a user would run now."""

    def set_adapter(self, name: str) -> None: ...
    def disable(self) -> None: ...
    def merge_and_unload(self) -> Any: ...


class LoraLayer(torch.nn.Module):
    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base_layer: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.active_adapter: str | None = names[0]
        rows, columns = base_layer.weight.shape
        self.lora_A = torch.nn.ParameterDict({n: torch.randn(2, columns) for n in names})
        self.lora_B = torch.nn.ParameterDict({n: torch.randn(rows, 2) for n in names})
        self.eval()

    def delta(self) -> torch.Tensor:
        assert self.active_adapter is not None
        return 0.1 * self.lora_B[self.active_adapter] @ self.lora_A[self.active_adapter]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.base_layer(inputs)
        return outputs if self.active_adapter is None else outputs + inputs @ self.delta().T


class StandIn:
    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        self.model = model
        self.layers: list[tuple[Any, str, LoraLayer]] = []
        torch.manual_seed(0)
        for parent in list(model.modules()):
            for name in TARGETS:
                if hasattr(parent, name):
                    layer = LoraLayer(getattr(parent, name), names)
                    setattr(parent, name, layer)
                    self.layers.append((parent, name, layer))

    def set_adapter(self, name: str) -> None:
        for *_, layer in self.layers:
            layer.active_adapter = name

    def disable(self) -> None:
        for *_, layer in self.layers:
            layer.active_adapter = None

    def merge_and_unload(self) -> Any:
        for parent, name, layer in self.layers:
            layer.base_layer.weight.data += layer.delta().detach()
            setattr(parent, name, layer.base_layer)
        return self.model


class Peft:
    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        import peft

        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=2, target_modules=list(TARGETS), init_lora_weights=False, task_type="CAUSAL_LM"
        )
        self.model: Any = peft.get_peft_model(model, config, adapter_name=names[0])
        for name in names[1:]:
            self.model.add_adapter(name, config)
        self.model.eval()

    def set_adapter(self, name: str) -> None:
        self.model.set_adapter(name)

    def disable(self) -> None:
        self.model.base_model.disable_adapter_layers()

    def merge_and_unload(self) -> Any:
        return self.model.merge_and_unload()


def attach(kind: str, model: Any, names: tuple[str, ...] = ("one", "two")) -> Adapters:
    if kind == "peft":
        pytest.importorskip("peft", reason="PEFT is not installed; the stand-in is tested")
        return Peft(model, names)
    return StandIn(model, names)
