"""A DynamicCache that grows in place, and memory to deliver into that it can go on from.

transformers' own layers copy all they hold for each token that is added: for a long context that
takes longer than computing it. These keep room ahead. Delivered values are decoded right into
such memory, head by head as attention reads it, so that nothing is copied before the first token.

On a GPU others write there in streams of their own, and must not begin before the model has done
with what the memory was used for until then: `Room.after` says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from kdn.cache.keys import Chunk
from kdn.cache.rows import Slots, TokenRows
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.engines.device import model_stream
from kdn.engines.latents import has_latents
from kdn.engines.states import kv_indices

LEAST_ROOM = 256
"""Tokens; more than that, a quarter of what is held is kept free."""
MAX_SPARE = 3
"""Rooms that wait to be used again."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """`keys` and `values` are the first tokens of larger tensors [batch, heads, room, channels]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self._keys_room: torch.Tensor | None = None
        self._values_room: torch.Tensor | None = None

    @classmethod
    def holding(cls, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> GrowingLayer:
        """The first `num_tokens` of these tensors; it will write to the others."""
        layer = cls()
        layer.lazy_initialization(keys, values)
        layer._keys_room, layer._values_room = keys, values
        layer.keys, layer.values = keys[:, :, :num_tokens], values[:, :, :num_tokens]
        return layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._keys_room, self.keys = _extend(self._keys_room, self.keys, key_states)
        self._values_room, self.values = _extend(self._values_room, self.values, value_states)
        return self.keys, self.values


def _extend(
    room: torch.Tensor | None, held: torch.Tensor, new: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A room that begins with both, and its beginning."""
    if room is None or not _fits(room, held, new):
        room = _larger(held, new)
    count = held.shape[2] if held.numel() else 0
    end = count + new.shape[2]
    room[:, :, count:end] = new
    return room, room[:, :, :end]


def _fits(room: torch.Tensor, held: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether `held` is still the beginning of its room (others may have put a new tensor there)
    and there is place for `new` after it."""
    if room.shape[:2] != new.shape[:2]:
        return False
    if not held.numel():
        return new.shape[2] <= room.shape[2]
    is_part = held.data_ptr() == room.data_ptr() and held.stride() == room.stride()
    return is_part and held.shape[2] + new.shape[2] <= room.shape[2]


def _larger(held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A room for both and more, with a copy of what is held."""
    count = held.shape[2] if held.numel() else 0
    total = count + new.shape[2]
    batch, heads, _, channels = new.shape
    room = new.new_empty((batch, heads, total + max(LEAST_ROOM, total // 4), channels))
    if count:
        room[:, :, :count] = held
    return room


def growing_cache(config: PreTrainedConfig, room: Room | None = None) -> DynamicCache:
    """Empty, in `room` if given. Layers with a window stay as transformers makes them: they hold
    little; so do those that keep a state besides. Latents lie otherwise in a room than attention
    reads them, so they grow apart from it.
    """
    past = DynamicCache(config=config)
    if has_latents(config):
        room = None
    for index, place in enumerate(kv_indices(past)):
        if type(past.layers[place]) is DynamicLayer:
            past.layers[place] = GrowingLayer() if room is None else room.layer(index, 0)
    return past


def together(config: PreTrainedConfig, pasts: Sequence[Cache]) -> DynamicCache:
    """A copy of several caches that hold as many tokens, each as a row of one."""
    past = growing_cache(config)
    for index, layers in enumerate(zip(*(one.layers for one in pasts), strict=True)):
        past.update(
            torch.cat([layer.keys for layer in layers]),
            torch.cat([layer.values for layer in layers]),
            index,
        )
    return past


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Room:
    """Keys and values [layers, heads, tokens and more, channels] of one context."""

    keys: torch.Tensor
    values: torch.Tensor
    after: torch.cuda.Event | None = None
    """On a GPU: passes when the model has done with this memory, as of the last `used`."""

    @classmethod
    def of(
        cls, spec: ModelSpec, num_tokens: int, dtype: torch.dtype, device: torch.device = CPU
    ) -> Room:
        capacity = num_tokens + max(LEAST_ROOM, num_tokens // 4)
        shape = (spec.num_layers, spec.num_kv_heads, capacity, spec.head_dim)
        with model_stream(device):  # so memory that a pass still reads is not written to before
            keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            is_cuda = device.type == "cuda"
            return cls(
                keys, values, torch.cuda.current_stream().record_event() if is_cuda else None
            )

    def used(self) -> None:
        """Whoever writes here next, in a stream of its own, waits for what was launched so far."""
        if self.after is not None:
            self.after.record(torch.cuda.default_stream(self.keys.device))

    def canonical(self, num_tokens: int) -> KVCache:
        """Its first tokens, to decode into."""
        keys, values = (t[:, :, :num_tokens].transpose(1, 2) for t in (self.keys, self.values))
        return KVCache(keys, values)

    def rows(self) -> TokenRows:
        """The same token by token, each in the slot of its position."""
        keys, values = ([one.transpose(0, 1) for one in side] for side in (self.keys, self.values))
        return TokenRows(keys, values, range(self.keys.shape[1]))

    def layer(self, index: int, num_tokens: int) -> GrowingLayer:
        return GrowingLayer.holding(self.keys[index][None], self.values[index][None], num_tokens)

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[2])


def is_written_by_rows(spec: ModelSpec, device: torch.device) -> bool:
    """Whether delivered values are decoded into a GPU's memory. Layers with a window lack tokens,
    which rows cannot say: such caches are put together in main memory, and copied."""
    return device.type == "cuda" and not spec.has_windows


def slots_of(chunk: Chunk) -> Slots:
    """Where a chunk's tokens lie in `Room.rows`."""
    return np.arange(chunk.start, chunk.end, dtype=np.int64)


class Rooms:
    """Memory of contexts that have ended, for the next ones: the first use of fresh memory takes
    longer than decoding into it. Not that of a GPU, where torch keeps it, and others may need it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        max_spare: int = MAX_SPARE,
        device: torch.device = CPU,
    ) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device
        self._max_spare = max_spare if device.type == "cpu" else 0
        self._spare: list[Room] = []

    def take(self, num_tokens: int) -> Room:
        for place, room in enumerate(self._spare):
            if room.capacity >= num_tokens + LEAST_ROOM:
                return self._spare.pop(place)
        return Room.of(self._spec, num_tokens, self._dtype, self._device)

    def give(self, room: Room | None) -> None:
        """Back, when nobody looks at it any more. Of too many, the smallest goes."""
        if room is not None and self._max_spare:
            self._spare = sorted([*self._spare, room], key=lambda one: one.capacity)
            del self._spare[: -self._max_spare]

    def prepare(self, num_tokens: int, count: int) -> None:
        """Set memory aside, and touch it."""
        for _ in range(min(count, self._max_spare)):
            room = Room.of(self._spec, num_tokens, self._dtype, self._device)
            room.keys.zero_()
            room.values.zero_()
            self.give(room)
