"""Whether vLLM still computes with the weights that it started with.

The names of chunks rest on that. vLLM does not tell a connector when weights are replaced in a
running engine, as reinforcement learning does after every step, unless whoever does it resets the
connector too. So a sample of the live weights, spread over all parameters, is compared bit by bit
with what it was at start. Small updates in 16 bit leave most elements as they were: the sample is
large enough to find it if one element in ten thousand has changed.

A GPU compares in a stream: `look` queues that behind what the model computes, and whoever needs the
answer waits for it in another thread. vLLM's own thread, which must not wait for a step under way,
looks beside it (`have_changed`).
"""

from __future__ import annotations

import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

SAMPLE = 1 << 16
"""Elements. A comparison takes 0.13 ms with 8 billion parameters in bfloat16 on an H200, where
the matrix products of 256 tokens alone take 5.6 ms. With as many parameters as SmolLM2 in float32
it takes 0.6 ms in one thread of a Xeon, 8 ms in two on a busy machine; vLLM reads 256 tokens there
in about 0.7 s."""
LEAST = 64
"""Elements of every parameter, however small its part of the model is."""
Views = list[list[torch.Tensor]]
"""Into live memory: a list for each kind of element and device."""
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def models_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost modules that these layers belong to.

    vLLM shows its attention layers to connectors, not the model that they are a part of, and
    modules do not know their parents: these are found among all objects of the process.
    """
    parents: defaultdict[int, list[nn.Module]] = defaultdict(list)
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            for child in found.__dict__.get("_modules", {}).values():
                parents[id(child)].append(found)
    outermost: dict[int, nn.Module] = {}
    ways, seen = list(layers), set[int]()
    while ways:
        module = ways.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = parents.get(id(module), [])
        ways += above
        if not above:
            outermost[id(module)] = module
    return list(outermost.values())


class Weights:
    """A sample of all parameters of some modules, as they are when this is made."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = {id(one): one for model in models for one in model.modules()}.values()
        self._places = [(one._parameters, name) for one in modules for name in one._parameters]
        # vLLM's CPU kernels keep a packed copy of a weight, out of reach, in a function.
        self._packed = [(one, _linear(one)) for one in modules if _linear(one) is not None]
        self._pointers: list[int] = []
        self._views: list[list[torch.Tensor]] = []
        self._first = self._sample()
        self._beside: _Beside | None = None
        gpu = next((one.device for one in self._first if one.is_cuda), None)
        if gpu is not None:
            self._beside = _Beside(gpu)
            for _ in range(self._beside.recorded_time):  # the first load is not to wait for it
                self.have_changed()

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self._first))

    def have_changed(self, after: torch.cuda.Event | None = None) -> bool:
        """Of what a GPU computes, this waits for `after` alone."""
        if self._beside is None:
            return self.look()()
        views = self._live()
        if views is None or [sum(map(len, own)) for own in views] != [*map(len, self._first)]:
            return True
        try:
            return self._beside.differ(views, self._first, after)
        except RuntimeError as error:  # too little memory is one
            log.warning("weights could not be compared, and count as changed: %s", error)
            return True

    def look(self) -> Callable[[], bool]:
        """Compare, after what is queued in the current stream of a GPU. What this returns waits for
        the answer: whether they have changed. What cannot be read any more is not what it was."""
        views = self._live()
        if views is None:
            return lambda: True
        try:
            now = _sampled(views)
        except RuntimeError:
            return lambda: True
        if [one.shape for one in now] != [one.shape for one in self._first]:
            return lambda: True
        if self._beside is None:
            changed = not all(map(torch.equal, now, self._first))
            return lambda: changed
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        _compare(now, self._first, answer)
        there = _event()
        there.record()

        def wait() -> bool:
            there.synchronize()
            return bool(answer)

        return wait

    def _live(self) -> Views | None:
        """What is to be compared, where it is now; None if it cannot be read any more."""
        if any(_linear(one) is not function for one, function in self._packed):
            return None
        try:
            return self._where()
        except (KeyError, RuntimeError):
            return None

    def _where(self) -> Views:
        """One list for each kind of element and device. Parameters that have moved are looked at
        where they are now: it is their values that count."""
        live = [one for found, name in self._places if (one := found[name]) is not None]
        pointers = [one.data_ptr() for one in live]
        if pointers != self._pointers:
            self._pointers, self._views = pointers, _spread(live)
        return self._views

    def _sample(self) -> list[torch.Tensor]:
        return _sampled(self._where())


class _Beside:
    """Compares in a stream of its own, by launches that are recorded: some hundred views of
    parameters take vLLM's thread a millisecond and a half otherwise, at each load. Used by one
    thread at a time, which waits for the answer."""

    def __init__(self, gpu: torch.device) -> None:
        # Not where this is imported: with the codec comes numba, and vLLM's start on a CPU fails
        # over an object of llvmlite if that is there before it.
        from kdn.codec.klt.replays import RECORDED_TIME, Replays

        make: Any = torch.cuda.Stream
        self._stream: Any = make(gpu)
        self.recorded_time = RECORDED_TIME
        self._gpu, self._replays = gpu, Replays(gpu)
        self._compared: Views | None = None
        self._answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._there = _event()

    def differ(
        self, views: Views, first: Sequence[torch.Tensor], after: torch.cuda.Event | None
    ) -> bool:
        def compare() -> None:
            _compare(_sampled(views), first, self._answer)

        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            if views is not self._compared:  # parameters have moved: let go of where they were
                self._replays.forget()
                self._compared = views
            if all(one.device == self._gpu for one in first):
                self._replays.run("compare", (views,), compare)
            else:  # a recording holds nothing of what a CPU compares
                compare()
            self._there.record()
        self._there.synchronize()
        return bool(self._answer)


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make(blocking=True)


def _sampled(views: Views) -> list[torch.Tensor]:
    return [torch.cat(own) for own in views]


def _compare(
    now: Sequence[torch.Tensor], first: Sequence[torch.Tensor], answer: torch.Tensor
) -> None:
    """Whether one differs, into pinned memory, without waiting for it."""
    device = next(one.device for one in first if one.is_cuda)
    differ = [(a != b).any().to(device) for a, b in zip(now, first, strict=True)]
    answer.copy_(torch.stack(differ).any(), non_blocking=True)


def _linear(module: nn.Module) -> object:
    return module.__dict__.get("cpu_linear")


def _spread(parameters: Sequence[torch.Tensor]) -> Views:
    """The larger the parameter, the more of it."""
    there = [one.data for one in parameters if one.numel() and not one.is_meta]
    distinct = {(one.data_ptr(), one.numel()): one for one in there}
    total = sum(one.numel() for one in distinct.values())
    kinds: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
    for one in distinct.values():
        flat = _flat(one).view(_WHOLE[one.element_size()])
        wanted = max(LEAST, SAMPLE * one.numel() // total)
        # Odd, as rows seldom are: so it comes by all columns.
        step = len(flat) // wanted | 1
        kinds[flat.dtype, flat.device].append(flat[step // 2 :: step])
    return list(kinds.values())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view, of all elements if they lie together, whatever their order, or else of one row."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    together = tensor.permute(order)
    if together.is_contiguous():
        return together.view(-1)
    while tensor.ndim > 1:
        tensor = tensor[tensor.shape[0] // 2]
    return tensor
