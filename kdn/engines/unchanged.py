"""That a model is still the one that was named.

A fingerprint is taken once, but a model in a user's hands may be trained on, get other weights or
an adapter. Its caches would then be kept under the name of another model. So it is looked at again
before each use: are these the same modules, in evaluation mode, with the same tensors, and have
the tensors kept their values?

torch counts changes of a tensor, but not those through `.data`, as merging an adapter makes them,
nor those of fused optimizers. So one element of every row is compared too, from a column that moves
from row to row. SmolLM2 takes 3 ms; a model of 8 billion weights has 1.6 million rows, and would
take some 15 ms on a CPU. A GPU compares them itself, in the order of its other work, and sends back
one bit. Who reads on asks for it when the next pass is launched: no pass waits for a check.

Models with adapters inside are refused: too much decides which of them act, and how. So are
forward hooks, which can change every value and leave no trace in the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.errors import MismatchError, UnsupportedError

MAX_SAMPLES = 1 << 18
"""Elements of one tensor that are compared."""

_ADAPTER_PACKAGES = ("peft", "adapters")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_adapters(model: torch.nn.Module) -> None:
    """By name, whether they are active or not."""
    for name, module in model.named_modules():
        packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
        if not packages.isdisjoint(_ADAPTER_PACKAGES):
            raise UnsupportedError(
                f"the model has an adapter ({name or 'the model'} is a {type(module).__name__}), "
                "which may be switched while its caches are kept: merge it first, with "
                "merge_and_unload()"
            )


def refuse_hooks(modules: Sequence[torch.nn.Module]) -> None:
    """But for kdn's own, which watch only."""
    for module in modules:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not getattr(hook, "__module__", "").startswith("kdn."):
                raise UnsupportedError(
                    f"the model has a forward hook ({type(module).__name__}), which may change its "
                    "values: caches are named after the weights alone. Remove it first"
                )


class Unchanged:
    """Made when a model is named. Keeps all it looked at: nothing else can take its place."""

    def __init__(self, model: torch.nn.Module) -> None:
        refuse_adapters(model)
        self._model = model
        self._modules = list(model.modules())
        refuse_hooks(self._modules)
        self._tensors = list(_tensors(self._modules))
        self._facts = [_facts(tensor) for tensor in self._tensors]
        self._samples = [
            OnHost(group) if group[0].device.type == "cpu" else OnDevice(group)
            for group in _grouped([_sample(tensor) for tensor in self._tensors])
        ]

    def check(self) -> None:
        """MismatchError if the model is another one now, UnsupportedError if it has an adapter or a
        forward hook."""
        self.begin()()

    def begin(self) -> Callable[[], None]:
        """The same in two parts: what the host can tell is told at once. Where a GPU is asked, the
        function that is returned waits for it, but for nothing that was launched since."""
        modules = list(self._model.modules())
        if not _same(modules, self._modules):
            refuse_adapters(self._model)
            raise _changed("its modules are others")
        refuse_hooks(modules)
        if any(module.training for module in modules):
            raise MismatchError("the model is in training mode: call its eval()")
        tensors = list(_tensors(modules))
        if not _same(tensors, self._tensors) or [_facts(one) for one in tensors] != self._facts:
            raise _changed("its weights were replaced or written to")
        asked = [one.differ() for one in self._samples]

        def finish() -> None:
            if any(answer() for answer in asked):
                raise _changed("its weights have other values")

        if all(isinstance(one, OnHost) for one in self._samples):
            finish()
        return finish


class OnHost:
    """Samples that a CPU compares. torch would start all its threads for so little."""

    def __init__(self, samples: Sequence[torch.Tensor]) -> None:
        self._samples = samples
        self._were = self._are()

    def differ(self) -> Callable[[], bool]:
        found = not np.array_equal(self._are(), self._were)
        return lambda: found

    def _are(self) -> npt.NDArray[Any]:
        return np.concatenate([sample.numpy().reshape(-1) for sample in self._samples])


class OnDevice:
    """Samples that their GPU compares, in its current stream, with a copy that it keeps."""

    def __init__(self, samples: Sequence[torch.Tensor]) -> None:
        self._samples = samples
        self._were = self._are()

    def differ(self) -> Callable[[], bool]:
        is_cuda = self._were.is_cuda
        bit = torch.empty((), dtype=torch.bool, pin_memory=is_cuda)
        bit.copy_((self._are() != self._were).any(), non_blocking=True)
        if not is_cuda:
            return lambda: bool(bit)
        done = torch.cuda.current_stream(self._were.device).record_event()

        def answer() -> bool:
            done.synchronize()
            return bool(bit)

        return answer

    def _are(self) -> torch.Tensor:
        return torch.cat([sample.reshape(-1) for sample in self._samples])


def _changed(how: str) -> MismatchError:
    return MismatchError(f"the model has changed since you connected, {how}: connect again")


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _tensors(modules: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """What a fingerprint counts. Buffers that are not saved are a module's own affair: some grow
    with the longest text."""
    for module in modules:
        yield from (tensor for tensor in module._parameters.values() if tensor is not None)
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield tensor


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view, so that it shows what the tensor holds whenever it is looked at."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        return tensor[..., 0]
    step = 1 if tensor.ndim < 2 else tensor.shape[-1] + 1
    return tensor.view(-1)[:: max(step, tensor.numel() // MAX_SAMPLES)]


def _grouped(samples: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """By what can be joined to one tensor: compared as bits, in which even NaN equals itself."""
    groups: dict[object, list[torch.Tensor]] = {}
    for sample in samples:
        bits = sample.view(_BITS[sample.element_size()])
        groups.setdefault((bits.dtype, bits.device), []).append(bits)
    return list(groups.values())
