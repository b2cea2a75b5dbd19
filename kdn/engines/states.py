"""Recurrent layers of transformers models: which layers of a cache keep keys and values, and the
state that the others keep, taken out and put back.

In a cache of transformers a layer keeps keys and values, a state, or both; some keep nothing. kdn's
layers, those of `ModelSpec` and `KVCache`, are the ones with keys and values, in their order. The
state goes its own way (`kdn/cache/states.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kdn.cache.states import State, StateLayout, StatePart
from kdn.errors import MismatchError

CONV, RECURRENT = "conv", "recurrent"


def kv_indices(past: Cache) -> list[int]:
    """Which of its layers keep keys and values."""
    return [n for n, layer in enumerate(past.layers) if isinstance(layer, CacheLayerMixin)]


def kv_layers(past: Cache) -> list[Any]:
    """Those layers."""
    return [past.layers[index] for index in kv_indices(past)]


def keeps_states(past: Cache) -> bool:
    """Whether some layer is made to keep a state, be there one yet or not."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in past.layers)


def layout_of(past: Cache) -> StateLayout:
    """Of a cache that has read something, for one sequence, however many it holds."""
    return StateLayout(
        tuple(
            StatePart(index, kind, number, (1, *tensor.shape[1:]), _name(tensor.dtype))
            for index, kind, number, tensor in _held(past)
        )
    )


def state_of(past: Cache) -> State:
    """A copy of all states of one sequence; MismatchError if there are several."""
    return State(layout_of(past), tuple(tensor.clone() for *_, tensor in _held(past)))


def put_state(past: Cache, state: State, device: torch.device) -> None:
    """Into layers that have read nothing yet."""
    if any(True for _ in _held(past)):
        raise MismatchError("expected layers without a state to put one into")
    for part, tensor in zip(state.layout.parts, state.tensors, strict=True):
        layer, own = past.layers[part.layer], tensor.to(device)
        if part.kind == CONV:
            layer.update_conv_state(own, part.number)
        else:
            layer.update_recurrent_state(own, part.number)
            layer.has_previous_state[part.number] = True


def freeze_states(past: Cache) -> None:
    """Let passes leave the states of this cache as they are. They are written in place otherwise,
    which gradients do not bear."""
    for layer in past.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.update_conv_state = partial(_joined_inputs, layer)
            layer.update_recurrent_state = _as_given


def _joined_inputs(
    layer: LinearAttentionCacheLayerMixin, conv_states: torch.Tensor, state_idx: int = 0, **_: Any
) -> torch.Tensor:
    """What a convolution reads: the last inputs before these, and these."""
    return torch.cat([layer.conv_states[state_idx], conv_states], dim=-1)


def _as_given(recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
    return recurrent_states


def repeat(past: Cache, count: int) -> None:
    """Make a cache of one sequence one of so many equal ones."""
    for layer in past.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.reorder_cache(torch.zeros(count, dtype=torch.long))
        else:
            layer.batch_repeat_interleave(count)


def _held(past: Cache) -> Iterator[tuple[int, str, int, torch.Tensor]]:
    """Every tensor of a state: its layer, kind and number, and itself."""
    for index, layer in enumerate(past.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for kind, tensors in ((CONV, layer.conv_states), (RECURRENT, layer.recurrent_states)):
            for number, tensor in sorted(tensors.items()):
                if tensor is not None:
                    yield index, kind, number, tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
