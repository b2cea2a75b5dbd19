"""Seams: what a piece's values would have become behind other pieces, as a linear map.

    keys and values without rotation, as learned  ->  what to add to them

One map for each block of layers, of low rank, fitted on joins that the model read in full. Nothing
is computed by the model when they are applied, and the first piece of a join needs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.errors import MismatchError


@dataclass(frozen=True)
class Block:
    """Of layers [first, last). Columns are keys of these layers, then their values, each
    `[layer, head, channel]`, as in a profile. Adds `x @ down @ up + bias` to x [tokens, columns].
    """

    layers: tuple[int, int]
    down: torch.Tensor
    """[columns, rank], float32."""
    up: torch.Tensor
    """[rank, columns], float32."""
    bias: torch.Tensor
    """[columns], float32."""

    def added(self, columns: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, columns @ self.down, self.up)


@dataclass(frozen=True)
class Seams:
    """Of one model. Blocks follow each other and cover all layers."""

    model: bytes
    """Fingerprint of the model."""
    blocks: Sequence[Block]
    expected: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    """By share of recomputed tokens: KLD at the first token and over 16, on joins kept apart."""

    def check_for(self, spec: ModelSpec) -> None:
        if self.model != spec.fingerprint:
            raise MismatchError(
                f"these seams are of the model {self.model.hex()}, not of {spec.fingerprint.hex()}"
            )

    def repair(self, cache: KVCache, spec: ModelSpec, at: int | None = None) -> KVCache:
        """A complete cache as it would be behind other pieces, its first token at position `at`
        (None: where it is): the reference, in float32 and in new memory."""
        keys, values = rope.undo(cache.keys, spec, cache.start), cache.values.float().clone()
        count = cache.num_tokens
        for block in self.blocks:
            own = slice(*block.layers)
            sides = [side[own].transpose(0, 1).reshape(count, -1) for side in (keys, values)]
            both = block.added(torch.cat(sides, 1)).view(count, 2, own.stop - own.start, -1)
            for side, added in zip((keys, values), both.unbind(1), strict=True):
                side[own] += added.transpose(0, 1).reshape(side[own].shape)
        start = cache.start if at is None else at
        return KVCache(rope.redo(keys, spec, start, out=keys), values, start)
