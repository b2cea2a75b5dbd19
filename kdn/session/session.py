"""What an engine needs of a knowledge delivery network, whatever engine it is.

    async with Session(settings, spec, dtype) as session:
        known = await session.know(tokens)                        # one lookup
        got = await session.deliver(known.chunks, sink, known=known)
        ...                                                       # the model reads the rest
        session.publish(chunk, source, exact_until=got.exact_until)

A session owns the places, the codec with its profile, the namespace of its chunks, what was learnt
of the link, the publisher with its spool, and the host's shared memory. Engines bring sinks and
sources (`kdn/delivery/sink.py`, `publish.py`): where values go, and where they are read.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import takewhile
from random import Random

import torch

from kdn import tracing
from kdn.background import outwait
from kdn.cache.keys import Chunk, Namespace, Tokens, seal_key, token_ids
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.header import StreamInfo
from kdn.delivery.arena import ARENA_BYTES
from kdn.delivery.client import deliver
from kdn.delivery.estimate import Estimator, Gauge, Told
from kdn.delivery.fetch_messages import Hello
from kdn.delivery.fetcher import Fetcher
from kdn.delivery.known import Known, Wish, longest_known
from kdn.delivery.lookup import Coding, Question, Stream, Streams, ask, look_up
from kdn.delivery.plan import Speeds
from kdn.delivery.publish import Admission, Publisher, Source
from kdn.delivery.request import (
    BODY_KLD,
    FAR_S,
    Compute,
    OnProgress,
    Request,
    Result,
    enough_levels,
)
from kdn.delivery.sink import Sink
from kdn.delivery.spool import Spool
from kdn.places.places import Places, open_places
from kdn.request_log import RequestLog, default_path
from kdn.session.changes import Changes
from kdn.session.cores import usable_cores
from kdn.session.decisions import Decisions
from kdn.session.delivered import Delivered, Grade, may_be_published
from kdn.session.held import Held, open_streams, open_values
from kdn.session.host_memory import HostMemory
from kdn.session.host_streams import HostStreams
from kdn.session.keeper import Keeper, StreamKeeper
from kdn.session.opened import Opened
from kdn.session.profiles import codec_for, share_profile
from kdn.session.quality import Quality, enough_kld
from kdn.session.settings import SessionSettings
from kdn.session.spooling import open_spool
from kdn.store.node_client import HttpLimits

logger = logging.getLogger(__name__)

SERVICE = "kdn"
"""In traces, unless OTEL_SERVICE_NAME says otherwise."""
LOOKUP_S = 30.0
HELD_S = 1.0
"""Time for what this host holds, also where there is none for places."""
LOOKUPS_AT_ONCE = 8
"""More would take each other's time."""
KEEP_ARRIVED_S = 0.05
MAIN_MEMORY = torch.device("cpu")
FETCHER_CORES, FETCH_CONNECTIONS = 8, 8
"""A process of its own receives where a GPU decodes and there are so many cores, over so many
connections. On an H200's host, with 16 cores, vLLM's first token after 8,192 and 32,768 tokens
from a node took 52 and 115 ms with six of them, and 68 and 195 without."""


class Session(Opened):
    """`async with Session(...)`. Its methods belong to the loop that it was entered in."""

    places: Places
    codec: Codec
    namespace: Namespace
    publisher: Publisher

    def __init__(
        self,
        settings: SessionSettings,
        spec: ModelSpec,
        dtype: torch.dtype,
        clock: Callable[[], float] = time.monotonic,
        device: torch.device = MAIN_MEMORY,
    ) -> None:
        """`dtype`: of the cache that the engine computes with, `device`: where that lies."""
        self.settings, self.spec, self.dtype, self.device = settings, spec, dtype, device
        self.estimator = Estimator()
        self._gauge = Gauge(None, can_compute=False)
        self.changes = Changes()
        """Of what this host and the place hold, by this session: for engines that tell routers."""
        self.host: HostMemory | None = None
        """Decoded values, where those are what this host holds: engines `keep` them."""
        self.streams: HostStreams | None = None
        """Streams, where the device decodes: the session keeps what it delivers and publishes."""
        self.fetcher: Fetcher | None = None
        """Receives in a process of its own, if it is there."""
        self.decisions = Decisions(None)
        """What is told to the request log."""
        self._keeper: Keeper | None = None
        self._stream_keeper: StreamKeeper | None = None
        self._clock, self._rng = clock, Random()
        self._asking = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        super().__init__()

    async def _open(self) -> None:
        settings = self.settings
        if settings.tracing:
            tracing.start(SERVICE)
        if settings.request_log_bytes:
            log = RequestLog(settings.request_log or default_path(), settings.request_log_bytes)
            self._parts.callback(log.close)
            self.decisions = Decisions(log)
        own = settings.credentials
        places = open_places(
            settings.where,
            token=own.token,
            client=settings.client,
            tls_ca=own.tls_ca,
            limits=HttpLimits(resolve_s=settings.resolve_s),
        )
        self.places = await self._parts.enter_async_context(places)
        self.codec = await codec_for(
            settings.codec, self.spec, self.places, seal_key(settings.secret), settings.profile
        )
        self.namespace = Namespace(
            self.spec.fingerprint, self.codec.profile_id, secret=settings.secret
        )
        await asyncio.to_thread(self._open_host)
        self.fetcher = self._open_fetcher()
        opening = asyncio.ensure_future(
            asyncio.to_thread(open_spool, settings, self.places.publish_to, self.namespace)
        )
        self._parts.push_async_callback(_close_spool, opening)
        spool = await asyncio.shield(opening)
        self.publisher = Publisher(
            self.places.publish_to, self.codec, spool=spool, max_queue_bytes=settings.queue_bytes,
            on_encoded=self._keep_published, on_accepted=self._note_accepted,
            on_refused=self.decisions.refused,
        )  # fmt: skip
        await self._parts.enter_async_context(self.publisher)

    def _open_host(self) -> None:
        """What this host's memory holds for this engine: streams if they are decoded on its device,
        else values."""
        if self.codec.decodes_on(self.device):
            self.streams = open_streams(
                self.settings, self.codec, self.dtype, self.changes.note_file
            )
        else:
            self.host = open_values(
                self.settings, self.spec, self.codec, self.dtype, self.changes.note_file
            )
        if self.host is not None:
            self._keeper = Keeper(self.host)
            self._parts.callback(self._keeper.close)
        if self.streams is not None:
            self._stream_keeper = StreamKeeper(self.streams)
            self._parts.callback(self._stream_keeper.close)

    def _open_fetcher(self) -> Fetcher | None:
        settings, own = self.settings, self.settings.credentials
        count = settings.fetch_connections
        if count is None:
            count = connections_here(usable_cores()) if self.codec.decodes_on(self.device) else 0
        if not count or not self.places.endpoints.remote:
            return None
        hello = Hello(count, ARENA_BYTES, own.token, settings.client, own.tls_ca)
        try:
            fetcher = Fetcher(hello)
        except OSError as error:
            logger.warning("no process of its own receives for this engine: %s", error)
            return None
        self._parts.push_async_callback(fetcher.close)
        return fetcher

    async def start_fetcher(self) -> None:
        """Begin to start it; else the first delivery does, and does without."""
        if self.fetcher is not None:
            self.fetcher.is_ready()

    @property
    def _held(self) -> Held | None:
        return self.host or self.streams

    async def share_profile(self) -> None:
        """Put the codec's profile where others find it, if it is not there."""
        await share_profile(self.codec, self.places, self.namespace.seal_key)

    # what is known

    async def know(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = None,
        enough_kld: float = 0.0,
        block_tokens: int = 1,
        whole: bool = False,
        limit_s: float = LOOKUP_S,
    ) -> Known:
        """The longest beginning of these tokens that this host or some place has.

        `enough_kld`: what this host holds counts if it is that good; so does what places have, of
        which levels may be missing. `block_tokens`: the reader uses whole blocks of so many tokens.
        `whole`: it cannot use layers that lack tokens. With no time, places are not asked.
        """

        async with self._asking:
            began_s = self._clock()
            with tracing.named(), tracing.span("kdn.know", tokens=len(tokens)) as span:
                with self._looking(enough_kld) as is_held:
                    wish = Wish(
                        token_ids(tokens), namespace or self.namespace, block_tokens,
                        partial(self._takes, whole=whole), is_held,
                        reads_tails=self.device.type == "cuda",
                    )  # fmt: skip
                    question = self.question(levels=self._levels_for(enough_kld))
                    known = await longest_known(
                        wish, question, self.places.endpoints, began_s + limit_s
                    )
                span.set(known_tokens=known.end)
                self.decisions.knew(len(tokens), known, self._clock() - began_s)
            return known

    def _takes(self, info: StreamInfo, *, whole: bool) -> bool:
        complete = not (whole and max(info.valid_from) > info.start)
        return complete and self.codec.decodes_to(info, self.dtype)

    def _looking(self, enough_kld: float) -> AbstractContextManager[Callable[[Chunk], bool]]:
        """Says of chunks whether this host holds them well enough."""
        held = self._held
        return nullcontext(_never) if held is None else held.looking(BODY_KLD * enough_kld)

    async def know_each(
        self, chunks: Sequence[Chunk], *, enough_kld: float = 0.0, limit_s: float = LOOKUP_S
    ) -> Known:
        """Those of these chunks, of whatever contexts, that this host or some place has whole: for
        joins, whose pieces do not build on each other. What this host holds comes first."""

        def takes(stream: Stream | None) -> bool:
            return stream is not None and self._takes(stream.assembly.header.info, whole=True)

        async with self._asking:
            began_s = self._clock()
            until_s = began_s + limit_s
            with self._looking(enough_kld) as is_held:
                held = [chunk for chunk in chunks if is_held(chunk)]
            mine = {chunk.key for chunk in held}
            rest = [chunk for chunk in chunks if chunk.key not in mine]
            streams: Streams = {}
            if rest and limit_s > 0:
                question = self.question(rest, levels=self._levels_for(enough_kld))
                streams = await look_up(question, self.places.endpoints, until_s)
        found = [chunk for chunk in rest if takes(streams.get(chunk.key))]
        known = {chunk.key: streams[chunk.key] for chunk in found}
        is_late = len(found) < len(rest) and self._clock() >= until_s
        every = Known((*held, *found), known, is_late)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self.decisions.knew(num_tokens, every, self._clock() - began_s)
        return every

    async def know_home(
        self, chunks: Sequence[Chunk], stored_quality: Quality | None = None
    ) -> Known:
        """The first of these chunks that are where new ones would go, with no fewer levels than
        those would have. It is asked once, and what is wrong with it raised: whoever is about to
        publish there wants to know."""
        place = self.places.publish_to
        question = self.question(chunks, levels=self.stored_levels(stored_quality))
        answer = await ask(question, place) if chunks else []
        others = frozenset(one for one in self.places.endpoints if one is not place)
        found = list(takewhile(lambda one: one is not None, answer))
        first = chunks[: len(found)]
        streams: Streams = {
            chunk.key: Stream(one, others) for chunk, one in zip(first, found, strict=True) if one
        }
        return Known(tuple(first), streams)

    def loading_s(self, known: Known, enough_kld: float, speeds: Speeds | None = None) -> float:
        """How long it would take to deliver what is known, as far as link and decoder are known."""
        levels = enough_levels(self.codec.expected_kld, enough_kld)
        link, told = self.estimator.link(), Told(speeds)
        fetched = [chunk for chunk in known.chunks if chunk.key in known.streams]
        decode_s = sum(told.decode_s(chunk.num_tokens, levels) for chunk in fetched)
        return link.latency_s + max(known.size_bytes(levels) / link.rate, decode_s)

    def question(
        self, chunks: Sequence[Chunk] = (), codec: Coding | None = None, levels: int = 1
    ) -> Question:
        """For chunks, or for what is looked up beside them (`states.py`). With fewer levels they
        are of no use."""
        return Question(chunks, codec or self.codec, self._clock, self._rng, levels=levels)

    def _levels_for(self, enough: float) -> int:
        """That a stream must have to be as good by itself."""
        return (
            self.codec.num_levels if enough <= 0 else enough_levels(self.codec.expected_kld, enough)
        )

    def stored_levels(self, stored_quality: Quality | None = None) -> int:
        """Of a chunk that is published, at this quality or at the session's own."""
        own = self.settings.stored_quality if stored_quality is None else stored_quality
        return self._levels_for(enough_kld(own))

    # delivering

    async def deliver(
        self,
        chunks: Sequence[Chunk],
        sink: Sink,
        *,
        known: Known | None = None,
        end: int | None = None,
        enough_kld: float = 0.0,
        deadline_s: float = FAR_S,
        speeds: Speeds | None = None,
        compute: Compute | None = None,
        shared: bool = False,
        on_progress: OnProgress | None = None,
        skips_windows: bool = False,
        asks_host: bool = True,
        asked: asyncio.Event | None = None,
    ) -> Delivered:
        """Consecutive chunks, good enough for a context up to `end` (None: that of the chunks), by
        the deadline, into the sink. Those that this host holds come first, the others from places,
        which are asked for them unless it is `known` what they have. `compute` lets the model read
        along, `shared` says that it and the decoder take each other's time. With
        `skips_windows`, layers with a window are fetched only as far as they are read by whoever
        goes on from the end of what is known. `asks_host`: not if this host just had none. `asked`
        is set when a place has been asked for something."""
        began_s = self._clock()
        until_s = began_s + deadline_s
        last = chunks[-1].end if end is None else end

        async def rest_of(held: tuple[Grade, ...]) -> Result | None:
            rest, left_s = chunks[len(held) :], until_s - self._clock()
            if not rest or left_s <= 0:
                return None
            request = Request(
                rest, self.codec, self.codec.expected_kld, sink, left_s, enough_kld, speeds,
                None if held else compute, shared, skips_windows,
            )  # fmt: skip
            told = known if known is not None and known.are_found(rest) else None
            return await deliver(
                request, self.places.endpoints, told, estimator=self.estimator,
                on_progress=on_progress, gauge=self._gauge if speeds is None else None,
                fetcher=self.fetcher, asked=asked,
            )  # fmt: skip

        with tracing.named(), tracing.span("kdn.deliver", chunks=len(chunks)) as span:
            held: tuple[Grade, ...] = ()
            if asks_host:
                held = await self._write_held(chunks, sink, last, enough_kld, until_s)
            result = await rest_of(held)
            got = Delivered(tuple(chunks), held, result, self.codec.expected_kld)
            span.set(held=len(held), fetched_bytes=got.fetched_bytes)
            self.decisions.delivered(got, deadline_s, enough_kld, self._clock() - began_s)
        if result is not None and self._stream_keeper is not None:
            # The engine goes on first: handing over a hundred streams takes milliseconds.
            asyncio.get_running_loop().call_later(KEEP_ARRIVED_S, self._keep_arrived, result)
        return got

    async def _write_held(
        self, chunks: Sequence[Chunk], sink: Sink, end: int, enough_kld: float, until_s: float
    ) -> tuple[Grade, ...]:
        """From the host's shared memory, as far as it goes without a gap and in time."""
        held = self._held
        if held is None:
            return ()
        with tracing.span("kdn.hand_over", chunks=len(chunks)) as span:
            grades = await self._write_from(held, chunks, sink, end, enough_kld, until_s)
            span.set(held=len(grades))
        return grades

    async def _write_from(
        self,
        held: Held,
        chunks: Sequence[Chunk],
        sink: Sink,
        end: int,
        enough_kld: float,
        until_s: float,
    ) -> tuple[Grade, ...]:
        until_s = max(until_s, self._clock() + HELD_S)
        stopped = threading.Event()

        def is_late() -> bool:
            return stopped.is_set() or self._clock() >= until_s

        writing = asyncio.ensure_future(
            asyncio.to_thread(held.deliver, chunks, sink, end, enough_kld, is_late)
        )
        try:
            grades = await asyncio.shield(writing)
        except asyncio.CancelledError:
            stopped.set()
            await outwait(writing)  # until then the sink is not the caller's
            raise
        if self._stream_keeper is not None:
            self._stream_keeper.used(chunks[: len(grades)])
        return grades

    def _keep_arrived(self, result: Result) -> None:
        """For this and other engines of this host, later."""
        if self._stream_keeper is not None:
            for chunk, data, levels in result.arrived:
                self._stream_keeper.keep(chunk, data, levels)

    def _keep_published(self, chunk: Chunk, data: bytes) -> None:
        if self._stream_keeper is not None:
            self._stream_keeper.keep(chunk, data, self.codec.num_levels)

    def keep(self, chunk: Chunk, values: KVCache, grade: Grade) -> None:
        """For other engines of this host, later, if it holds values. From any thread; `values`
        must not change."""
        if self._keeper is not None:
            self._keeper.keep(chunk, values, grade.kld, grade.is_exact)

    # publishing

    @property
    def is_read_only(self) -> bool:
        """No place takes what is new: nothing is published, and nothing waits to be."""
        return self.places.publish_to.store.read_only

    def publish(
        self,
        chunk: Chunk,
        source: Source,
        *,
        exact_until: int | None,
        saved_s: float = 0.0,
        stored_quality: Quality | None = None,
    ) -> Admission:
        """Publish a chunk that the model computed, unless it rests on losses: see
        `Delivered.exact_until`. `saved_s`: how long the model took for it."""
        if self.is_read_only:
            said = Admission.READ_ONLY
        elif not may_be_published(chunk, exact_until):
            said = Admission.LOSSY
        else:
            levels = self.stored_levels(stored_quality)
            said = self.publisher.publish(chunk, source, saved_s=saved_s, levels=levels)
        self.decisions.published(chunk, said)
        return said

    def _note_accepted(self, key: bytes) -> None:
        self.changes.note_published(key)
        self.decisions.accepted(key)


def connections_here(cores: int) -> int:
    """Of a fetcher; 0 where cores have other work: the engine's process receives then."""
    return FETCH_CONNECTIONS if cores >= FETCHER_CORES else 0


def _never(chunk: Chunk) -> bool:
    return False


async def _close_spool(opening: asyncio.Future[Spool | None]) -> None:
    """Also one that was still being opened when nobody wanted it any more: it holds a lock."""
    spool = await opening
    if spool is not None:
        await asyncio.to_thread(spool.close)
