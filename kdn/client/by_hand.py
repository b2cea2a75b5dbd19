"""For those who let their model read themselves: caches loaded, and published."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from kdn.cache.keys import Tokens, cut
from kdn.cache.tensors import KVCache
from kdn.checked import checked_tokens, shown
from kdn.client.answers import Loaded
from kdn.client.contexts import Contexts, Options
from kdn.client.engine import values_of_cache
from kdn.engines.device import follow_caller, model_stream, wait_for_model
from kdn.engines.states import state_of
from kdn.errors import KdnError, UnsupportedError


async def load(contexts: Contexts, tokens: Tokens, options: Options) -> Loaded:
    """See `AsyncClient.load`."""
    engine = contexts.engine
    checked_tokens("tokens", tokens, engine.spec.vocab_size)
    await engine.names()
    most = engine.spec.max_tokens
    if most is not None and len(tokens) > most:  # in so long a text the model has other keys
        return Loaded(None, 0, None, engine.config)
    known, options = await contexts.know(tokens, options)
    if not known.chunks:
        return Loaded(None, 0, None, engine.config)
    if contexts.resuming is not None:
        found = await contexts.resuming.resume(known.chunks, options, known, into=False)
        if found is None:
            return Loaded(None, 0, None, engine.config)
        cache, got = found.cache, found.delivered
        return Loaded(cache, cache.end, got, engine.config, state=found.state)
    got, landing = await contexts.deliver(known.chunks, options, known)
    ready = landing.num_ready(got)
    if not ready:
        return Loaded(None, 0, got, engine.config)
    end = got.chunks[ready - 1].end
    return Loaded(landing.until(end), end, got, engine.config)


async def publish(contexts: Contexts, tokens: Tokens, cache: Any, after: Loaded | None) -> int:
    """See `AsyncClient.publish`."""
    engine, session = contexts.engine, contexts.session
    checked_tokens("tokens", tokens, engine.spec.vocab_size)
    if after is not None and not isinstance(after, Loaded):
        raise UnsupportedError(f"after: expected what was loaded, found {shown(after)}")
    follow_caller(engine.device)
    if engine.spec.has_states and isinstance(cache, KVCache):
        raise UnsupportedError("expected past_key_values: a KVCache lacks the states of this model")
    with model_stream(engine.device):
        values = values_of_cache(cache, engine.spec)
        state = state_of(cache) if engine.spec.has_states else None
    engine.check_length(max(len(tokens), values.end))
    known, exact_until = 0, None
    if after is not None:
        known, exact_until = after.num_tokens, after.exact_until
    chunks = [chunk for chunk in cut(tokens, await engine.names()) if chunk.end > known]
    if contexts.resuming is not None and state is not None:
        await contexts.resuming.publish_given(chunks, values.end, state, exact_until)
    with suppress(KdnError, OSError):  # a place that is away is published to all the same
        chunks = chunks[len((await session.know_home(chunks)).chunks) :]
    queued = contexts.publish_given(chunks, values, exact_until)
    await asyncio.to_thread(wait_for_model, engine.device)  # the caller's cache is copied
    return queued
