"""One fetch for all ranks of a host: the first of them fetches, the others decode what it got.

Each rank decodes its own heads. The first hands every stream on (`rank_streams.py`) in the moment
in which it decodes it itself; so all ranks have the same levels of each chunk. What the host's
shared memory holds, each rank takes from there. If the first has died or cannot go on, each fetches
for itself; if it is merely late, the others wait for it until their deadline and no longer. What
one rank lacks then is missing, whatever the others have: vLLM puts their reports together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kdn.background import outwait, watched
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.format import Bitstream
from kdn.codec.header import header_size
from kdn.delivery.lookup import verified_head
from kdn.delivery.sink import Arrival, Sink
from kdn.engines.vllm.rank_folder import RankFolder
from kdn.engines.vllm.rank_streams import Record, State, StreamsIn, StreamsOut
from kdn.errors import FormatError, KdnError
from kdn.session.delivered import Delivered, Grade
from kdn.session.session import Session

logger = logging.getLogger(__name__)

POLL_S = 0.002
LOOK_S = 0.05
"""So often a rank looks whether the first still lives."""
GRACE_S = 0.5
"""After its deadline: the first, which has the same, needs a moment to say that it is done."""
FORGET_S = 10.0
"""After a load, for others to begin to read what the first got."""


class OneFetch:
    """Its methods belong to the session's event loop."""

    def __init__(
        self, session: Session, folder: RankFolder, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session, self._folder, self._clock = session, folder, clock
        self._thread = ThreadPoolExecutor(1, "kdn-rank-streams")

    async def deliver(
        self, number: int, chunks: Sequence[Chunk], sink: Sink, *, deadline_s: float, **asked: Any
    ) -> Delivered:
        """What `Session.deliver` does, for the load of this number on this rank."""
        ranks = self._folder.alive()
        others = [rank for rank in ranks if rank != self._folder.rank]
        if others and self._folder.rank == ranks[0]:
            return await self._lead(number, others, chunks, sink, deadline_s, asked)
        if others:
            follower = _Follower(self, StreamsIn(self._folder, number), chunks, sink, asked)
            return await follower.run(ranks[0], self._clock() + deadline_s)
        return await self._session.deliver(chunks, sink, deadline_s=deadline_s, **asked)

    async def _lead(
        self,
        number: int,
        others: Sequence[int],
        chunks: Sequence[Chunk],
        sink: Sink,
        deadline_s: float,
        asked: dict[str, Any],
    ) -> Delivered:
        out = StreamsOut(self._folder, number, others)
        numbers = {chunk.key: at for at, chunk in enumerate(chunks)}

        def hand_on(batch: Sequence[Arrival]) -> None:
            for one in batch:
                if one.stream.is_in_memory:  # else the host's holds it, for all ranks
                    out.put(numbers[one.chunk.key], one.levels, one.stream.parts(one.levels))

        try:
            shared = _SharedSink(sink, lambda batch: self._later(hand_on, batch))
            return await self._session.deliver(chunks, shared, deadline_s=deadline_s, **asked)
        finally:
            self._later(out.end)
            loop = asyncio.get_running_loop()
            loop.call_later(deadline_s + FORGET_S, lambda: self._later(out.forget))

    def _later(self, work: Callable[..., None], *given: Any) -> None:
        """In order, by a thread of its own: nobody waits for it."""
        try:
            done = self._thread.submit(work, *given)
        except RuntimeError:  # it is closed
            return
        done.add_done_callback(watched("handing streams to other ranks"))

    def close(self) -> None:
        self._thread.shutdown()


class _SharedSink:
    """The first rank's own sink, and all that goes into it to be decoded is handed on."""

    def __init__(self, sink: Sink, hand_on: Callable[[Sequence[Arrival]], None]) -> None:
        self._sink, self._hand_on = sink, hand_on

    @property
    def batch_chunks(self) -> int:
        return self._sink.batch_chunks

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        self._hand_on(batch)
        return self._sink.decode(batch)

    def write(self, chunk: Chunk, values: KVCache) -> None:
        self._sink.write(chunk, values)


class _Follower:
    """A load on a rank that another one fetches for."""

    def __init__(
        self,
        own: OneFetch,
        streams: StreamsIn,
        chunks: Sequence[Chunk],
        sink: Sink,
        asked: dict[str, Any],
    ) -> None:
        self._session, self._folder, self._clock = own._session, own._folder, own._clock
        self._streams, self._chunks, self._sink, self._asked = streams, chunks, sink, asked
        self._levels = [0] * len(chunks)
        self._looked_s = 0.0

    async def run(self, first: int, until_s: float) -> Delivered:
        held = await self._held(())
        try:
            is_left = len(held.held) < len(self._chunks) and await self._follow(
                first, until_s, len(held.held)
            )
        finally:
            self._streams.close()
        got = await self._held(held.held)
        if not is_left:
            return got
        logger.warning("rank %d fetches for itself: rank %d does not", self._folder.rank, first)
        return await self._deliver_rest(got.held, max(0.0, until_s - self._clock()))

    async def _held(self, before: tuple[Grade, ...]) -> Delivered:
        """As far as chunks came, or are in the host's memory: there may be more than there were
        when this began, which the first rank took from there."""
        while True:
            before = (*before, *self._grades(len(before)))
            got = await self._deliver_rest(before, 0.0)
            if len(got.held) == len(before):
                return got
            before = got.held

    async def _deliver_rest(self, before: tuple[Grade, ...], deadline_s: float) -> Delivered:
        """By this rank itself; with no time, only what this host holds."""
        rest = self._chunks[len(before) :]
        kld = self._session.codec.expected_kld
        if not rest:
            return Delivered(tuple(self._chunks), before, None, kld)
        got = await self._session.deliver(rest, self._sink, deadline_s=deadline_s, **self._asked)
        return Delivered(tuple(self._chunks), (*before, *got.held), got.result, kld)

    def _grades(self, first: int) -> list[Grade]:
        """Of chunks from `first` on, as far as they came without a gap."""
        kld, found = self._session.codec.expected_kld, []
        for levels in self._levels[first:]:
            if not levels:
                break
            found.append(Grade.of_levels(levels, kld))
        return found

    async def _follow(self, first: int, until_s: float, num_held: int) -> bool:
        """Decode what the first rank hands on, until it is done; True if it does not go on."""
        most, streams = self._sink.batch_chunks, self._streams
        while self._clock() < until_s + GRACE_S:
            try:
                # Asked first: it may say its last word, and end, between two looks.
                lives = self._lives(first)
                records = await self._read(most) if streams.has_more() else []
            except (OSError, FormatError) as error:
                logger.warning("streams from rank %d cannot be read: %s", first, error)
                return True
            await self._decode([one for one in records if one.number >= num_held])
            if streams.state is State.ENDED:
                return False
            if streams.state is State.LEFT or not (records or lives):
                return True
            if not records:
                await asyncio.sleep(POLL_S)
        return False

    def _lives(self, first: int) -> bool:
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return True
        self._looked_s = now_s
        return self._folder.is_there and self._folder.is_alive(first)

    async def _read(self, most: int) -> list[Record]:
        return await asyncio.to_thread(self._streams.read, most)

    async def _decode(self, records: Sequence[Record]) -> None:
        batch: dict[int, Arrival] = {}
        for record in records:
            try:
                batch[record.number] = self._arrival(record)  # of one chunk, the last that came
            except KdnError as error:
                logger.warning("a stream from another rank: %s", error)
        if not batch:
            return
        # A thread cannot be stopped: its memory is not the caller's before it has ended.
        decoding = asyncio.ensure_future(asyncio.to_thread(self._sink.decode, [*batch.values()]))
        await outwait(decoding)
        for number, failure in zip(batch, decoding.result(), strict=True):
            if failure is None:
                self._levels[number] = batch[number].levels
            else:
                logger.warning("chunk %d from another rank: %s", number, failure)

    def _arrival(self, record: Record) -> Arrival:
        if record.number >= len(self._chunks):
            raise FormatError(f"expected one of {len(self._chunks)} chunks, found {record.number}")
        chunk = self._chunks[record.number]
        stream = stream_of(record, chunk, self._session.codec)
        return Arrival(chunk, stream, record.levels, self._levels[record.number] > 0)


def stream_of(record: Record, chunk: Chunk, codec: Codec) -> Bitstream:
    """What another rank has verified, level by level; its checksum was just seen to be right."""
    data = record.data.data
    header = verified_head(bytes(data[: header_size(data)]), chunk, codec)
    ends = header.level_ends
    if not 1 <= record.levels <= len(ends) or len(data) != ends[record.levels - 1]:
        raise FormatError(f"{len(data)} bytes are not {record.levels} levels of a chunk")
    return Bitstream.of(header, data, verified=range(record.levels))
