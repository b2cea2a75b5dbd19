"""Where a model is loaded, and as what: decided here, for every door.

By itself a GPU is used if there is one with memory to spare, in bfloat16, as models are served
there; a CPU computes in float32. A cache is named alike in either, so what one has learned the
other knows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kdn.checked import shown
from kdn.defaults import DEVICE
from kdn.errors import UnsupportedError

logger = logging.getLogger(__name__)

Device = str | torch.device
"""auto, cpu, cuda or cuda:N, or a device of torch."""
DType = str | torch.dtype | None
"""One of DTYPES, by its name or as it is; None: what suits the device."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KNOWS_BFLOAT16 = (8, 0)
"""Compute capability of the first GPUs that do, Ampere's."""
MIN_FREE_BYTES = 4 << 30
"""Of a GPU that nobody has asked for: with less, others are using it."""
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


def check_device(told: Any) -> None:
    """What it is called only: whether there is one shows when it is used."""
    if not isinstance(told, str | torch.device) or not _DEVICE.fullmatch(str(told)):
        raise UnsupportedError(f"device: expected auto, cpu, cuda or cuda:N, found {shown(told)}")


def check_dtype(told: Any) -> None:
    is_known = told is None or (isinstance(told, torch.dtype) and told in DTYPES.values())
    if not is_known and not (isinstance(told, str) and told in DTYPES):
        raise UnsupportedError(f"dtype: expected {', '.join(DTYPES)}, found {shown(told)}")


def free_bytes(device: torch.device) -> int:
    """Of a GPU's memory. None of it where there is too little to ask."""
    try:
        return torch.cuda.mem_get_info(device)[0]
    except RuntimeError:
        return 0


def chosen_device(
    told: Device = DEVICE, free: Callable[[torch.device], int] = free_bytes
) -> torch.device:
    """One that is there."""
    check_device(told)
    if str(told) == DEVICE:
        return _by_itself(free)
    device = torch.device(told)
    if device.type == "cpu":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise UnsupportedError(f"device: there is no {told} here, torch sees {count} GPUs")
    return torch.device("cuda", index)


def _by_itself(free: Callable[[torch.device], int]) -> torch.device:
    cpu, first = torch.device("cpu"), torch.device("cuda", 0)
    if not torch.cuda.is_available():
        return cpu
    if (left := free(first)) < MIN_FREE_BYTES:
        logger.warning(
            "%s has %.1f GiB of memory free, less than %.0f: the model runs on the CPU; "
            'device="cuda" uses the GPU all the same',
            first, left / 2**30, MIN_FREE_BYTES / 2**30,
        )  # fmt: skip
        return cpu
    return first


def chosen_dtype(told: DType, device: torch.device) -> torch.dtype:
    """For GPUs that do not know bfloat16, float32: weights that are rounded to float16 are those of
    another model."""
    check_dtype(told)
    if told is not None:
        return DTYPES[told] if isinstance(told, str) else told
    knows = device.type == "cuda" and torch.cuda.get_device_capability(device) >= KNOWS_BFLOAT16
    return torch.bfloat16 if knows else torch.float32


def check_placed(model: Any, device: Device, dtype: DType) -> None:
    """A model that somebody else has loaded stays as it is. UnsupportedError if that is not what
    was asked for, or if it is spread over several devices: a cache lies on one."""
    devices = sorted({str(one.device) for one in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedError(f"the model is spread over several devices: {', '.join(devices)}")
    if str(device) != DEVICE and chosen_device(device) != _indexed(model.device):
        raise UnsupportedError(f"device: expected {model.device}, the model's own, found {device}")
    if dtype is not None and chosen_dtype(dtype, model.device) != model.dtype:
        raise UnsupportedError(f"dtype: expected {model.dtype}, the model's own, found {dtype}")


def model_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Work launched within it is in order with every pass of the model: passes run in threads, each
    of which begins with a GPU's default stream."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.default_stream(device))


def follow_caller(device: torch.device) -> None:
    """Let the model's passes, and all in order with them, wait for what this thread has launched:
    before it hands over values of its own."""
    if device.type == "cuda":
        launched = torch.cuda.current_stream(device).record_event()
        torch.cuda.default_stream(device).wait_event(launched)


def wait_for_model(device: torch.device) -> None:
    """Until the passes that were launched before are done: then what they took can be told, and an
    error of theirs is raised here."""
    if device.type == "cuda":
        torch.cuda.default_stream(device).record_event().synchronize()


def _indexed(device: torch.device) -> torch.device:
    """`cuda` is `cuda:0`, as `chosen_device` says it."""
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
