"""Layers with every kind of rotary embedding, and a model that mixes them."""

from __future__ import annotations

from kdn.cache.spec import ModelSpec, RopeSpec

HALVES = RopeSpec(tuple(10000.0 ** -(i / 8) for i in range(8)))
PARTIAL = RopeSpec((1.0, 0.1, 0.01), amplitude=1.3)
NEIGHBOURS = RopeSpec((1.0, 0.3, 0.02, 0.001), interleaved=True)


def spec_with(*ropes: RopeSpec | None) -> ModelSpec:
    return ModelSpec(len(ropes), 3, 16, 100, ropes, (None,) * len(ropes), bytes(16))


MIXED = spec_with(HALVES, HALVES, None, PARTIAL, NEIGHBOURS, HALVES)
