"""Whether a model goes on from what was loaded as from what it reads itself.

One client publishes a context to a folder, without any loss; another loads it from there. In
float32 the second one's tokens must be those of plain reading, without any cache. In the model's
own dtype the loaded values must be the published ones bit for bit: there, reading in one piece or
in several already rounds otherwise, so plain reading is no measure.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from kdn.cache.keys import TokenIds
from kdn.cache.tensors import KVCache
from kdn.client.synchronous import Client, connect
from kdn.engines.reading import forward, read_whole
from kdn.errors import KdnError

ANSWER = 24
"""Tokens that follow each context."""
QUESTION = 16
"""Tokens that are read after what was loaded: the window's own."""


@dataclass(frozen=True)
class HandedOver:
    """Over all contexts tried."""

    contexts: int
    tokens: int
    same_tokens: int
    same_bits: bool

    @property
    def is_exact(self) -> bool:
        return self.same_bits and self.same_tokens == self.tokens > 0


def hand_over(
    model: Any, plain: Any, tokenizer: Any, windows: list[TokenIds], context: int
) -> HandedOver:
    """`model` in its own dtype, `plain` the same one in float32."""
    same_bits, same, total = True, 0, 0
    for window in windows:
        ids, question = window[:context], window[context : context + QUESTION]
        published, loaded = _through_folder(model, tokenizer, ids)
        same_bits &= _are_equal(published, loaded)
        _, loaded = _through_folder(plain, tokenizer, ids)
        wanted = _answer(plain, [*ids, *question])
        found = _answer_from(plain, loaded, question)
        same += sum(a == b for a, b in zip(wanted, found, strict=True))
        total += len(wanted)
    return HandedOver(len(windows), total, same, same_bits)


def _through_folder(model: Any, tokenizer: Any, ids: TokenIds) -> tuple[KVCache, KVCache]:
    """What was published, and what another client loaded."""
    own = read_whole(model, ids)
    with tempfile.TemporaryDirectory(prefix="kdn-models-") as place:
        with _client(place, model, tokenizer) as client:
            client.publish(ids.tolist(), own)
            if not client.flush():
                raise KdnError("a context was not published in time")
        with _client(place, model, tokenizer) as client:
            loaded = client.load(ids.tolist())
            if loaded.cache is None or loaded.num_tokens != len(ids):
                raise KdnError(f"expected {len(ids)} tokens to be known, found {loaded.num_tokens}")
            return own, loaded.cache


def _client(place: str, model: Any, tokenizer: Any) -> Client:
    """Only what was fetched is to be judged: nothing is read along."""
    return connect(place, model=(model, tokenizer), codec="exact", quality="exact", recompute=False)


def _are_equal(published: KVCache, loaded: KVCache) -> bool:
    """Bit for bit, in what the loaded one says that it holds."""
    pairs = ((published.keys, loaded.keys), (published.values, loaded.values))
    return all(
        torch.equal(mine[layer, begin:].cpu(), theirs[layer, begin:].cpu())
        for layer, begin in enumerate(loaded.valid_from)
        for mine, theirs in pairs
    )


@torch.inference_mode()
def _answer(model: Any, ids: list[int]) -> list[int]:
    """Greedy, everything read anew for each token: no cache at all."""
    found: list[int] = []
    for _ in range(ANSWER):
        batch = torch.tensor([[*ids, *found]], dtype=torch.long, device=model.device)
        found.append(int(model(batch, use_cache=False).logits[0, -1].argmax()))
    return found


def _answer_from(model: Any, cache: KVCache, question: TokenIds) -> list[int]:
    """Greedy, on top of a cache."""
    from kdn.engines.transformers import to_dynamic_cache

    keys, values = (one.to(model.device) for one in (cache.keys, cache.values))
    own = KVCache(keys, values, cache.start, cache.valid_from)
    past = to_dynamic_cache(own, model.config.get_text_config(decoder=True))
    logits, found = forward(model, question, past), []
    for _ in range(ANSWER):
        found.append(int(logits.argmax()))
        logits = forward(model, found[-1:], past)
    return found
