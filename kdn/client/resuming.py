"""Contexts of models with recurrent layers, whose state every token changes.

Keys and values of such a model are delivered chunk by chunk as any other's. But the model can go on
only from the end of a chunk whose state is known, too: so the last such chunk is looked for first,
its state is fetched, and then the chunks up to there. What comes after it the model reads. It does
not read along while chunks load: what it would have read by then is of no use without all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kdn.cache.keys import CHUNK_TOKENS, TAIL_MULTIPLE, Chunk
from kdn.cache.states import State
from kdn.cache.tensors import KVCache
from kdn.delivery.known import Known
from kdn.delivery.lookup import Stream
from kdn.delivery.publish import Admission
from kdn.delivery.request import FAR_S
from kdn.engines.reading import pieces
from kdn.engines.states import state_of
from kdn.session.delivered import Delivered
from kdn.session.states import States

if TYPE_CHECKING:
    from kdn.client.answers import Stats
    from kdn.client.contexts import Contexts, Options
    from kdn.client.engine import Context
    from kdn.engines.growing import Room

FIND_S = 5.0
"""For the lookup of states: where nobody answers by then, the model reads."""
TRIES = 3
"""States that are fetched in vain before the model reads everything."""
GRACE_S = 1.0
"""After a deadline, for an earlier state where chunks are missing: reading all takes longer."""
WAIT_S = 0.05


@dataclass(frozen=True)
class Resumed:
    """Where a model can go on from."""

    cache: KVCache
    state: State
    delivered: Delivered
    room: Room | None
    is_whole: bool
    """Whether all chunks came that were asked for."""


@dataclass(frozen=True)
class Resuming:
    contexts: Contexts
    states: States

    async def resume(
        self, chunks: Sequence[Chunk], options: Options, known: Known | None = None, *, into: bool
    ) -> Resumed | None:
        """From the last of these chunks that has a state, as good as asked for, by the deadline.
        `into`: in memory that the model goes on in."""
        contexts, clock = self.contexts, self.contexts.clock
        deadline_s = contexts.deadline_s if options.deadline_s is None else options.deadline_s
        until_s = clock() + (FAR_S if deadline_s is None else deadline_s)
        found = await self.states.find(chunks, min(until_s, clock() + FIND_S))
        number, state = await self._last(chunks, found, len(chunks), until_s)
        left_s = until_s - clock()
        if state is None or left_s <= 0:
            return None
        some, told = chunks[: number + 1], known.only(chunks[: number + 1]) if known else None
        room = contexts.engine.room_for(some[-1].end) if into else None
        options = replace(options, deadline_s=left_s)
        got, landing = await contexts.deliver(some, options, told, room)
        ready = landing.num_ready(got)
        if ready < len(some):
            state = None
            if not landing.spec.has_windows:  # else layers lack what an earlier end would need
                until_s = max(until_s, clock() + GRACE_S)
                number, state = await self._last(chunks, found, ready, until_s)
            if state is None:
                contexts.engine.rooms.give(room)
                return None
        part = landing.until(chunks[number].end)
        return Resumed(part, state, got, room, ready == len(some))

    async def _last(
        self, chunks: Sequence[Chunk], found: dict[int, Stream], end: int, until_s: float
    ) -> tuple[int, State | None]:
        """The last state among the first `end` chunks that can be had."""
        for number in sorted((n for n in found if n < end), reverse=True)[:TRIES]:
            state = await self.states.fetch(chunks[number], found.pop(number), until_s)
            if state is not None:
                return number, state
        return 0, None

    async def load(
        self, tokens: Sequence[int], chunks: Sequence[Chunk], options: Options, stats: Stats
    ) -> Context:
        """See `Contexts.load`."""
        contexts, engine = self.contexts, self.contexts.engine
        found = await self.resume(chunks, options, into=True)
        if found is None:
            context = engine.new_context()
        else:
            context = self._context_of(found, tokens)
            got = context.delivered = found.delivered
            # What comes finer later is meant for chunks that the model may have read itself.
            context.is_mended = not found.is_whole
            stats.note(got, contexts.speeds)
        stats.known_tokens = context.num_tokens
        rest = [chunk for chunk in chunks if chunk.end > context.num_tokens]
        if rest:
            await contexts.read(context, tokens, rest)
        stats.computed_tokens = context.num_tokens - stats.known_tokens
        return context

    async def exact(self, known: Known, tokens: Sequence[int]) -> Context:
        """See `Contexts.exact`."""
        from kdn.client.contexts import Options

        if known.chunks:
            options = Options(quality="exact", deadline_s=FAR_S)
            found = await self.resume(known.chunks, options, known, into=False)
            if found is not None and found.is_whole and found.delivered.exact_until is None:
                return self._context_of(found, tokens)
        return self.contexts.engine.new_context()

    def _context_of(self, found: Resumed, tokens: Sequence[int]) -> Context:
        engine = self.contexts.engine
        return engine.context_of(found.cache, tokens, found.room, found.state)

    # publishing

    def keys_of(self, chunks: Sequence[Chunk]) -> list[bytes]:
        """Of the states that are stored after these."""
        return [self.states.key_of(chunk) for chunk in self.states.wanted(chunks)]

    async def publish_seen(
        self, context: Context, chunks: Sequence[Chunk], saved_s: float, wait_s: float
    ) -> bool:
        """The state that the model has now, if it is one to store of these chunks. False if there
        has been no room for it all the time."""
        published = True
        for chunk in self.states.wanted(chunks):
            if chunk.end == context.num_tokens:
                context.check()
                state = await self.contexts.engine.run(state_of, context.past)
                published &= await self.publish(context, chunk, state, saved_s, wait_s)
        return published

    async def publish(
        self, context: Context, chunk: Chunk, state: State, saved_s: float, wait_s: float
    ) -> bool:
        until_s = self.contexts.clock() + wait_s
        packed = await self.states.packed(chunk, state)

        def offered() -> Admission:
            return self.states.publish(packed, exact_until=context.exact_until, saved_s=saved_s)

        with self.states.session.publisher.waited_for():
            while offered() is Admission.FULL:
                if self.contexts.clock() >= until_s:
                    return False
                await asyncio.sleep(WAIT_S)
        return True

    async def publish_given(
        self, chunks: Sequence[Chunk], end: int, state: State, exact_until: int | None
    ) -> None:
        """The state of somebody else's cache of so many tokens, if a chunk ends there."""
        for chunk in chunks:
            if chunk.end == end:
                packed = await self.states.packed(chunk, state)
                self.states.publish(packed, exact_until=exact_until)

    # turns of a conversation, which may end anywhere

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """To read at a time: also up to the last place where a tail may end."""
        border = max(start, end - end % TAIL_MULTIPLE)
        yield from pieces(start, border)
        yield from pieces(border, end)

    async def note(self, context: Context, chunks: Sequence[Chunk]) -> None:
        """After each piece and each token: keep the state where a tail could end, and publish it
        where one is to be stored."""
        count = context.num_tokens
        if count % TAIL_MULTIPLE == 0:
            state = await self.contexts.engine.run(state_of, context.past)
            context.snapshot = count, state
            if chunks and count % (self.states.spacing * CHUNK_TOKENS) == 0:
                await self.publish(context, chunks[-1], state, 0.0, 0.0)

    async def publish_last(self, context: Context, chunk: Chunk) -> None:
        """That of the end, when nothing more will come."""
        if context.snapshot is not None and context.snapshot[0] == chunk.end:
            await self.publish(context, chunk, context.snapshot[1], 0.0, 0.0)
