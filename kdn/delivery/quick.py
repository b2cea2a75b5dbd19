"""The part of a delivery that a fetcher (`fetcher.py`) does: all that a plan wants, in one go.

This is for fast links. Where everything will surely be here soon, there is nothing to plan. So all
of it is ordered at once. The fetcher receives and verifies it in another process, and this one
decodes each stream as soon as it is there; it sees a few messages and no bytes. Whatever does not
come this way is still missing, and the delivery goes on to fetch it itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from kdn.codec.header import Header
from kdn.delivery.arena import Region
from kdn.delivery.decode import Decoder
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.fetch_messages import Span
from kdn.delivery.fetcher import Fetcher, Fetching
from kdn.delivery.lookup import Incoming
from kdn.delivery.plan import Fetch
from kdn.delivery.transfer import Transfer

MIN_BYTES = 1 << 20
"""Less is here before a fetcher has heard of it."""
GATHER_S = 0.004
GATHERED, GATHERED_BESIDE = 4, 2
"""As in `client.py`: chunks wait so long for others, or until a part of a batch is there, a larger
one beside a batch that is being decoded."""


class Quick:
    """Use once."""

    def __init__(
        self,
        fetcher: Fetcher,
        known: Sequence[Incoming],
        transfer: Transfer,
        decoder: Decoder,
        batch_chunks: int,
        clock: Callable[[], float],
    ) -> None:
        self._fetcher, self._known, self._transfer = fetcher, known, transfer
        self._decoder, self._batch_chunks, self._clock = decoder, batch_chunks, clock
        self._fetches: list[Fetch] = []
        self._region: Region | None = None
        self._endpoint: Endpoint | None = None
        self._stride = 0
        self._counted_bytes = 0
        self._whole: set[int] = set()  # spans that are here
        self._waiting: list[Fetch] = []  # for being decoded
        self._waiting_s = 0.0

    async def run(self, fetches: Sequence[Fetch], endpoints: Endpoints, limit_s: float) -> None:
        """Bring these, as far as possible within the limit, and decode them."""
        until_s, changed = self._clock() + limit_s, self._transfer.changed
        endpoint = self._endpoint = self._choose(endpoints)
        if endpoint is None or not self._lay_out(fetches, endpoint):
            return
        keys = [self._known[fetch.chunk].chunk.key for fetch in self._fetches]
        try:
            async with asyncio.timeout(limit_s):
                shares = [(node, list(own)) for node, own in await endpoint.store.nodes_of(keys)]
        except TimeoutError:
            return
        if not shares or self._region is None or not self._fetcher.is_ready():
            return
        self._transfer.begins_elsewhere()
        fetching = self._fetcher.fetch(
            self._region, self._spans(self._region), shares, limit_s, changed.set
        )
        try:
            while (left_s := until_s - self._clock()) > 0:
                changed.clear()
                self._note(fetching)
                self._decode(fetching.is_over)
                if fetching.is_over and not self._decoder.busy and not self._waiting:
                    break
                await self._news(left_s)
        finally:
            self._fetcher.stop(fetching)
            self._transfer.ended_elsewhere()
        self._note(fetching)
        if not fetching.may_write:
            self._take_parts(fetching)
        if len(self._whole) < len(self._fetches):
            why = fetching.trouble or "did not bring all"
            self._transfer.note_trouble(endpoint, f"its fetcher: {why}")

    def _choose(self, endpoints: Endpoints) -> Endpoint | None:
        """The first that is elsewhere and works; for whoever it lacks, another is asked later."""
        now_s = self._clock()
        able = [one for one in endpoints.remote if one.rest.is_over(now_s)]
        return able[0] if able else None

    # memory

    def _lay_out(self, fetches: Sequence[Fetch], endpoint: Endpoint) -> bool:
        """Memory for what is wanted of this endpoint, from the front of the context on; False if it
        is not worth while. Streams of a model lie at the same distances in every delivery: so they
        meet pages that are there."""
        most: dict[int, int] = {}  # a plan may have a chunk in several steps
        for one in fetches:
            most[one.chunk] = max(one.levels, most.get(one.chunk, 0))
        wanted = [Fetch(chunk, levels) for chunk, levels in sorted(most.items())]
        self._fetches = [one for one in wanted if self._is_wanted(one, endpoint)]
        sizes = [self._end(one) for one in self._fetches]
        if sum(sizes) < MIN_BYTES:
            return False
        largest = max(self._header(one).stream_bytes for one in self._fetches)
        self._stride = 1 << (largest - 1).bit_length()
        self._region = self._fetcher.take(self._stride * len(self._fetches))
        return self._region is not None

    def _is_wanted(self, fetch: Fetch, endpoint: Endpoint) -> bool:
        one = self._known[fetch.chunk]
        if one.lost or one.alone or one.computed or endpoint in one.lacking:
            return False
        assembly = one.assembly
        return assembly.is_untouched and assembly.is_whole and assembly.levels < fetch.levels

    def _header(self, fetch: Fetch) -> Header:
        return self._known[fetch.chunk].assembly.header

    def _end(self, fetch: Fetch) -> int:
        return self._header(fetch).level_end(fetch.levels - 1)

    def _spans(self, region: Region) -> list[Span]:
        """What came with the lookup is put in its place."""
        spans = []
        for number, fetch in enumerate(self._fetches):
            one, at = self._known[fetch.chunk], number * self._stride
            first, header = one.assembly.first, one.assembly.header
            region.view[at : at + len(first)] = first
            parts = _parts(header, fetch.levels)
            spans.append(
                Span(
                    one.chunk.key.hex(), header.stream_id.hex(), len(first), self._end(fetch),
                    region.start + at, header.size_bytes, parts,
                )
            )  # fmt: skip
        return spans

    # what comes

    def _note(self, fetching: Fetching) -> None:
        """Streams that are here as far as they are wanted: nobody writes to these any more."""
        self._transfer.came_elsewhere(fetching.fetched_bytes - self._counted_bytes)
        self._counted_bytes = fetching.fetched_bytes
        for number in [number for number in fetching.verified if number not in self._whole]:
            fetch = self._fetches[number]
            if self._levels(fetch, fetching.verified[number]) >= fetch.levels:
                self._whole.add(number)
                self._adopt(number, fetch.levels)
                if not self._waiting:
                    self._waiting_s = self._clock()
                if self._known[fetch.chunk].assembly.levels >= fetch.levels:
                    self._waiting.append(fetch)

    def _take_parts(self, fetching: Fetching) -> None:
        """When nobody writes to any: levels that were verified of streams that are not whole."""
        for number in fetching.verified.keys() - self._whole:
            levels = self._levels(self._fetches[number], fetching.verified[number])
            if levels:
                self._adopt(number, levels)

    def _levels(self, fetch: Fetch, parts: int) -> int:
        return min(parts // self._header(fetch).info.num_parts, fetch.levels)

    def _adopt(self, number: int, levels: int) -> None:
        assert self._region is not None
        one, at = self._known[self._fetches[number].chunk], number * self._stride
        assembly, before = one.assembly, one.assembly.levels
        assembly.adopt(self._region.view[at : at + assembly.header.stream_bytes], levels)
        if assembly.levels > before and self._endpoint is not None:
            came = assembly.level_ends[assembly.levels - 1] - len(assembly.first)
            one.bring(self._endpoint, max(0, came))

    def _decode(self, is_over: bool) -> None:
        self._decoder.raise_crash()
        while self._waiting and not self._decoder.is_full:
            is_beside = bool(self._decoder.busy)
            share = GATHERED_BESIDE if is_beside else GATHERED
            is_gathered = len(self._waiting) * share >= self._batch_chunks
            is_old = not is_beside and self._clock() >= self._waiting_s + GATHER_S
            if not (is_gathered or is_over or is_old):
                return
            batch = self._waiting[: self._batch_chunks]
            self._waiting = self._waiting[self._batch_chunks :]
            self._decoder.start(self._known, batch)

    async def _news(self, left_s: float) -> None:
        wait_s = left_s
        if self._waiting and not self._decoder.busy and not self._decoder.is_full:
            wait_s = min(wait_s, self._waiting_s + GATHER_S - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(max(wait_s, 0.0)):
                await self._transfer.changed.wait()


def _parts(header: Header, levels: int) -> list[tuple[int, str]]:
    """Where each part of the first levels ends, and its digest."""
    ends: list[int] = []
    for level in range(levels):
        if header.info.num_parts > 1:
            ends.append(header.part_ends[level])
        ends.append(header.level_end(level))
    return [(end, digest.hex()) for end, digest in zip(ends, header.level_digests, strict=False)]
