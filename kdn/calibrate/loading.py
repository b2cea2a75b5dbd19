"""The model that is calibrated: where it runs, and in what precision.

On a GPU a model runs in its own dtype. Where it does not fit on one, its layers are spread over
several. So does a bfloat16 model on a CPU with instructions for it: SmolLM2 reads 1.7 times as fast
there as in float32 (one core of an EPYC with avx512_bf16). Other CPUs compute in float32 where the
weights then fit into half of the memory at hand, else in the model's own dtype, which is slow.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kdn.calibrate.sizes import free_memory
from kdn.engines.device import chosen_device, chosen_dtype
from kdn.engines.models import load_model, own_weights
from kdn.errors import UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

MOST_OF_GPU = 0.8
"""The share of a GPU's free memory for weights; reading, gradients and sums need the rest."""
MOST_OF_CPU = 0.7
FLOAT32_OF_CPU = 0.5
_BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


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
    is_fast = own == torch.bfloat16 and cpu_knows_bfloat16()
    return own if is_fast or 4 * num_weights > FLOAT32_OF_CPU * free else torch.float32


def cpu_knows_bfloat16(flags: Path = Path("/proc/cpuinfo")) -> bool:
    """As far as the system tells."""
    try:
        told = set(flags.read_text().split())
    except OSError:
        return False
    return not told.isdisjoint(_BFLOAT16_FLAGS)


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
