"""Letting the model read what nobody has read yet, and publishing it chunk by chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.client.engine import Context, Engine
from kdn.client.loading import Loader
from kdn.delivery.lookup import Question, ask
from kdn.delivery.publish import Answer, Publisher
from kdn.engines.reading import pieces
from kdn.errors import StoreError
from kdn.places.manifests import Manifest, with_entry
from kdn.places.places import Places

FLUSH_S = 600.0
WAIT_S = 0.05


@dataclass
class Learner:
    engine: Engine
    places: Places
    loader: Loader
    publisher: Publisher
    clock: Callable[[], float] = time.monotonic

    async def num_known(self, chunks: Sequence[Chunk]) -> int:
        """How many from the front are where new ones would go, as streams that can be used."""
        question = Question(chunks, self.engine.codec, self.clock, Random())
        found = await ask(question, self.places.publish_to) if chunks else []
        return next((i for i, one in enumerate(found) if one is None), len(found))

    async def learn(self, tokens: Sequence[int], chunks: Sequence[Chunk], known: int) -> int:
        """Read and publish all chunks but the first `known`: how many tokens the model read."""
        refused = self.publisher.counts.refused
        context = await self._context(chunks[:known], tokens)
        computed = chunks[-1].end - context.num_tokens
        stored = await self.read(context, tokens, chunks, wait_s=FLUSH_S)
        if not stored or not await self.publisher.flush(FLUSH_S):
            raise StoreError(f"{self.places.publish_to.name} takes too long to store what is new")
        if lost := self.publisher.counts.refused - refused:
            raise StoreError(f"{self.places.publish_to.name} refused {lost} chunks: is it full?")
        return computed

    async def _context(self, chunks: Sequence[Chunk], tokens: Sequence[int]) -> Context:
        """What is known, without loss: so what comes next may be published."""
        if chunks:
            result = await self.loader.deliver_exact(chunks)
            if result.exact_chunks == len(chunks):
                return self.engine.context_of(result.cache, tokens, exact=True)
        return self.engine.new_context()

    async def read(
        self,
        context: Context,
        tokens: Sequence[int],
        chunks: Sequence[Chunk],
        wait_s: float = 0.0,
    ) -> bool:
        """Up to the end of the last chunk, publishing each as soon as it is read; what finds no
        room for so long is not published, and False returned."""
        stored = True
        by_end = {chunk.end: chunk for chunk in chunks}
        for start, end in pieces(context.num_tokens, chunks[-1].end):
            began_s = self.clock()
            await self.engine.read(context, tokens[start:end])
            if (chunk := by_end.get(end)) is not None:
                took_s = self.clock() - began_s
                stored &= await self.publish(context, chunk, took_s, wait_s=wait_s)
        return stored

    async def publish(
        self, context: Context, chunk: Chunk, saved_s: float = 0.0, wait_s: float = 0.0
    ) -> bool:
        """A chunk that the model has just read, unless what it builds on has losses. False if the
        publisher has had no room for it all the time."""
        if not context.exact:
            return True
        await self.engine.names()  # the model that read it was the one that the chunk names
        values = self.engine.values_of(context, chunk)
        until_s = self.clock() + wait_s
        while self.publisher.publish(chunk, values, prefix_exact=True, saved_s=saved_s) is (
            Answer.FULL
        ):
            if self.clock() >= until_s:
                return False
            await asyncio.sleep(WAIT_S)
        return True

    def publish_given(self, chunks: Sequence[Chunk], values: KVCache, exact: bool) -> int:
        """Those of `chunks` that `values` holds: how many are on their way."""
        held = [chunk for chunk in chunks if chunk.end <= values.end and self._holds(values, chunk)]
        said = [self.publisher.publish(chunk, values, prefix_exact=exact) for chunk in held]
        return said.count(Answer.QUEUED)

    def _holds(self, values: KVCache, chunk: Chunk) -> bool:
        """Whether a continuation from the chunk's end would find all it needs."""
        for first, window in zip(values.valid_from, self.engine.codec.spec.windows, strict=True):
            needed = chunk.start if window is None else max(chunk.start, chunk.end - (window - 1))
            if first > needed:
                return False
        return True

    def manifest(
        self, name: str, old: Manifest, tokens: Sequence[int], style: str, chunks: Sequence[Chunk]
    ) -> Manifest:
        """With this context under this model; those of other models stay."""
        codec = self.engine.codec
        entry = {
            "profile": codec.profile_id.hex(),
            "chunks": [chunk.key.hex() for chunk in chunks],
            "tokens": list(tokens),
            "style": style,
        }
        return with_entry(old, name, codec.spec.fingerprint, entry, self.engine.namespace.seal_key)
