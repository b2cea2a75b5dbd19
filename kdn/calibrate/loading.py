"""The model that is calibrated: where it runs, and in what precision.

On a GPU a model runs in its own dtype. Where it does not fit on one, its layers are spread over
several. A CPU computes in float32 where the weights then fit into half of the memory at hand, else
in the model's own dtype, which is slower there.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from kdn.calibrate.sizes import free_memory
from kdn.engines.device import chosen_device, chosen_dtype
from kdn.engines.models import load_model, own_weights
from kdn.errors import UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

MOST_OF_GPU = 0.8
"""Of a GPU's free memory that weights may take: the rest is for reading, gradients and sums."""
MOST_OF_CPU = 0.7
FLOAT32_OF_CPU = 0.5


def load_to_calibrate(name: str, told_device: str, told: Console) -> tuple[Any, Any]:
    """Model and tokenizer; says what it does about memory."""
    device = chosen_device(told_device)
    num_weights, own = own_weights(name)
    free = free_memory(device)
    dtype = dtype_on(device, own, num_weights, free)
    size = num_weights * dtype.itemsize
    spread = not fits(device, size, free)
    if spread:
        _check_spread(device, size, free)
    told.print(
        f"{name}: {num_weights:,} weights in {str(dtype).removeprefix('torch.')}, "
        f"{size / 1e9:.1f} GB, on {'several GPUs' if spread else device} "
        f"({free / 1e9:.1f} GB free)"
    )
    return load_model(name, dtype=dtype, device=device, spread=spread)


def dtype_on(device: torch.device, own: torch.dtype, num_weights: int, free: int) -> torch.dtype:
    if device.type != "cpu":
        return own if own != torch.bfloat16 else chosen_dtype(None, device)
    return torch.float32 if 4 * num_weights <= FLOAT32_OF_CPU * free else own


def fits(device: torch.device, size: int, free: int) -> bool:
    return size <= (MOST_OF_CPU if device.type == "cpu" else MOST_OF_GPU) * free


def _check_spread(device: torch.device, size: int, free: int) -> None:
    needed = f"the model's weights take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on"
    if device.type == "cpu":
        raise UnsupportedError(f"{needed} this machine: calibrate on one with more memory")
    every = sum(free_memory(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))
    if not fits(device, size, every):
        raise UnsupportedError(
            f"{needed} {device}, {every / 1e9:.1f} GB on all GPUs: free some, take more GPUs, or "
            "use --device cpu"
        )
    if find_spec("accelerate") is None:
        raise UnsupportedError(
            f"{needed} {device}: pip install accelerate to spread it over several GPUs"
        )
