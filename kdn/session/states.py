"""The states of a session's model: which are stored, where they are found, how they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.cache.states import State, StateLayout
from kdn.codec.header import Header
from kdn.codec.states import StateCodec
from kdn.delivery.lookup import Stream, ask
from kdn.delivery.publish import Admission
from kdn.delivery.states import fetch_state, find_states
from kdn.session.delivered import may_be_published

if TYPE_CHECKING:
    from kdn.session.session import Session


@dataclass(frozen=True)
class Packed:
    """A state on its way to a place."""

    chunk: Chunk
    """After which it is the state."""
    key: bytes
    data: bytes
    stream_id: bytes


@dataclass(frozen=True)
class States:
    session: Session
    layout: StateLayout
    spacing: int
    """A state is stored after every so many chunks, and where a context ends."""

    @property
    def codec(self) -> StateCodec:
        return StateCodec(self.session.spec, self.layout)

    def key_of(self, chunk: Chunk) -> bytes:
        return self.layout.chunk_of(chunk).key

    def wanted(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those of a context's chunks that a state is stored after."""
        every, ends = self.spacing * CHUNK_TOKENS, {one.key for one in self.ends(chunks)}
        return [one for one in chunks if one.key in ends or one.end % every == 0]

    def ends(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The last ones, tails or a full one: whoever goes on from there reads nothing again."""
        tails = [one for one in chunks if one.num_tokens < CHUNK_TOKENS]
        return tails or list(chunks[-1:])

    # finding

    async def find(self, chunks: Sequence[Chunk], until_s: float) -> dict[int, Stream]:
        """Those that some place has a state after, by their number."""
        question, places = self.session.question(), self.session.places.endpoints
        return await find_states(self.codec, chunks, question, places, until_s)

    async def fetch(self, chunk: Chunk, stream: Stream, until_s: float) -> State | None:
        question, places = self.session.question(), self.session.places.endpoints
        return await fetch_state(self.codec, chunk, stream, question, places, until_s)

    async def are_home(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the place that takes what is new has the states after all of these."""
        places = [self.layout.chunk_of(chunk) for chunk in chunks]
        if not places:
            return True
        question = self.session.question(places, self.codec)
        answer = await ask(question, self.session.places.publish_to)
        return all(one is not None and self.codec.fits(one.header) for one in answer)

    # publishing

    async def packed(self, chunk: Chunk, state: State) -> Packed:
        place = self.layout.chunk_of(chunk)
        data = await asyncio.to_thread(self.codec.encode, place, state)
        return Packed(chunk, place.key, data, Header.parse(data).stream_id)

    def publish(
        self, packed: Packed, *, exact_until: int | None, saved_s: float = 0.0
    ) -> Admission:
        """See `Session.publish`."""
        if self.session.is_read_only:
            return Admission.READ_ONLY
        if not may_be_published(packed.chunk, exact_until):
            return Admission.LOSSY
        return self.session.publisher.publish_stream(
            packed.key, packed.data, packed.stream_id, parent=packed.chunk.key, saved_s=saved_s
        )
