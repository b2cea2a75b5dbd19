"""Finding and fetching states (`kdn/cache/states.py`), before the chunks that lead to them.

A state has one level and no substitute, so there is nothing to plan: it is there in time, intact
and of this model's layout, or it is a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from kdn.cache.keys import Chunk
from kdn.cache.states import State
from kdn.codec.states import StateCodec
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.lookup import Question, Stream, look_up
from kdn.errors import KdnError
from kdn.protocol.limits import SLOWEST_BYTES_S
from kdn.store.streaming import Ask

ATTEMPT_S = 60.0
"""For one endpoint, and longer for many bytes (`SLOWEST_BYTES_S`)."""
PIECE_BYTES = 16 << 20
"""Read at a time: a request has a deadline of its own."""


async def find_states(
    codec: StateCodec, chunks: Sequence[Chunk], ask: Question, endpoints: Endpoints, until_s: float
) -> dict[int, Stream]:
    """Which of these chunks have a state behind them that this model can use, by their number."""
    places = [codec.layout.chunk_of(chunk) for chunk in chunks]
    if not places:
        return {}
    question = replace(ask, chunks=places, codec=codec, best=places[-1:])
    streams = await look_up(question, endpoints, until_s)
    found = {number: streams.get(place.key) for number, place in enumerate(places)}
    fitting = {}
    for number, stream in found.items():
        if stream is not None and codec.fits(stream.assembly.header):
            fitting[number] = stream
        elif stream is not None:
            _reject(places[number], stream, endpoints, ask)
    return fitting


def _reject(place: Chunk, stream: Stream, endpoints: Endpoints, ask: Question) -> None:
    """Mark a stream as bad everywhere, so that a publisher may replace it."""
    for endpoint in endpoints:
        endpoint.reject(place.key, stream.assembly.stream_id, ask.clock())


async def fetch_state(
    codec: StateCodec,
    chunk: Chunk,
    stream: Stream,
    ask: Question,
    endpoints: Endpoints,
    until_s: float,
) -> State | None:
    """The state behind `chunk`; None if nobody brings it intact in time."""
    place, by_one = codec.layout.chunk_of(chunk), True
    for endpoint in (one for one in endpoints if one not in stream.lacking):
        longest_s = ATTEMPT_S + stream.assembly.level_ends[0] / SLOWEST_BYTES_S
        left_s = min(until_s - ask.clock(), longest_s)
        if left_s <= 0:
            break
        try:
            async with asyncio.timeout(left_s):
                await _read(place, stream, endpoint)
        except (KdnError, OSError):  # a TimeoutError is one
            by_one = False
            continue
        if stream.assembly.levels:
            break
        if by_one and stream.assembly.damages:  # all of it came from there, and it is damaged
            endpoint.reject(place.key, stream.assembly.stream_id, ask.clock())
        by_one = True  # what was damaged is forgotten
    if not stream.assembly.levels:
        return None
    try:
        return await asyncio.to_thread(codec.decode, stream.assembly.stream(1), place)
    except KdnError:
        _reject(place, stream, endpoints, ask)
        return None


async def _read(place: Chunk, stream: Stream, endpoint: Endpoint) -> None:
    """Read and verify the missing parts of the stream."""
    assembly = stream.assembly
    asks = [
        Ask(place.key, at, min(at + PIECE_BYTES, end), assembly.stream_id)
        for start, end in assembly.missing(assembly.level_ends[0])
        for at in range(start, end, PIECE_BYTES)
    ]
    for one in asks:
        async with aclosing(endpoint.store.read_spans([one])) as pieces:
            async for piece in pieces:
                if piece.data is not None:
                    assembly.add(piece.start, piece.data)
    await assembly.verify()
