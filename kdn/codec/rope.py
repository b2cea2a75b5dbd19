"""Keys with their rotation undone, and back.

A rotated key mixes what a token says with where it stands. A codec wants the first alone: keys of
any position then share one distribution, and one basis serves them all. The rotation is known
exactly from the model spec and the positions, so nothing of it is stored.

Angles are computed in float64 and only their cosine and sine are rounded to float32: `redo` after
`undo` returns a key to within float32 rounding at any position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch

from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.errors import MismatchError

# Layers that rotate alike are turned together, but only so many values at once: temporaries stay
# small beside the cache and within the processor's cache.
_BLOCK_VALUES = 1 << 18

Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, [tokens, 1, pairs]."""


def undo(
    keys: torch.Tensor,
    spec: ModelSpec,
    start: int,
    *,
    first_layer: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keys as they were before RoPE, in float32.

    `keys` is [layers, tokens, heads, head_dim]: token i stands at position `start + i`, and layer i
    is the model's layer `first_layer + i`. `out` may be `keys` itself, or of another dtype.
    """
    return _turn(keys, spec, first_layer, out, _turns_from(start, keys, forward=False))


def redo(
    keys: torch.Tensor,
    spec: ModelSpec,
    start: int,
    *,
    first_layer: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The inverse of `undo`: keys as the model's cache holds them."""
    return _turn(keys, spec, first_layer, out, _turns_from(start, keys, forward=True))


def _turns_from(start: int, keys: torch.Tensor, *, forward: bool) -> Callable[[RopeSpec], Turns]:
    def turns(rope: RopeSpec) -> Turns:
        return tables(rope, start, keys.shape[1], keys.device, forward=forward)

    return turns


def move(keys: torch.Tensor, spec: ModelSpec, shift: int) -> None:
    """Turn the keys of all layers, in place, as if their tokens stood `shift` positions further."""

    def turns(rope: RopeSpec) -> Turns:
        angles = torch.tensor(rope.inv_freq, dtype=torch.float64) * shift
        cos, sin = (one.to(keys.device, torch.float32) for one in (angles.cos(), angles.sin()))
        return cos[None, None, :], sin[None, None, :]

    if shift:
        _turn(keys, spec, 0, keys, turns)


def _turn(
    keys: torch.Tensor,
    spec: ModelSpec,
    first_layer: int,
    out: torch.Tensor | None,
    turns: Callable[[RopeSpec], Turns],
) -> torch.Tensor:
    if keys.ndim != 4 or keys.shape[3] != spec.head_dim:
        raise MismatchError(
            f"keys must be [layers, tokens, heads, {spec.head_dim}], found {tuple(keys.shape)}"
        )
    if first_layer < 0 or first_layer + keys.shape[0] > spec.num_layers:
        raise MismatchError(
            f"layers [{first_layer}, {first_layer + keys.shape[0]}) are not within the model's "
            f"{spec.num_layers}"
        )
    if out is None:
        out = torch.empty_like(keys, dtype=torch.float32)
    ropes = spec.ropes[first_layer : first_layer + keys.shape[0]]
    found: dict[RopeSpec, Turns] = {}
    for rope, lo, hi in _blocks(ropes, max(1, keys[0].numel()) if len(ropes) else 1):
        if rope is None:
            if out is not keys:
                out[lo:hi].copy_(keys[lo:hi])
            continue
        if rope not in found:
            found[rope] = turns(rope)
        _turn_block(keys[lo:hi], out[lo:hi], rope, *found[rope])
    return out


def _blocks(
    ropes: Sequence[RopeSpec | None], values_per_layer: int
) -> Iterator[tuple[RopeSpec | None, int, int]]:
    """Runs [lo, hi) of neighbouring layers that rotate alike, none larger than a block."""
    size = max(1, _BLOCK_VALUES // values_per_layer)
    lo = 0
    for rope, run in groupby(ropes):
        end = lo + sum(1 for _ in run)
        for first in range(lo, end, size):
            yield rope, first, min(first + size, end)
        lo = end


def tables(
    rope: RopeSpec, start: int, num_tokens: int, device: torch.device, *, forward: bool
) -> Turns:
    """Cosine and sine as [tokens, 1, pairs]; undoing turns the other way and divides by the
    amplitude."""
    positions = torch.arange(start, start + num_tokens, dtype=torch.float64)
    angles = positions[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float64)
    scale = rope.amplitude if forward else 1.0 / rope.amplitude
    cos = (angles.cos() * scale).to(device, torch.float32)
    sin = (angles.sin() * (scale if forward else -scale)).to(device, torch.float32)
    return cos[:, None, :], sin[:, None, :]


def _turn_block(
    keys: torch.Tensor, out: torch.Tensor, rope: RopeSpec, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    first, second = _pair_channels(rope)
    a, b = keys[..., first].float(), keys[..., second].float()
    turned_a = torch.mul(a, cos).addcmul_(b, sin, value=-1.0)
    turned_b = torch.mul(b, cos).addcmul_(a, sin)
    out[..., first].copy_(turned_a)
    out[..., second].copy_(turned_b)
    if rope.rotary_dim < keys.shape[3] and out.data_ptr() != keys.data_ptr():
        out[..., rope.rotary_dim :].copy_(keys[..., rope.rotary_dim :])


def _pair_channels(rope: RopeSpec) -> tuple[slice, slice]:
    """Where the first and the second channel of each pair stand."""
    half = len(rope.inv_freq)
    if rope.interleaved:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)
