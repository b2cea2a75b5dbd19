"""Joins by the book, in main memory and in float32: what the product's own way is checked with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdn.blend.pieces import Join
from kdn.blend.seams import Seams
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec import rope


def reference_join(
    join: Join, caches: Sequence[KVCache], spec: ModelSpec, seams: Seams | None = None
) -> KVCache:
    """The pieces' own caches, one for each, put where the join wants them."""
    parts = [caches[0]]
    for piece, start, cache in list(zip(join.pieces, join.starts, caches, strict=True))[1:]:
        own = cache.slice(piece.head, cache.end)
        parts.append(_moved(own, spec, start) if seams is None else seams.repair(own, spec, start))
    keys = torch.cat([part.keys.float() for part in parts], dim=1)
    return KVCache(keys, torch.cat([part.values.float() for part in parts], dim=1))


def _moved(cache: KVCache, spec: ModelSpec, start: int) -> KVCache:
    keys = rope.undo(cache.keys, spec, cache.start)
    return KVCache(rope.redo(keys, spec, start, out=keys), cache.values, start)
