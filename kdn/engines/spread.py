"""Models that do not fit on one GPU: their layers are spread over several (accelerate's
`device_map`), and each layer's keys and values must lie where it computes.

Only calibration and its probes go this way. A delivered cache lies on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from kdn.engines.states import keeps_states
from kdn.errors import UnsupportedError


def layer_devices(model: Any) -> list[torch.device] | None:
    """Where each layer computes; None if that is one place for all."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) < 2:
        return None
    return [next(layer.parameters()).device for layer in model.get_decoder().layers]


def placed(past: Cache, model: Any) -> None:
    """Moves what a cache holds to its layers; gradients find their way back."""
    devices = layer_devices(model)
    if devices is not None and keeps_states(past):
        raise UnsupportedError(
            f"{type(model).__name__} cannot be spread over several devices: it has recurrent layers"
        )
    if devices is not None and len(devices) != len(past.layers):
        raise UnsupportedError(
            f"{type(model).__name__} cannot be spread over several devices: it caches "
            f"{len(past.layers)} layers, and has {len(devices)}"
        )
    for layer, device in zip(past.layers, devices or (), strict=devices is not None):
        layer.keys, layer.values = layer.keys.to(device), layer.values.to(device)
