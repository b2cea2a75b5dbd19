"""transformers on the same node as vLLM: it publishes what it read, and loads what vLLM read."""

from __future__ import annotations

from typing import Any

import torch

from kdn.cache.keys import Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.codec import open_codec
from kdn.delivery.client import deliver
from kdn.delivery.publish import Publisher, Values
from kdn.delivery.request import Request
from kdn.delivery.sink import HostSink
from kdn.engines.transformers import from_dynamic_cache, spec_of, to_dynamic_cache
from kdn.places.places import open_places


async def load(
    url: str, codec_name: str, model: Any, tokens: list[int]
) -> tuple[KVCache, tuple[int, ...]]:
    """All levels of all chunks of these tokens, which must be known."""
    spec = spec_of(model)
    codec = open_codec(codec_name, spec)
    chunks = cut(tokens, Namespace(spec.fingerprint, codec.profile_id))
    sink = HostSink.of(codec, chunks, torch.float32)
    async with open_places(url) as places:
        request = Request(chunks, codec, codec.expected_kld, sink, deadline_s=60.0)
        result = await deliver(request, places.endpoints)
    assert not result.recompute, result.troubles
    return sink.cache, result.levels


async def learn(url: str, codec_name: str, model: Any, tokens: list[int]) -> int:
    """Let transformers read and publish; the number of chunks."""
    spec = spec_of(model)
    codec = open_codec(codec_name, spec)
    with torch.no_grad():
        past = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1).past_key_values
    cache = from_dynamic_cache(past)
    async with (
        open_places(url) as places,
        Publisher(places.publish_to, codec) as publisher,
    ):
        for chunk in cut(tokens, Namespace(spec.fingerprint, codec.profile_id)):
            publisher.publish(chunk, Values(cache, final=True))
        assert await publisher.flush(120.0)
        return publisher.counts.published


def compare(model: Any, cache: KVCache, tokens: list[int]) -> tuple[float, float]:
    """KL divergence and top-1 agreement of what the model expects after each token behind the
    cache, against the model without one."""
    ids, start = torch.tensor([tokens]), cache.end
    past = to_dynamic_cache(cache, model.config)
    with torch.no_grad():
        whole = model(ids, logits_to_keep=len(tokens) - start).logits[0]
        found = model(ids[:, start:], past_key_values=past).logits[0]
    expected, found = torch.log_softmax(whole, -1), torch.log_softmax(found, -1)
    kld = (expected.exp() * (expected - found)).sum(-1).mean()
    return kld.item(), (expected.argmax(-1) == found.argmax(-1)).float().mean().item()


def answer(model: Any, prompt: list[int], cache: KVCache | None, num_tokens: int) -> list[int]:
    """Greedily, from the cache if there is one."""
    past = None if cache is None else to_dynamic_cache(cache, model.config)
    ids = torch.tensor([prompt[0 if cache is None else cache.end :]])
    told: list[int] = []
    with torch.no_grad():
        while len(told) < num_tokens:
            output = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = output.past_key_values
            told.append(int(output.logits[0, -1].argmax()))
            ids = torch.tensor([told[-1:]])
    return told
