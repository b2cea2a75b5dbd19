"""The longest beginning of a context that somebody knows, found with one lookup.

Besides its full chunks a context may be known up to a tail, where some shorter prompt ended that
this one goes on from. Which tail that is shows only when the full chunks are known; so all that it
could be are asked for at once, unless the context is very long. Verified headers are kept: whoever
delivers what is known here asks nobody again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from kdn.cache.keys import CHUNK_TOKENS, TAIL_MULTIPLE, Chunk, Namespace, TokenIds, cut, tails
from kdn.cache.windows import Windows, needed_from
from kdn.codec.base import Codec
from kdn.codec.header import StreamInfo
from kdn.delivery.assemble import Assembly
from kdn.delivery.endpoints import Endpoints
from kdn.delivery.lookup import Incoming, Question, Stream, Streams, look_up, verified_head
from kdn.errors import KdnError

MAX_KEYS = 512
"""Of one lookup: beyond 8,000 tokens, tails are asked for at the end only, and again where the
known chunks end if that is before. A key costs 90 bytes on the wire."""
TAILS = CHUNK_TOKENS // TAIL_MULTIPLE - 1
"""That may follow a chunk."""


@dataclass(frozen=True)
class Known:
    chunks: tuple[Chunk, ...] = ()
    """From the context's first token on."""
    streams: Streams = field(default_factory=dict, repr=False)
    """Those of the chunks that were looked up, not found on this host."""
    is_late: bool = False
    """Nobody answered in time: more may be known."""
    _packed: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)

    @property
    def end(self) -> int:
        return self.chunks[-1].end if self.chunks else 0

    def only(self, chunks: Iterable[Chunk]) -> Known:
        """What is known of these alone."""
        keys = {chunk.key for chunk in chunks}
        mine = tuple(chunk for chunk in self.chunks if chunk.key in keys)
        streams = {key: stream for key, stream in self.streams.items() if key in keys}
        return replace(self, chunks=mine, streams=streams)

    def incoming(self, chunks: Sequence[Chunk], windows: Windows = ()) -> list[Incoming]:
        """The first of these chunks, as far as their streams are known. Of the model's layers with
        `windows`, only what is read by whoever goes on from their end is wanted."""
        streams = [self.streams.get(chunk.key) for chunk in chunks]
        known = list(zip(chunks, takewhile(lambda one: one is not None, streams), strict=False))
        whole_from = needed_from(windows, known[-1][0].end) if known else 0
        return [
            Incoming.of(number, chunk, stream, windowed=chunk.end > whole_from)
            for number, (chunk, stream) in enumerate(known)
            if stream is not None
        ]

    def are_found(self, chunks: Iterable[Chunk]) -> bool:
        """Whether nobody need be asked for them: their streams are here, or nobody has them."""
        mine = {chunk.key for chunk in self.chunks}
        return all(chunk.key in self.streams or chunk.key not in mine for chunk in chunks)

    def size_bytes(self, levels: int) -> int:
        """Of the first levels of all streams, headers included."""
        streams = filter(None, self.streams.values())
        every = [stream.assembly for stream in streams]
        return sum(one.level_ends[min(levels, one.stored) - 1] for one in every)

    def heads(self, chunks: Iterable[Chunk]) -> tuple[bytes, ...]:
        """The verified headers of streams, each after the number of levels that there are (a byte),
        for another process; empty where there is none."""
        return tuple(self._head(chunk.key) for chunk in chunks)

    def _head(self, key: bytes) -> bytes:
        stream = self.streams.get(key)
        if stream is None:
            return self._packed.get(key, b"")
        return bytes([stream.assembly.stored]) + stream.assembly.head

    def packed(self) -> Known:
        """With nothing of its streams but their heads: for those who wait long with it."""
        heads = {chunk.key: self._head(chunk.key) for chunk in self.chunks}
        return Known(self.chunks, {}, self.is_late, heads)

    @classmethod
    def of_heads(cls, chunks: Sequence[Chunk], heads: Sequence[bytes], codec: Codec) -> Known:
        """From another process. Heads are verified again: one that is not right is not known."""
        streams: Streams = {}
        for chunk, head in zip(chunks, heads, strict=True):
            try:
                if head:
                    header = verified_head(head[1:], chunk, codec)
                    stored = min(max(head[0], 1), header.info.num_levels)
                    streams[chunk.key] = Stream(Assembly(header, head[1:], stored=stored))
            except KdnError:
                continue
        return cls(tuple(chunks), streams)


@dataclass(frozen=True)
class Wish:
    """What of a context is of use to its reader."""

    tokens: TokenIds
    namespace: Namespace
    block_tokens: int = 1
    """A tail that adds no whole block, the last token left aside, is not asked for."""
    takes: Callable[[StreamInfo], bool] = lambda info: True
    """Which streams it can use."""
    is_held: Callable[[Chunk], bool] = lambda chunk: False
    """What need not be asked for."""
    reads_tails: bool = False
    """Whether its model reads a tail sooner than places would answer: then nobody is asked where
    all full chunks are held."""

    def tails(self, after: Chunk | None) -> list[Chunk]:
        """The longest first."""
        blocks = (after.end if after else 0) // self.block_tokens
        return [
            tail
            for tail in tails(self.tokens, self.namespace, after)
            if min(tail.end, len(self.tokens) - 1) // self.block_tokens > blocks
        ]


async def longest_known(
    wish: Wish, question: Question, endpoints: Endpoints, until_s: float
) -> Known:
    """`question` tells codec and clock; what to ask for follows from the wish. After `until_s`
    nobody is asked, and only what is held is known."""
    every = cut(wish.tokens, wish.namespace)
    full = [chunk for chunk in every if chunk.num_tokens == CHUNK_TOKENS]
    held = list(takewhile(wish.is_held, full))
    search = _Search(wish, question, endpoints, until_s)
    rest = full[len(held) :]
    if wish.reads_tails and held and not rest:
        tail = [one for one in wish.tails(held[-1]) if wish.is_held(one)][:1]
        return Known((*held, *tail))
    first = len(held) if len(rest) + TAILS * (len(rest) + 1) <= MAX_KEYS else len(full)
    ends = [full[number - 1] if number else None for number in range(first, len(full) + 1)]
    at_ends = [wish.tails(after) for after in ends]
    if rest or not any(map(wish.is_held, at_ends[-1])):
        every_tail = [tail for some in at_ends for tail in some]
        await search.ask([*rest, *every_tail], [*rest, *at_ends[-1][:1]])
    chunks = [*held, *takewhile(search.is_usable, rest)]
    late = len(chunks) == len(held) and search.is_late
    options = wish.tails(chunks[-1] if chunks else None)
    tail = [one for one in options if wish.is_held(one)][:1]
    if not tail:
        await search.ask(options, options[:1])
        tail = [one for one in options if search.is_usable(one)][:1]
    chunks += tail
    found = {c.key: search.streams[c.key] for c in chunks if search.streams.get(c.key)}
    return Known(tuple(chunks), found, late)


class _Search:
    """What was asked so far, each key once."""

    def __init__(
        self, wish: Wish, question: Question, endpoints: Endpoints, until_s: float
    ) -> None:
        self.streams: Streams = {}
        self.is_late = False
        self._wish, self._question, self._endpoints = wish, question, endpoints
        self._until_s = until_s

    async def ask(self, chunks: Sequence[Chunk], best: Sequence[Chunk]) -> None:
        new = [chunk for chunk in chunks if chunk.key not in self.streams]
        if new and self._question.clock() < self._until_s:
            question = replace(self._question, chunks=new, best=best)
            self.streams |= await look_up(question, self._endpoints, self._until_s)
            self.is_late = self._question.clock() >= self._until_s

    def is_usable(self, chunk: Chunk) -> bool:
        stream = self.streams.get(chunk.key)
        return stream is not None and self._wish.takes(stream.assembly.header.info)
