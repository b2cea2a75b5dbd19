"""Several things that were learned apart, joined into one context.

The chunks of all pieces are looked up at once and delivered to their places in the join
(`kdn/delivery/join_sink.py`); they do not build on each other, so one that is missing keeps none of
the others away. What is unknown, or has not arrived by the deadline, the model reads in order,
behind what stands before it. While chunks load it may read along from the front: what it has read
there is what it would have read without a join. So a join takes hardly longer than reading its
text, whatever places and links do, and if nothing is known the text is simply read.

Nothing on top of a join is ever published: it rests on values that the model would not have
computed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kdn.blend.pieces import Join, check_joinable
from kdn.blend.seams import Seams
from kdn.blend.shares import WHOLE
from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.checked import checked_name, shown
from kdn.client.answers import Stats
from kdn.client.contexts import LEAST_S, Contexts, Options
from kdn.client.engine import Context
from kdn.client.looking import Looking, Looks
from kdn.client.naming import Named, as_piece, find_name
from kdn.codec.base import Codec
from kdn.delivery.join_sink import JoinRowsSink, JoinSink
from kdn.delivery.known import Known
from kdn.delivery.plan import Speeds
from kdn.delivery.request import FAR_S
from kdn.delivery.sink import Arrival
from kdn.engines.compute import ChunkReader
from kdn.engines.growing import Room
from kdn.engines.reading import pieces
from kdn.errors import KdnError, MismatchError, UnsupportedError
from kdn.session.delivered import Delivered
from kdn.session.quality import codec_kld_in_join
from kdn.session.seams import find_seams
from kdn.session.session import LOOKUP_S

MAX_PIECES = 1024
LOOK_SHARE = 0.1
"""Of the time that reading everything would take: so long a lookup may last."""
LOOK_S = 0.05
"""And at least so long."""
SEAMS_S = 1.0
"""Seams are found once, and may take as long as reading; at least so long."""

Flags = npt.NDArray[np.bool_]


Names = str | Sequence[str]
"""Of something learned, or of several such things to join."""


def checked_names(names: Names) -> None:
    if isinstance(names, str):
        checked_name(names)
    else:
        checked_pieces(names)


def checked_pieces(names: Sequence[str]) -> tuple[str, ...]:
    """Names of what is to be joined."""
    if (
        isinstance(names, str)
        or not isinstance(names, Sequence)
        or not 1 <= len(names) <= MAX_PIECES
    ):
        raise UnsupportedError(
            f"expected the name of something learned, or a list of 1 to {MAX_PIECES} names to "
            f"join, found {shown(names)}"
        )
    return tuple(map(checked_name, names))


@dataclass(frozen=True)
class Repairing:
    """Seams of this model, and the codec that decodes with them."""

    seams: Seams
    codec: Codec


class Joins:
    def __init__(self, contexts: Contexts, tag: str | None) -> None:
        """`tag`: which seams repair what moves; None: none do."""
        self._contexts, self._tag = contexts, tag
        self.looks = Looks(contexts)
        self._finding: asyncio.Task[Repairing | None] | None = None

    # what to join

    async def named(self, names: Sequence[str], options: Options, stats: Stats) -> tuple[Join, str]:
        """What the names point to, put one after another, and how to ask about it."""
        engine, session = self._contexts.engine, self._contexts.session
        check_joinable(engine.spec)
        once = list(dict.fromkeys(names))
        found = await asyncio.gather(
            *(
                find_name(session, name, latest=options.force_latest, stale_ok=options.stale_ok)
                for name in once
            )
        )
        stats.troubles += tuple(one.trouble for one in found if one.trouble)
        space = await engine.names()
        by_name = {one.name: as_piece(one, session, engine.prompts, space) for one in found}
        join = Join(tuple(by_name[name] for name in names))
        self.check_fits(join.num_tokens)
        return join, _style(found)

    def check_fits(self, num_tokens: int) -> None:
        self._contexts.engine.check_length(num_tokens)
        limit = getattr(self._contexts.engine.config, "max_position_embeddings", None)
        if limit is not None and num_tokens > limit:
            raise UnsupportedError(
                f"these pieces and what is asked have {num_tokens:,} tokens together: this model "
                f"reads at most {limit:,}"
            )

    # joining

    async def begin(
        self, names: Sequence[str], options: Options, stats: Stats
    ) -> tuple[Context, Join, str]:
        """What the names point to, loaded, and how to ask about it. The deadline counts from here
        on: finding out what names point to takes of it, too."""
        began_s = self._contexts.clock()
        join, style = await self.named(names, options, stats)
        left = self._contexts.left_of(options, began_s)
        return await self.load(join, left, stats), join, style

    async def load(self, join: Join, options: Options, stats: Stats) -> Context:
        """All of it, delivered and read."""
        contexts, clock = self._contexts, self._contexts.clock
        wanted_s = contexts.deadline_s if options.deadline_s is None else options.deadline_s
        until_s = clock() + (FAR_S if wanted_s is None else wanted_s)
        left_s = until_s - clock()
        enough = contexts.enough_kld(self._wish(options, left_s))
        limit_s = min(left_s, self._look_s(join))
        repairing, known = await asyncio.gather(
            self.repairing(join, left_s, stats),
            contexts.session.know_each(join.chunks, enough_kld=enough, limit_s=limit_s),
        )
        if known.is_late:
            stats.troubles += ("no place said in time what it knows of these pieces",)
        share = self._share(join, repairing, options, until_s - clock(), stats)
        used = join
        if share == WHOLE:  # the first piece is right there, and the rest is read
            used = Join(join.pieces[:1])
            known = known.only(used.chunks)
        room = contexts.engine.room_for(join.num_tokens)
        cache = self._memory(join, room)
        delivery = _Delivery(contexts, used, known, repairing, room, cache)
        left_s = until_s - clock() - self.looks.recompute_s(share, join.num_tokens)
        got, loaded, read = await delivery.run(self._wish(options, left_s))
        rest = np.zeros(join.num_tokens - used.num_tokens, bool)
        loaded, read = (np.concatenate([some, rest]) for some in (loaded, read))
        context = await self._filled(join, cache, loaded | read, room)
        context.delivered, context.joined = got, join
        if share < WHOLE:
            context.looking = self._looking(join, loaded, share, until_s)
        _count(stats, join, got, loaded, repairing is not None, contexts.speeds)
        return context

    def _share(
        self,
        join: Join,
        repairing: Repairing | None,
        options: Options,
        left_s: float,
        stats: Stats,
    ) -> float:
        """How much of it to compute anew."""
        if len(join.pieces) == 1:
            return 0.0
        expected = repairing.seams.expected if repairing else None
        return self.looks.share(join.num_tokens, expected, options, left_s, stats)

    def _wish(self, options: Options, left_s: float) -> Options:
        """Of the delivery."""
        quality = self._contexts.quality if options.quality is None else options.quality
        return replace(options, quality=codec_kld_in_join(quality), deadline_s=max(LEAST_S, left_s))

    def _looking(self, join: Join, loaded: Flags, share: float, until_s: float) -> Looking | None:
        moved = loaded.copy()
        moved[: len(join.pieces[0].tokens)] = False
        if not share or not moved.any():
            return None
        within = [(start, end) for start, end in _runs(moved) if moved[start]]
        return Looking(share, within, self.looks.reading_s(join.num_tokens), until_s)

    def _look_s(self, join: Join) -> float:
        """How long a lookup may take."""
        return min(LOOKUP_S, max(LOOK_S, LOOK_SHARE * self._reading_s(join)))

    def _reading_s(self, join: Join) -> float:
        return self.looks.reading_s(join.num_tokens) or FAR_S

    def _memory(self, join: Join, room: Room | None) -> KVCache:
        if room is not None:
            return room.canonical(join.num_tokens)
        engine = self._contexts.engine
        spec = engine.spec
        return KVCache.empty(
            spec.num_layers, join.num_tokens, spec.num_kv_heads, spec.head_dim,
            dtype=engine.model.dtype,
        )  # fmt: skip

    async def _filled(self, join: Join, cache: KVCache, ready: Flags, room: Room | None) -> Context:
        """What is there, and the model's own reading of what is not, in order."""
        engine, tokens = self._contexts.engine, join.tokens.tolist()
        context = engine.new_context(room)
        for start, end in _runs(ready):
            if not ready[start]:
                for first, last in pieces(start, end, engine.chunks_at_once):
                    await engine.read(context, tokens[first:last])
            elif start == 0:
                context = engine.context_of(cache.slice(0, end), tokens, room)
            else:
                engine.append(context, cache.slice(start, end), tokens[start:end])
        await engine.names()  # the model that read it was the one that the chunks name
        return context

    # before a question

    async def look(
        self, context: Context, prompt: Sequence[int], options: Options, stats: Stats
    ) -> None:
        """Before the rest of a prompt, the question, is read on top of a join: what it looks at is
        computed anew, and the question is read with it."""
        self.check_fits(len(prompt))
        await self.looks.look(context, [prompt[context.num_tokens :]], stats, read=True)

    # seams

    async def repairing(self, join: Join, left_s: float, stats: Stats) -> Repairing | None:
        """Seams, if there are any and they are here in time. The first join of a client waits for
        them, as long as it might read at most."""
        if self._tag is None or len(join.pieces) == 1:
            return None
        finding = self._finding
        if finding is None:
            finding = self._finding = asyncio.create_task(self._find(self._tag))
        wait_s = max(0.0, min(left_s, max(SEAMS_S, self._reading_s(join))))
        await asyncio.wait([finding], timeout=wait_s)
        if not finding.done():
            stats.troubles += ("the seams are not here yet: nothing is repaired",)
            return None
        try:
            return finding.result()
        except (KdnError, OSError) as error:
            if self._finding is finding:
                self._finding = None  # the next join tries again
            stats.troubles += (f"nothing is repaired: {error}",)
            return None

    async def _find(self, tag: str) -> Repairing | None:
        session = self._contexts.session
        seams = await find_seams(session, tag)
        if seams is None:
            return None
        return Repairing(seams, await asyncio.to_thread(session.codec.repaired, seams))

    def forget_seams(self) -> None:
        """Others were stored since."""
        self._finding = None

    async def close(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)


@dataclass(frozen=True)
class _Delivery:
    """Of what is known of a join, to its places."""

    contexts: Contexts
    join: Join
    known: Known
    repairing: Repairing | None
    room: Room | None
    cache: KVCache

    async def run(self, options: Options) -> tuple[Delivered | None, Flags, Flags]:
        """What came of it; which positions were loaded, and which the model has read by then."""
        loaded, read = (np.zeros(self.join.num_tokens, bool) for _ in range(2))
        if not self.known.chunks:
            return None, loaded, read
        segments = _segments(self.join, self.known.chunks)
        reader = None
        if self.contexts.speeds is not None and segments:
            reader = ChunkReader(self.contexts.engine.model, segments)
        try:
            got = await self._deliver(segments, reader, options)
        finally:
            if reader is not None:
                await reader.finish()
        for number, (chunk, grade) in enumerate(zip(got.chunks, got.grades, strict=True)):
            if grade is not None and grade.levels:
                for place in self.join.places[chunk.key]:
                    at = place.start(chunk)
                    loaded[at + place.skipped : at + chunk.num_tokens] = True
            elif grade is not None:
                read[segments[number].start : segments[number].end] = True
        return got, loaded, read

    async def _deliver(
        self, segments: Sequence[Chunk], reader: ChunkReader | None, options: Options
    ) -> Delivered:
        contexts, sink = self.contexts, self._sink()
        assert options.deadline_s is not None
        deadline_s = options.deadline_s
        if reader is None and contexts.speeds is not None:  # late, all is read
            reading_s = contexts.speeds.prefill_s(0, self.join.num_tokens)
            deadline_s = max(LEAST_S, min(deadline_s, reading_s))
        along = _AlongSink(sink, {one.key: one for one in segments})
        return await contexts.session.deliver(
            self.known.chunks, sink if reader is None else along, known=self.known,
            end=self.join.num_tokens, enough_kld=contexts.enough_kld(options),
            deadline_s=deadline_s, speeds=contexts.speeds, compute=reader,
            shared=contexts.engine.device.type == "cpu", on_progress=options.on_progress,
        )  # fmt: skip

    def _sink(self) -> JoinSink | JoinRowsSink:
        codec, room, found = self.contexts.session.codec, self.room, self.repairing
        repaired, seams = (found.codec, found.seams) if found else (None, None)
        if room is not None and self.contexts.engine.by_rows:
            return JoinRowsSink(
                codec, repaired, self.join, room.rows(), _slots_at, room.after, seams=seams
            )
        return JoinSink(codec, repaired, self.join, self.cache, seams=seams)


@dataclass(frozen=True)
class _AlongSink:
    """A join's sink while the model reads along: what it reads stands where it belongs."""

    sink: JoinSink | JoinRowsSink
    segments: dict[bytes, Chunk]

    @property
    def batch_chunks(self) -> int:
        return self.sink.batch_chunks

    def decode(self, batch: Sequence[Arrival]) -> list[KdnError | None]:
        return self.sink.decode(batch)

    def write(self, chunk: Chunk, values: KVCache) -> None:
        """With what stands between it and the chunk before, which nobody knows."""
        own = self.segments[chunk.key]
        self.sink.write_at(values.slice(own.start, own.end))


def _segments(join: Join, chunks: Sequence[Chunk]) -> list[Chunk]:
    """What a model reads for each of these chunks of a join, one after another and without a gap;
    nothing where a chunk stands in several places."""
    found, end = [], 0
    for chunk in chunks:
        places = join.places[chunk.key]
        if len(places) > 1:
            return []
        start, end = end, places[0].start(chunk) + chunk.num_tokens
        found.append(replace(chunk, start=start, tokens=join.tokens[start:end]))
    return found


def _slots_at(start: int, end: int) -> npt.NDArray[np.int64]:
    """Where positions lie in `Room.rows`."""
    return np.arange(start, end, dtype=np.int64)


def _runs(flags: Flags) -> Iterator[tuple[int, int]]:
    """Neighbours that are alike, [start, end)."""
    borders = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    yield from pairwise([0, *borders.tolist(), len(flags)])


def _style(found: Sequence[Named]) -> str:
    first = found[0]
    for one in found[1:]:
        if one.style != first.style:
            raise MismatchError(
                f"{one.name!r} is not asked about as {first.name!r} is: learn both as texts"
            )
    return first.style


def _count(
    stats: Stats,
    join: Join,
    got: Delivered | None,
    loaded: Flags,
    is_repaired: bool,
    speeds: Speeds | None,
) -> None:
    stats.joined_pieces = len(join.pieces)
    stats.known_tokens = int(loaded.sum())
    stats.computed_tokens = join.num_tokens - stats.known_tokens
    first = len(join.pieces[0].tokens)
    stats.moved_tokens = int(loaded[first:].sum())
    stats.repaired_tokens = stats.moved_tokens if is_repaired else 0
    if got is not None:
        stats.note(got, speeds)
