"""An engine's memory for keys and values, token by token, wherever the engine keeps it.

Every engine's memory is reduced to one shape: per layer, `[slots, heads, channels]` views of keys
and of values whose channels lie side by side. A slot is a place for one token. The blocks of vLLM
have it, and so has a transformers cache `[heads, tokens, channels]`, seen from its tokens.

A memory whose tokens lie block by block at no single distance (`[blocks, heads, tokens, channels]`
one after the other) has it too, as a view in which slots overlap: with the slot stride of a token,
the first token of block `b` is slot `b * block stride / token stride`, and the slots between are
never named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.tensors import KVCache
from kdn.errors import MismatchError, UnsupportedError

Slots = npt.NDArray[np.int64]
NOWHERE = -1
"""The slot of a token that is not written."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class TokenRows:
    """`keys[layer]` and `values[layer]` are views `[slots, heads, channels]`, of one stride
    `(slot, head, 1)` in all layers; keys and values may differ in theirs. `heads` says which of the
    model's KV heads they are. With scales, one for each layer, memory holds `value / scale`."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    heads: range
    key_scales: Sequence[float] = ()
    value_scales: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise MismatchError(
                "expected keys and values of as many layers, "
                f"found {len(self.keys)} and {len(self.values)}"
            )
        if self.heads.step != 1 or not len(self.heads) or self.heads.start < 0:
            raise MismatchError(f"expected some neighbouring heads, found {self.heads}")
        for side in (self.keys, self.values):
            _check_alike(side, len(self.heads))
        if self.keys[0].shape != self.values[0].shape:
            raise MismatchError(
                f"expected keys and values of one shape, found {tuple(self.keys[0].shape)} "
                f"and {tuple(self.values[0].shape)}"
            )
        if self.values[0].dtype != self.dtype or self.values[0].device != self.device:
            raise MismatchError("expected keys and values of one dtype, on one device")
        if self.dtype not in _DTYPES:
            raise UnsupportedError(f"memory for {self.dtype}")
        for scales in (self.key_scales, self.value_scales):
            _check_scales(scales, len(self.keys))

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def num_slots(self) -> int:
        return int(self.keys[0].shape[0])

    @property
    def head_dim(self) -> int:
        return int(self.keys[0].shape[2])

    def of_layers(self, layers: Sequence[int]) -> TokenRows:
        """The same memory, its layers in this order."""
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        keys, values, *scales = ([one[layer] for layer in layers] if one else () for one in parts)
        return TokenRows(keys, values, self.heads, *scales)  # type: ignore[arg-type]

    def check_slots(self, slots: Slots, num_tokens: int) -> None:
        """MismatchError unless there is a slot for each of so many tokens, or NOWHERE."""
        if slots.shape != (num_tokens,) or slots.dtype != np.int64:
            raise MismatchError(
                f"expected {num_tokens} slots (int64), found {slots.shape} ({slots.dtype})"
            )
        if num_tokens and not NOWHERE <= int(slots.min()) <= int(slots.max()) < self.num_slots:
            raise MismatchError(
                f"expected slots from {NOWHERE} to {self.num_slots - 1}, "
                f"found {int(slots.min())} to {int(slots.max())}"
            )

    def write(self, cache: KVCache, slots: Slots) -> None:
        """Tokens of a cache of all heads, each to its slot. Nothing is written unless all can be.
        On a GPU this is queued in the current stream: see `writing`."""
        self.check_slots(slots, cache.num_tokens)
        self._check_cache(cache)
        check_whole(cache.valid_from, cache.start, slots)
        (wanted,) = np.nonzero(slots != NOWHERE)
        places = torch.from_numpy(slots[wanted]).to(self.device)
        tokens = torch.from_numpy(wanted).to(cache.keys.device)
        own = slice(self.heads.start, self.heads.stop)
        for targets, side, scales in (
            (self.keys, cache.keys, self.key_scales),
            (self.values, cache.values, self.value_scales),
        ):
            given = side[:, tokens, own].to(self.device)
            for layer, target in enumerate(targets):
                scale = scales[layer] if scales else 1.0
                _raw(target)[places] = _raw(_stored(given[layer], target.dtype, scale))

    @contextmanager
    def writing(self, *after: torch.cuda.Event | None) -> Iterator[None]:
        """Writes within it wait for the events `after`, in a stream of their own on a GPU; when it
        ends they are done, and no other stream had to wait for them."""
        if self.device.type != "cuda":
            yield
            return
        cuda: Any = torch.cuda
        stream = _writing_stream(self.device)
        for event in after:
            if event is not None:
                stream.wait_event(event)
        try:
            with cuda.stream(stream):
                yield
        finally:
            stream.record_event(cuda.Event(blocking=True)).synchronize()

    def _check_cache(self, cache: KVCache) -> None:
        expected = (self.num_layers, self.heads.stop, self.head_dim)
        found = (cache.num_layers, cache.num_kv_heads, cache.head_dim)
        if expected[::2] != found[::2] or expected[1] > found[1]:
            raise MismatchError(
                f"expected {expected[0]} layers, at least {expected[1]} heads and {expected[2]} "
                f"channels, found {found}"
            )


@cache
def _writing_stream(device: torch.device) -> Any:
    """One for all: torch lends streams from a small pool, so that new ones would sooner or later be
    those of somebody else, whose freed memory they would use."""
    make: Any = torch.cuda.Stream
    return make(device)


def check_whole(valid_from: Sequence[int], start: int, slots: Slots) -> None:
    """UnsupportedError if a layer lacks tokens that have a slot: an engine's memory cannot say
    so."""
    absent = max(valid_from) - start
    if absent > 0 and bool((slots[:absent] != NOWHERE).any()):
        raise UnsupportedError("a layer lacks tokens, and the engine's memory cannot say so")


def _check_alike(side: Sequence[torch.Tensor], num_heads: int) -> None:
    first = side[0]
    if first.ndim != 3 or first.shape[1] != num_heads:
        raise MismatchError(
            f"expected [slots, {num_heads} heads, channels], found {tuple(first.shape)}"
        )
    if first.stride(2) != 1:
        raise UnsupportedError(f"channels {first.stride(2)} apart: they must lie side by side")
    for one in side:
        if one.shape != first.shape or one.stride() != first.stride():
            raise MismatchError(
                f"expected {tuple(first.shape)} of strides {first.stride()} in every layer, "
                f"found {tuple(one.shape)} of strides {one.stride()}"
            )
        if one.dtype != first.dtype or one.device != first.device:
            raise MismatchError("expected one dtype, on one device, in every layer")


def _check_scales(scales: Sequence[float], num_layers: int) -> None:
    if len(scales) not in (0, num_layers):
        raise MismatchError(f"expected a scale for each of {num_layers} layers, found {scales}")
    if not all(0 < scale < float("inf") for scale in scales):
        raise MismatchError(f"expected scales above zero, found {scales}")


def _stored(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if scale != 1.0:
        values = values.float() / scale
    if dtype == torch.float8_e4m3fn:
        # It has no infinity: what is too large becomes the largest, as in every engine.
        most = torch.finfo(dtype).max
        values = values.float().clamp(-most, most)
    return values.to(dtype)


def _raw(values: torch.Tensor) -> torch.Tensor:
    """Bytes where torch may not know how to place values of this dtype."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values
