"""Contexts as a client makes them: delivered, read by the model where nothing was to be had, and
published chunk by chunk so that nobody reads them again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from kdn.cache.keys import CHUNK_TOKENS, Chunk, Tokens, cut
from kdn.cache.tensors import KVCache
from kdn.checked import checked_deadline, checked_function, checked_number
from kdn.client.answers import Stats
from kdn.client.engine import Context, ContextSource, Engine
from kdn.client.landing import Landing
from kdn.client.resuming import Resuming
from kdn.delivery.known import Known
from kdn.delivery.plan import Speeds
from kdn.delivery.publish import Admission, Values
from kdn.delivery.refine import Refinement
from kdn.delivery.request import FAR_S, OnProgress
from kdn.delivery.sink import HostSink, RowsSink
from kdn.engines.compute import ChunkReader
from kdn.engines.device import model_stream
from kdn.engines.generating import Sampling
from kdn.engines.growing import Room, slots_of
from kdn.engines.reading import pieces
from kdn.session.delivered import Delivered
from kdn.session.quality import Quality, enough_kld
from kdn.session.session import LOOKUP_S, Session
from kdn.tracing import span

WAIT_S = 0.05
LEAST_S = 0.001
"""Left of a deadline that has passed."""
APPLY_S = 0.25
"""Of decoding finer levels between two tokens: two chunks on two cores."""

Told = Callable[[int], None]
"""Called with how many tokens the model has read."""


@dataclass(frozen=True)
class Options:
    """What one request wants: None where the client's own setting holds."""

    quality: Quality | None = None
    deadline_s: float | None = None
    sampling: Sampling = field(default_factory=Sampling)
    on_progress: OnProgress | None = None
    force_latest: bool = False
    """Of a name: what the centre of all regions has now, not what a region heard last."""
    stale_ok: bool = False
    """If nobody can tell what is the latest: what is known."""
    recompute_share: float | None = None
    """Of a join: so much of it is computed anew, whatever the quality; 1: it is read."""

    def __post_init__(self) -> None:
        if self.quality is not None:
            enough_kld(self.quality)
        checked_deadline(self.deadline_s)
        checked_function("on_progress", self.on_progress)
        if self.recompute_share is not None:
            checked_number("recompute_share", self.recompute_share, 0, 1)


@dataclass
class Contexts:
    engine: Engine
    session: Session
    quality: Quality
    deadline_s: float | None
    speeds: Speeds | None
    """None: the model reads nothing while chunks load."""
    clock: Callable[[], float] = time.monotonic
    resuming: Resuming | None = None
    """For models with recurrent layers."""

    # delivering

    def left_of(self, options: Options, began_s: float) -> Options:
        """The options, with the deadline less by the time since then."""
        deadline_s = self.deadline_s if options.deadline_s is None else options.deadline_s
        if deadline_s is None:
            return options
        return replace(options, deadline_s=max(LEAST_S, began_s + deadline_s - self.clock()))

    async def know(self, tokens: Tokens, options: Options) -> tuple[Known, Options]:
        """The longest known beginning, and what the request still wants: less time is left."""
        deadline_s = self.deadline_s if options.deadline_s is None else options.deadline_s
        began_s, enough = self.clock(), self.enough_kld(options)
        limit_s = LOOKUP_S if deadline_s is None else min(deadline_s, LOOKUP_S)
        known = await self.session.know(tokens, enough_kld=enough, limit_s=limit_s)
        return known, self.left_of(options, began_s)

    async def deliver(
        self,
        chunks: Sequence[Chunk],
        options: Options,
        known: Known | None = None,
        room: Room | None = None,
    ) -> tuple[Delivered, Landing]:
        """As good as asked for, by the deadline, into `room`; the model may read along from the
        front. What a GPU decodes goes to a room in any case."""
        engine, session = self.engine, self.session
        deadline_s = self.deadline_s if options.deadline_s is None else options.deadline_s
        if room is None and engine.by_rows:
            room = engine.room_for(chunks[-1].end)
        landing = self.landing_for(chunks, room)
        reader = None if self.speeds is None else ChunkReader(engine.model, chunks)
        try:
            got = await session.deliver(
                chunks, landing.sink, known=known, enough_kld=self.enough_kld(options),
                deadline_s=FAR_S if deadline_s is None else deadline_s, speeds=self.speeds,
                compute=reader, shared=engine.device.type == "cpu",
                on_progress=options.on_progress, skips_windows=True,
            )  # fmt: skip
        finally:
            if reader is not None:
                await reader.finish()
        return got, landing

    def landing_for(self, chunks: Sequence[Chunk], room: Room | None) -> Landing:
        """To deliver a context's first chunks to: in `room`, or in new memory of the CPU."""
        codec, spec = self.session.codec, self.session.spec
        if room is not None and self.engine.by_rows:
            rows = RowsSink(codec, room.rows(), slots_of, room.after)
            return Landing(spec, rows, room.canonical)
        if room is not None:
            sink = HostSink(codec, room.canonical(chunks[-1].end))
        else:
            sink = HostSink.of(codec, chunks, self.engine.model.dtype)
        return Landing(spec, sink, sink.until)

    def enough_kld(self, options: Options) -> float:
        """What the request asks for, as far as the codec can be that good."""
        quality = self.quality if options.quality is None else options.quality
        return max(enough_kld(quality), self.session.codec.expected_kld[-1])

    async def load(
        self, tokens: Sequence[int], chunks: Sequence[Chunk], options: Options, stats: Stats
    ) -> Context:
        """The chunks of `tokens`: delivered, or read where nothing was to be had."""
        await self.engine.names()
        if not chunks:
            return self.engine.new_context()
        if self.resuming is not None:
            return await self.resuming.load(tokens, chunks, options, stats)
        room = self.engine.room_for(chunks[-1].end)
        got, landing = await self.deliver(chunks, options, room=room)
        to_read = landing.to_read(got)
        with span("kdn.hand_over", chunks=len(chunks), to_read=len(to_read)):
            context = await self._joined(got, landing, to_read, tokens, room)
        stats.note(got, self.speeds)
        both = enumerate(zip(chunks, got.levels, strict=True))
        stats.known_tokens = sum(
            chunk.num_tokens for i, (chunk, levels) in both if levels and i not in to_read
        )
        stats.computed_tokens = context.num_tokens - stats.known_tokens
        return context

    async def _joined(
        self,
        got: Delivered,
        landing: Landing,
        to_read: set[int],
        tokens: Sequence[int],
        room: Room | None,
    ) -> Context:
        """Of what was delivered and what the model must read, in order."""
        engine, chunks = self.engine, got.chunks
        ready = min(to_read, default=len(chunks))
        context = engine.new_context(room)
        if ready:
            context = engine.context_of(landing.until(chunks[ready - 1].end), tokens, room)
        if len(to_read) < len(chunks):
            context.delivered = got
        for is_missing, run in groupby(range(ready, len(chunks)), lambda one: one in to_read):
            some = [chunks[number] for number in run]
            if is_missing:
                await self.read(context, tokens, some)
                continue
            start, end = some[0].start, some[-1].end
            engine.append(context, landing.until(end).slice(start, end), tokens[start:end])
        return context

    async def exact(self, known: Known, tokens: Sequence[int]) -> Context:
        """What is known, without any loss: so what comes next may be published."""
        if self.resuming is not None:
            return await self.resuming.exact(known, tokens)
        if known.chunks:
            end = known.chunks[-1].end
            room = self.engine.room_for(end) if self.engine.by_rows else None
            landing = self.landing_for(known.chunks, room)
            got = await self.session.deliver(
                known.chunks, landing.sink, known=known, skips_windows=True
            )
            if not landing.to_read(got) and got.exact_until is None:
                return self.engine.context_of(landing.until(end), tokens, room)
        return self.engine.new_context()

    # finer levels, after the first token

    def refinement(self, context: Context, options: Options) -> Refinement | None:
        """What makes a context better that its deadline left coarser than asked for: None if it is
        good enough, or does not lie in memory that can be decoded into."""
        got = context.delivered
        if got is None or got.result is None or not self.engine.lies_in_room(context):
            return None
        if context.is_mended:
            return None  # what was computed anew would be lost under what arrives
        enough = self.enough_kld(options)
        return None if got.result.kld <= enough else got.result.refine(enough)

    async def refine(self, context: Context, better: Refinement, stats: Stats) -> None:
        """Between two tokens: write what has arrived."""
        if not better.ready or not self.engine.lies_in_room(context):
            return
        async with self.engine.lock:
            assert context.room is not None
            context.room.used()  # the last token's pass still reads what is written next
            improved = await better.apply(APPLY_S)
        stats.refined_chunks += len(improved)
        stats.refined_bytes = better.fetched_bytes
        stats.levels = better.levels + stats.levels[len(better.levels) :]

    # reading and publishing

    async def read(
        self,
        context: Context,
        tokens: Sequence[int],
        chunks: Sequence[Chunk],
        wait_s: float = 0.0,
        told: Told = lambda num_tokens: None,
        stored_quality: Quality | None = None,
    ) -> bool:
        """Up to the end of the last chunk, publishing each as soon as it is read; what finds no
        room for so long is not published, and False returned."""
        published, at_once = True, self.engine.chunks_at_once
        for start, end in self._spans(context.num_tokens, chunks, at_once):
            began_s = self.clock()
            await self.engine.read(context, tokens[start:end])
            token_s = (self.clock() - began_s) / (end - start)
            await self.engine.names()  # the model that read it was the one that the chunks name
            for chunk in (one for one in chunks if start < one.end <= end):
                took_s = token_s * (chunk.end - max(start, chunk.start))
                published &= await self._publish(context, chunk, took_s, wait_s, stored_quality)
            if self.resuming is not None:
                took_s = token_s * (end - start)
                published &= await self.resuming.publish_seen(context, chunks, took_s, wait_s)
            told(end)
        return published

    def _spans(
        self, start: int, chunks: Sequence[Chunk], at_once: int
    ) -> Iterator[tuple[int, int]]:
        """To read at a time: also up to the end of each tail, for there layers with windows still
        hold what a continuation needs, and values are those of whoever reads no further."""
        stops = {chunk.end for chunk in chunks if chunk.end % CHUNK_TOKENS}
        for first, last in pieces(start, chunks[-1].end, at_once):
            inner = sorted(stop for stop in stops if first < stop < last)
            yield from pairwise([first, *inner, last])

    async def _publish(
        self,
        context: Context,
        chunk: Chunk,
        saved_s: float = 0.0,
        wait_s: float = 0.0,
        stored_quality: Quality | None = None,
    ) -> bool:
        """A chunk that the model has just read, unless it builds on losses. False if the publisher
        has had no room for it all the time."""
        source, until_s = ContextSource(context), self.clock() + wait_s

        def offered() -> Admission:
            return self.session.publish(
                chunk, source, exact_until=context.exact_until, saved_s=saved_s,
                stored_quality=stored_quality,
            )  # fmt: skip

        with self.session.publisher.waited_for():
            while offered() is Admission.FULL:
                if self.clock() >= until_s:
                    return False
                await asyncio.sleep(WAIT_S)
        return True

    async def publish_end(self, context: Context, *, tail: bool = False) -> None:
        """The chunk that has just become whole, before any layer drops a part of it; or, when
        nothing more will come, the rest of the context."""
        context.check()
        count = context.num_tokens
        most = self.engine.spec.max_tokens or count
        if context.exact_until is not None or not 0 < count <= most:
            return
        chunks: list[Chunk] = []
        if tail or count % CHUNK_TOKENS == 0:
            chunks = cut(context.tokens[:count], await self.engine.names())
            if not tail:
                await self._publish(context, chunks[-1])
            elif chunks and chunks[-1].num_tokens < CHUNK_TOKENS:
                values = ContextSource(context).read(chunks[-1])
                self.publish_given(chunks[-1:], values, None)
        if self.resuming is not None and not tail:
            await self.resuming.note(context, chunks)
        elif self.resuming is not None and chunks:
            await self.resuming.publish_last(context, chunks[-1])

    def turn_pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Of a prompt, to read at a time."""
        return (pieces if self.resuming is None else self.resuming.pieces)(start, end)

    def publish_given(
        self, chunks: Sequence[Chunk], values: KVCache, exact_until: int | None
    ) -> int:
        """Those of `chunks` that `values` holds: how many are on their way."""
        source = Values(values)
        with model_stream(values.keys.device):
            said = [
                self.session.publish(chunk, source, exact_until=exact_until)
                for chunk in chunks
                if chunk.end <= values.end and self._holds(values, chunk)
            ]
        return said.count(Admission.QUEUED)

    def _holds(self, values: KVCache, chunk: Chunk) -> bool:
        """Whether a continuation from the chunk's end would find all it needs."""
        for first, window in zip(values.valid_from, self.session.spec.windows, strict=True):
            needed = chunk.start if window is None else max(chunk.start, chunk.end - (window - 1))
            if first > needed:
                return False
        return True
