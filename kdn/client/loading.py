"""Which chunks of a context are known, and getting them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from kdn.cache.keys import CHUNK_TOKENS, Chunk, Tokens, cut, tails
from kdn.client.engine import Engine
from kdn.client.options import Options
from kdn.client.quality import Quality, enough_kld
from kdn.delivery.client import deliver
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.estimate import Estimator
from kdn.delivery.lookup import Question, ask
from kdn.delivery.plan import Speeds
from kdn.delivery.request import FAR_S, Request, Result
from kdn.engines.compute import ChunkReader
from kdn.engines.growing import Room
from kdn.errors import KdnError
from kdn.places.places import Places


@dataclass
class Loader:
    engine: Engine
    places: Places
    quality: Quality
    deadline_s: float | None
    speeds: Speeds | None
    """None: the model reads nothing while chunks load."""
    estimator: Estimator = field(default_factory=Estimator)
    """Shared by all deliveries: what one learned of the link helps the next."""

    async def known_chunks(self, tokens: Tokens) -> list[Chunk]:
        """Whole chunks, then the longest tail, that some place has."""
        namespace = await self.engine.names()
        whole = [c for c in cut(tokens, namespace) if c.num_tokens == CHUNK_TOKENS]
        found = await self.usable(whole)
        known = whole[: found.index(False) if False in found else len(whole)]
        ends = list(tails(tokens, namespace, known[-1] if known else None))
        found = await self.usable(ends)
        return known + [tail for tail, is_known in zip(ends, found, strict=True) if is_known][:1]

    async def usable(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Which of them some place has as a stream that can be used."""
        question = Question(chunks, self.engine.codec, time.monotonic, Random())
        return await self._anywhere(chunks, lambda endpoint: ask(question, endpoint))

    async def stored(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Which of them some place has, of whatever model or profile."""

        async def look(endpoint: Endpoint) -> Sequence[object]:
            return await (await endpoint.store()).lookup([chunk.key for chunk in chunks])

        return await self._anywhere(chunks, look)

    async def _anywhere(
        self, chunks: Sequence[Chunk], look: Callable[[Endpoint], Awaitable[Sequence[object]]]
    ) -> list[bool]:
        """By all places together; one that fails knows nothing."""
        found = [False] * len(chunks)
        for endpoint in self.places.endpoints if chunks else ():
            try:
                answer = await look(endpoint)
            except (KdnError, OSError):
                continue
            found = [a or b is not None for a, b in zip(found, answer, strict=True)]
        return found

    async def deliver(
        self, chunks: Sequence[Chunk], options: Options, room: Room | None = None
    ) -> Result:
        """As good as asked for, by the deadline, into `room`; the model may read along from the
        front."""
        engine = self.engine
        deadline_s = self.deadline_s if options.deadline_s is None else options.deadline_s
        quality = self.quality if options.quality is None else options.quality
        reader = None if self.speeds is None else ChunkReader(engine.model, chunks)
        request = Request(
            chunks,
            engine.codec,
            engine.expected_kld,
            deadline_s=FAR_S if deadline_s is None else deadline_s,
            enough_kld=max(enough_kld(quality), engine.expected_kld[-1]),
            cache=None if room is None else room.canonical(chunks[-1].end),
            dtype=engine.model.dtype,
            speeds=self.speeds,
            compute=reader,
            shared=engine.model.device.type == "cpu",
        )
        try:
            return await deliver(
                request,
                self.places.endpoints,
                estimator=self.estimator,
                on_progress=options.on_progress,
            )
        finally:
            if reader is not None:
                await reader.finish()

    async def deliver_exact(self, chunks: Sequence[Chunk]) -> Result:
        """Every level, however long it takes."""
        engine = self.engine
        request = Request(chunks, engine.codec, engine.expected_kld, dtype=engine.model.dtype)
        return await deliver(request, self.places.endpoints, estimator=self.estimator)


def usable_chunks(result: Result) -> int:
    """So many from the front need no reading."""
    return result.recompute[0] if result.recompute else len(result.levels)
