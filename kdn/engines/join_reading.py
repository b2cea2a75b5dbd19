"""Joins read twice with a model, to see what joining does to values and to answers.

Once piece by piece, each behind the head alone, and put together: as a join has them. Once in full.
Values are compared without rotation (`columns_of`), token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.engines.reading import last_tokens, new_cache, read
from kdn.engines.transformers import to_dynamic_cache


@dataclass(frozen=True)
class Drawn:
    """Pieces in an order, by their own tokens, behind a head that all share."""

    head: Sequence[int]
    pieces: Sequence[Sequence[int]]

    @property
    def tokens(self) -> list[int]:
        """As one reader of everything would read them."""
        return [*self.head, *(token for piece in self.pieces for token in piece)]

    @property
    def moved_from(self) -> int:
        """Where the second piece begins: from here on values are not as they would be read."""
        return len(self.head) + len(self.pieces[0])


def read_in_full(model: Any, tokens: Sequence[int], after: KVCache | None = None) -> KVCache:
    """What the model's cache holds of these tokens, and of those before them."""
    past = new_cache(model)
    if after is not None:
        past = to_dynamic_cache(after, model.config)
    read(model, tokens, past)
    return last_tokens(past, 0)


def read_join(model: Any, spec: ModelSpec, drawn: Drawn) -> KVCache:
    """The values of a join as if its pieces had been learned apart: read behind the head one by
    one, and moved."""
    parts = []
    start = len(drawn.head)
    head = read_in_full(model, drawn.head) if drawn.head else None
    for number, piece in enumerate(drawn.pieces):
        cache = read_in_full(model, piece, head)
        if number:
            cache = moved(cache.slice(len(drawn.head), cache.end), spec, start)
        parts.append(cache)
        start += len(piece)
    keys, values = (
        torch.cat([getattr(part, name) for part in parts], 1) for name in ("keys", "values")
    )
    return KVCache(keys, values)


def moved(cache: KVCache, spec: ModelSpec, at: int) -> KVCache:
    """The same values with their first token at another position."""
    keys = rope.undo(cache.keys, spec, cache.start)
    return KVCache(rope.redo(keys, spec, at, out=keys).to(cache.dtype), cache.values, at)


def columns_of(cache: KVCache, spec: ModelSpec) -> torch.Tensor:
    """[layers, tokens, 2, values of a side]: keys without rotation and values, in float32."""
    keys = rope.undo(cache.keys, spec, cache.start)
    return torch.stack([keys.flatten(2), cache.values.float().flatten(2)], 2)


def cache_of(columns: torch.Tensor, spec: ModelSpec, start: int = 0) -> KVCache:
    """The inverse of `columns_of`."""
    keys, values = (
        side.reshape(*side.shape[:2], spec.num_kv_heads, spec.head_dim)
        for side in columns.float().unbind(2)
    )
    return KVCache(rope.redo(keys.contiguous(), spec, start), values.contiguous(), start)


def drawn_at_random(
    head: Sequence[int],
    pieces: Sequence[Sequence[int]],
    count: int,
    max_tokens: int,
    generator: np.random.Generator,
) -> Drawn:
    """Up to `count` different pieces in random order, as many as fit."""
    order = generator.permutation(len(pieces))
    chosen: list[Sequence[int]] = []
    room = max_tokens - len(head)
    for index in order:
        if len(chosen) < count and len(pieces[index]) <= room:
            chosen.append(pieces[index])
            room -= len(pieces[index])
    return Drawn(head, chosen)
