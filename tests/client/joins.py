"""Pieces learned by tiny models, and what a join of them holds if it is put together by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kdn.blend.pieces import Join
from kdn.blend.seams import Block, Seams
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.client.asynchronous import AsyncClient
from kdn.client.naming import piece_of
from kdn.engines.growing import growing_cache
from kdn.engines.reading import last_tokens
from tests.client.clients import TEXT

TEXTS = {"rules": TEXT[:300], "report": TEXT[300:420], "faq": TEXT[420:700]}
NAMES = list(TEXTS)


class SlowToRead:
    """As if the model took minutes, so that no delivery is late, however busy the machine is: one
    that is late is read, and its values are others."""

    def decode_s(self, num_tokens: int, levels: int) -> float:
        return 1e-6 * num_tokens

    def prefill_s(self, start: int, end: int) -> float:
        return 0.5 * (end - start)


async def learn_all(client: AsyncClient, texts: dict[str, str] = TEXTS) -> None:
    for name, text in texts.items():
        await client.learn(name, text)


async def join_of(client: AsyncClient, names: list[str] = NAMES) -> Join:
    prompts, session = client.engine.prompts, client.session
    pieces = [await piece_of(session, prompts, name, session.namespace) for name in names]
    return Join(tuple(pieces))


def alone(model: Any, tokens: Any, start: int) -> KVCache:
    """What the model computes for these tokens if they stand at `start` and nothing is before."""
    past = growing_cache(model.config)
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None]
    positions = torch.arange(start, start + ids.shape[1])[None]
    with torch.inference_mode():
        model(ids, past_key_values=past, position_ids=positions, use_cache=True)
    found = last_tokens(past, 0)
    return KVCache(found.keys, found.values, start)


def by_hand(model: Any, join: Join, seams: Seams | None = None, spec: Any = None) -> KVCache:
    """Each piece read alone behind its head, at the positions where it comes to stand."""
    parts = []
    for number, (piece, start) in enumerate(zip(join.pieces, join.starts, strict=True)):
        at = start - piece.head
        own = alone(model, piece.tokens, at)
        if number and seams is not None:
            own = seams.repair(own, spec)
        parts.append(own.slice(start if number else 0, own.end))
    keys, values = (torch.cat([getattr(p, side) for p in parts], 1) for side in ("keys", "values"))
    return KVCache(keys, values)


def off_by(found: KVCache, wanted: KVCache) -> float:
    """The largest difference of any value."""
    sides = ((found.keys, wanted.keys), (found.values, wanted.values))
    return max(float((a.float() - b.float()).abs().max()) for a, b in sides)


def some_seams(spec: ModelSpec, scale: float = 0.05) -> Seams:
    """For each layer, random, and large enough to be seen."""
    generator = torch.Generator().manual_seed(3)
    columns = spec.values_per_token // spec.num_layers

    def some(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).half().float()

    blocks = [
        Block((layer, layer + 1), some(columns, 2), some(2, columns), some(columns))
        for layer in range(spec.num_layers)
    ]
    return Seams(spec.fingerprint, blocks)
