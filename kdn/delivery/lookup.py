"""Which chunks are known, where, and how large their levels are: one batch request per endpoint.

Local endpoints are asked first. The others are asked at the same time, each again and again until
it answers; once one has answered, the rest have a little longer, and those that say nothing may
still serve bytes later. Headers are verified here, seals included: a stream that is not what it
should be counts as not known, and its endpoint remembers it as one to be replaced. A place may have
only the first levels of a stream, as its size tells. If these are not what is asked for, it counts
as not known, too: whoever computes the chunk anew may put a longer stream in its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Protocol

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.codec.format import Bitstream
from kdn.codec.header import STREAM_ID_BYTES, CodecId, Header, header_size
from kdn.delivery.assemble import Assembly
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.errors import (
    ChecksumError,
    FormatError,
    KdnError,
    MismatchError,
    RefusedError,
    TruncatedError,
)
from kdn.store.base import Entry, Store
from kdn.store.streaming import Ask, Collected
from kdn.tracing import span

logger = logging.getLogger(__name__)

HEAD_BYTES = 1280
"""Enough for the header of most streams; the rest of a longer one costs another round trip."""
MAX_LONG_BYTES = 8 << 20
"""Limit for the rest of all longer headers of one lookup together."""
KEPT_HEADER_BYTES = 8192
"""Longer headers, which no codec here makes, are parsed each time."""
KEPT_HEADERS = 2048
"""Headers of recently found streams that stay in memory: some 10 MB."""
AT_ONCE = 16
"""Headers that are verified before others get their turn: half a millisecond."""
ATTEMPT_S = 1.0
GRACE_S = 0.25


@dataclass
class Incoming:
    """A chunk that is known, and what there is of it by now."""

    number: int
    chunk: Chunk
    assembly: Assembly
    lacking: set[Endpoint] = field(default_factory=set)
    """Endpoints known not to have this stream."""
    alone: bool = False
    """It is to come from one endpoint: a mix from several did not verify."""
    restarts: int = 0
    """How often another stream took the place of the one that was begun."""
    lost: bool = False
    """No more bytes of it will come."""
    undecodable: bool = False
    """It did not decode."""
    spoilt: bool = False
    """The stream itself is bad: no reader can decode it."""
    decoded: int = 0
    """Levels of it in the cache, all of stream `decoded_id`."""
    decoded_id: bytes = b""
    computed: bool = False
    windowed: bool = True
    """Whether its layers with a window are wanted."""
    at: Endpoint | None = None
    """Who offered it; None: another process asked."""
    brought: dict[Endpoint, int] = field(default_factory=dict)
    """Bytes of it beyond what the lookup brought, by who brought them."""

    @classmethod
    def of(cls, number: int, chunk: Chunk, stream: Stream, *, windowed: bool = True) -> Incoming:
        """As a lookup found it."""
        lacking = set(stream.lacking)
        wanted = _wanted(stream, windowed)
        return cls(number, chunk, wanted, lacking, windowed=windowed, at=stream.at)

    def restart(self, stream: Stream) -> None:
        """Begin again with another stream; what was decoded stays as it is."""
        self.assembly, self.lacking = _wanted(stream, self.windowed), set(stream.lacking)
        self.restarts, self.at = self.restarts + 1, stream.at

    def bring(self, endpoint: Endpoint, num_bytes: int) -> None:
        self.brought[endpoint] = self.brought.get(endpoint, 0) + num_bytes


class Coding(Protocol):
    """What a lookup has to know of a codec."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def profile_id(self) -> bytes: ...
    @property
    def codec_id(self) -> CodecId: ...
    @property
    def num_levels(self) -> int: ...
    @property
    def windowed_from(self) -> int | None: ...


@dataclass(frozen=True)
class Question:
    chunks: Sequence[Chunk]
    codec: Coding
    clock: Callable[[], float]
    rng: Random
    head_bytes: int = HEAD_BYTES
    levels: int = 1
    """A stream with fewer is of no use."""
    best: Sequence[Chunk] | None = None
    """If all of these are known, there is nothing better to be found; None: all chunks."""

    def is_answered(self, answers: Answers) -> bool:
        wanted = {chunk.key for chunk in (self.chunks if self.best is None else self.best)}
        numbers = [i for i, chunk in enumerate(self.chunks) if chunk.key in wanted]
        return all(any(answer[i] is not None for answer in answers.values()) for i in numbers)


@dataclass(frozen=True)
class Stream:
    """The stream of a chunk, as far as it came, and who is known not to have it."""

    assembly: Assembly
    lacking: frozenset[Endpoint] = frozenset()
    at: Endpoint | None = None
    """Who offered it; None: another process asked."""


def _wanted(stream: Stream, windowed: bool) -> Assembly:
    has_parts = stream.assembly.header.info.windowed_from is not None
    return stream.assembly if windowed or not has_parts else stream.assembly.without_windowed()


Answers = dict[Endpoint, list[Assembly | None]]
Streams = dict[bytes, Stream | None]
"""By a chunk's key. None: asked for, and nobody has it."""


async def look_up(question: Question, endpoints: Endpoints, until_s: float) -> Streams:
    """What the endpoints together know. Local ones are asked first, and the others only if these
    do not know all."""
    answers: Answers = {}
    with span("kdn.lookup", chunks=len(question.chunks)) as traced:
        await _ask_all(question, endpoints.local, until_s, answers)
        if not question.is_answered(answers):
            await _ask_all(question, endpoints.remote, until_s, answers)
        streams = _adopted(question, endpoints, answers)
        traced.set(known=sum(one is not None for one in streams.values()))
    return streams


async def look_again(question: Question, endpoints: Endpoints, until_s: float) -> Streams:
    """What every endpoint that answers in time has now."""
    answers: Answers = {}
    await _ask_all(question, list(endpoints), until_s, answers)
    return _adopted(question, endpoints, answers)


def _adopted(question: Question, endpoints: Endpoints, answers: Answers) -> Streams:
    """For each chunk, the stream that the first endpoint offers. Others have it if they have as
    many levels of it."""
    streams: Streams = {}
    for number, chunk in enumerate(question.chunks):
        offers = {e: answers[e][number] for e in endpoints if e in answers}
        at = next((endpoint for endpoint, offer in offers.items() if offer is not None), None)
        streams[chunk.key] = None
        if at is not None and (chosen := offers[at]) is not None:
            others = (e for e, offer in offers.items() if not _is_as_good(offer, chosen))
            streams[chunk.key] = Stream(chosen, frozenset(others), at)
    return streams


def _is_as_good(offer: Assembly | None, chosen: Assembly) -> bool:
    same = offer is not None and offer.stream_id == chosen.stream_id
    return same and offer is not None and offer.stored >= chosen.stored


async def _ask_all(
    question: Question, endpoints: list[Endpoint], until_s: float, answers: Answers
) -> None:
    clock, began_s = question.clock, question.clock()
    tasks = {asyncio.create_task(_persist(question, e)): e for e in endpoints}
    pending = set(tasks)
    try:
        while pending and clock() < until_s:
            done, pending = await asyncio.wait(
                pending, timeout=until_s - clock(), return_when=asyncio.FIRST_COMPLETED
            )
            answers |= {tasks[task]: task.result() for task in done}
            if question.is_answered(answers):
                break
            now_s = clock()
            if done:
                until_s = min(until_s, now_s + max(GRACE_S, now_s - began_s))
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _persist(question: Question, endpoint: Endpoint) -> list[Assembly | None]:
    """Ask until there is an answer, which may be a refusal. The caller limits the time."""
    attempt_s = ATTEMPT_S
    while True:
        await asyncio.sleep(max(0.0, endpoint.rest.until_s - question.clock()))
        began_s = question.clock()
        try:
            async with asyncio.timeout(attempt_s):
                answer = await ask(question, endpoint)
        except RefusedError as error:
            if endpoint.refusal != str(error):
                endpoint.refusal = str(error)
                logger.warning("nothing is known from %s: %s", endpoint.name, error)
            return [None] * len(question.chunks)
        except (KdnError, OSError):
            endpoint.rest.failed(began_s, question.clock(), question.rng)
            attempt_s *= 2
        else:
            endpoint.rest.worked()
            return answer


async def ask(question: Question, endpoint: Endpoint) -> list[Assembly | None]:
    """What one endpoint has of these chunks, each verified as far as it came. Asked once."""
    store = endpoint.store
    keys = [chunk.key for chunk in question.chunks]
    entries = await store.lookup(keys, head_bytes=question.head_bytes)
    entries = await _with_whole_headers(store, entries)
    answer = []
    for number, (entry, chunk) in enumerate(zip(entries, question.chunks, strict=True)):
        if number % AT_ONCE == 0 or (entry is not None and len(entry.head) > KEPT_HEADER_BYTES):
            await asyncio.sleep(0)  # large headers take time, and others have deadlines
        assembly = _begun(entry, chunk, question, endpoint)
        if assembly is not None:
            await assembly.verify()
        answer.append(assembly)
    return answer


def _begun(
    entry: Entry | None, chunk: Chunk, question: Question, endpoint: Endpoint
) -> Assembly | None:
    """The beginning of this chunk's stream; None if it is none that can be used."""
    now_s = question.clock()
    if entry is None or endpoint.is_rejected(entry.key, entry.etag, now_s):
        return None
    try:
        found = _begin(entry, chunk, question.codec)
        if found.stored >= question.levels:
            return found
        endpoint.note_short(entry.key, entry.etag, entry.size_bytes)
        return None
    except (ChecksumError, TruncatedError):
        return None  # damaged on its way, or lost meanwhile: that says nothing of the stream
    except KdnError:
        endpoint.reject(entry.key, entry.etag, now_s)
        return None


async def _with_whole_headers(store: Store, entries: Sequence[Entry | None]) -> list[Entry | None]:
    """Fetch the rest of the headers that are longer than what a lookup brought, up to a bound: a
    place says itself how long they are."""
    whole = list(entries)
    asks: list[Ask] = []
    places: list[int] = []
    room_bytes = MAX_LONG_BYTES
    for place, entry in enumerate(entries):
        end = _header_bytes(entry)
        if entry is not None and len(entry.head) < end <= room_bytes:
            asks.append(Ask(entry.key, len(entry.head), end, entry.etag))
            places.append(place)
            room_bytes -= end
    if asks:
        rests = Collected(len(asks))
        await store.read_into(asks, rests)
        for place, rest in zip(places, rests.found, strict=True):
            entry = whole[place]
            if entry is not None:
                whole[place] = replace(entry, head=entry.head + rest)
    return whole


def _header_bytes(entry: Entry | None) -> int:
    """0 where there is no header to be had."""
    try:
        return 0 if entry is None else header_size(entry.head)
    except FormatError:
        return 0


def _begin(entry: Entry, chunk: Chunk, codec: Coding) -> Assembly:
    """Only a stream that has its own etag is blamed for what is wrong with it."""
    size = header_size(entry.head)
    if entry.head[size - STREAM_ID_BYTES : size] != entry.etag:
        raise ChecksumError("the store's entry is not of this stream")
    header = verified_head(entry.head, chunk, codec)
    return Assembly(header, entry.head, stored=stored_levels(header, entry.size_bytes))


def stored_levels(header: Header, size_bytes: int) -> int:
    """How many levels of a stream a place has that keeps so many bytes of it. ChecksumError if it
    is not cut where a level ends: then these are not bytes of this stream."""
    if size_bytes not in header.level_ends:
        raise ChecksumError("the store's entry is not of this stream")
    return sum(end <= size_bytes for end in header.level_ends)


def verified_head(head: bytes, chunk: Chunk, codec: Coding) -> Header:
    """The header that a stream begins with, if it is one of this chunk that this codec can decode.
    The seal comes first: of what others wrote, nothing else is read."""
    own = head[: header_size(head)]
    parse = _parsed if len(own) <= KEPT_HEADER_BYTES else Header.parse
    header = parse(own, chunk.seal_key)
    stream = Bitstream(header, {})
    stream.check_for(chunk, codec.spec, codec.profile_id, codec.codec_id, codec.windowed_from)
    if header.info.num_levels != codec.num_levels:
        raise MismatchError(f"expected {codec.num_levels} levels, found {header.info.num_levels}")
    return header


@lru_cache(KEPT_HEADERS)
def _parsed(head: bytes, seal_key: bytes) -> Header:
    """The same streams are looked up again and again, and what was looked up is handed over."""
    return Header.parse(head, seal_key)


def reject_spoilt(known: Sequence[Incoming], endpoints: Endpoints, now_s: float) -> None:
    """Streams that do not decode are misses from now on, and to be replaced."""
    for one in known:
        for endpoint in endpoints:
            if one.spoilt and endpoint not in one.lacking:
                endpoint.reject(one.chunk.key, one.assembly.stream_id, now_s)


async def read_local(known: Sequence[Incoming], endpoints: Endpoints, levels: int) -> None:
    """Bring what local endpoints have of the first `levels` levels: it costs no time on the link,
    so no plan is needed for it."""
    for endpoint in endpoints.local:
        here = [one for one in known if endpoint not in one.lacking]
        asks = [
            Ask(one.chunk.key, start, end, one.assembly.stream_id)
            for one in here
            for start, end in one.assembly.missing(
                one.assembly.level_ends[min(levels, one.assembly.stored) - 1]
            )
        ]
        by_key = {one.chunk.key: one for one in here}
        try:
            async with aclosing(endpoint.store.read_spans(asks)) as pieces:
                async for piece in pieces:
                    one = by_key[asks[piece.number].key]
                    if piece.data is None:
                        one.lacking.add(endpoint)
                    else:
                        one.bring(endpoint, one.assembly.add(piece.start, piece.data))
            await asyncio.gather(*(one.assembly.verify() for one in here))
        except (KdnError, OSError):
            for one in here:
                one.lacking.add(endpoint)
