"""Joins read twice with a model, to see what joining does to values and to answers.

Once piece by piece, each behind the head alone, and put together: as a join has them. Once in full.
Values are compared without rotation (`columns_of`), token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope
from kdn.engines.growing import together
from kdn.engines.latents import has_latents
from kdn.engines.reading import forward, forward_rows, last_tokens, new_cache
from kdn.engines.transformers import to_dynamic_cache

Piece = TypeVar("Piece", bound=Sequence[int])

PADDED_TOKENS = 8192
"""Read in one pass on a GPU, padding among them."""


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
    past = new_cache(model) if after is None else to_dynamic_cache(after, model.config)
    forward(model, tokens, past)
    return last_tokens(past, 0)


def read_join(model: Any, spec: ModelSpec, drawn: Drawn) -> KVCache:
    """The values of a join as if its pieces had been learned apart: read behind the head one by
    one, and moved."""
    return put_together(spec, read_apart(model, drawn.head, drawn.pieces), len(drawn.head))


def read_apart(model: Any, head: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[KVCache]:
    """Each piece by itself behind the head, which its cache begins with."""
    before = read_in_full(model, head) if head else None
    config = model.config.get_text_config(decoder=True)
    if before is None or model.device.type == "cpu" or has_latents(config):
        return [read_in_full(model, piece, before) for piece in pieces]
    at_once = max(1, PADDED_TOKENS // max(map(len, pieces)))
    groups = [pieces[at : at + at_once] for at in range(0, len(pieces), at_once)]
    return [cache for group in groups for cache in _read_together(model, before, group)]


def _read_together(model: Any, head: KVCache, pieces: Sequence[Sequence[int]]) -> list[KVCache]:
    """In one pass, which on a GPU takes hardly longer than one piece. Short ones are padded at
    their ends: no token sees what comes after it."""
    longest = max(map(len, pieces))
    ids = torch.tensor([[*piece, *[0] * (longest - len(piece))] for piece in pieces])
    past = together(model.config, [to_dynamic_cache(head, model.config)] * len(pieces))
    forward_rows(model, ids.to(model.device), past)
    keys, values = (
        torch.stack([getattr(layer, name) for layer in past.layers]).transpose(2, 3)
        for name in ("keys", "values")
    )  # [layers, pieces, tokens, heads, channels]
    ends = [head.num_tokens + len(piece) for piece in pieces]
    return [KVCache(keys[:, row, :end], values[:, row, :end]) for row, end in enumerate(ends)]


def put_together(spec: ModelSpec, apart: Sequence[KVCache], num_head: int) -> KVCache:
    """A join, in this order, of pieces that were each read behind a head of so many tokens."""
    parts = [apart[0]]
    for cache in apart[1:]:
        own = cache.slice(num_head, cache.end)
        parts.append(moved(own, spec, parts[-1].end))
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
    pieces: Sequence[Piece], count: int, max_tokens: int, generator: np.random.Generator
) -> list[Piece]:
    """Up to `count` different pieces in random order, as many as fit."""
    chosen: list[Piece] = []
    room = max_tokens
    for index in generator.permutation(len(pieces)):
        if len(chosen) < count and len(pieces[index]) <= room:
            chosen.append(pieces[index])
            room -= len(pieces[index])
    return chosen


def drawn_orders(
    num_pieces: int, count: int, generator: np.random.Generator
) -> list[tuple[int, ...]]:
    """Their own, and others; fewer than `count` if there are hardly more."""
    own = tuple(range(num_pieces))
    others = (tuple(generator.permutation(num_pieces).tolist()) for _ in range(4 * count))
    return list(dict.fromkeys([own, *others]))[:count]
