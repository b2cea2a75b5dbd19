"""Objects of the centre, fetched as far as they are asked for, once for all who ask.

Whoever reads a range gets what is at rest here, waits for what is on its way, and only what is
neither is fetched. A reader that names many ranges beforehand (`expecting`) has them fetched in few
requests, a little ahead of it; they end with it. What was fetched is kept in pieces (`pieces.py`);
when all pieces of an object are here they become one object.

Bytes on their way are bounded for each tenant, so that one cannot fill this process's memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any

from xxhash import xxh3_64_intdigest

from kdn.background import watched
from kdn.errors import FormatError, KdnError, StoreError
from kdn.region.centre import CentreStore
from kdn.region.flight import Flight, GoneError
from kdn.region.grouping import Group, Wanted, grouped
from kdn.region.pieces import (
    HEAD_BYTES,
    LETTER,
    MAX_OBJECT_BYTES,
    PREFIX_BYTES,
    Partial,
    pack_head,
    parse_head,
    piece_key,
    split_key,
)
from kdn.store.base import Entry, Span, Store, clip
from kdn.store.streaming import Ask
from kdn.store.tiered import Tier

MAX_PIECE_BYTES = 4 << 20
REQUESTS_AHEAD = 2
MAX_FLYING_BYTES = 64 << 20
"""Of a tenant, on their way from the centre to the region's own store."""
MAX_JOINED_BYTES = 64 << 20
"""Larger objects stay in pieces."""
ATTEMPTS = 3
READ_S = 20.0
"""For the next bytes of a read."""
FIRST_SWEEP = 20_000
"""Objects known here until those of which nothing is left are forgotten."""


class Puller:
    def __init__(self, local: Store, centre: CentreStore, tier: Tier) -> None:
        """`tier` is the centre's: it says whether it is worth asking."""
        self._local, self._centre, self._tier = local, centre, tier
        self._partials: dict[bytes, Partial] = {}
        self._flying: Counter[bytes] = Counter()  # bytes by tenant
        self._room = asyncio.Condition()
        self._num_waiting = 0  # for room
        self._tasks: set[asyncio.Task[None]] = set()
        self._joining = asyncio.Lock()  # one object at a time is whole in memory
        self._sweep_at = FIRST_SWEEP
        self.fetched_bytes = 0
        self.joined = 0
        """Objects that became whole: since then they are found in the region's own store."""

    async def load(self, tenants: Iterable[bytes]) -> None:
        """What earlier processes kept, of the tenants with these prefixes."""
        for tenant in tenants:
            async with aclosing(self._local.list(tenant + LETTER)) as pieces:
                async for piece in pieces:
                    key, start = split_key(piece.key)
                    partial = self._partials.setdefault(key, Partial(key, piece.etag))
                    if partial.etag == piece.etag and piece.size_bytes > HEAD_BYTES:
                        partial.rest[start] = start + piece.size_bytes - HEAD_BYTES

    def __contains__(self, key: bytes) -> bool:
        return key in self._partials

    # what is here

    async def known(self, key: bytes) -> Entry | None:
        """An object of which something is here."""
        partial = self._partials.get(key)
        if partial is None or partial.entry is not None:
            return partial.entry if partial else None
        for start in list(partial.rest):
            span = await self._local.get(piece_key(key, start), 0, HEAD_BYTES, etag=partial.etag)
            with suppress(FormatError):
                if span is not None:
                    partial.entry = parse_head(key, partial.etag, bytes(span.data))
                    return partial.entry
            partial.rest.pop(start, None)
        if not partial.flights and self._is_current(partial):
            del self._partials[key]
        return None

    def learn(self, found: Entry) -> None:
        """What the centre has, with its first bytes."""
        partial = self._partials.get(found.key)
        known = partial.entry if partial else None
        is_resized = known is not None and known.size_bytes != found.size_bytes  # it was cut
        if partial is not None and (partial.etag != found.etag or is_resized):
            self._forget(partial)
            partial = None
        if found.size_bytes >= MAX_OBJECT_BYTES:
            return
        if partial is None:
            partial = self._partials[found.key] = Partial(found.key, found.etag)
            if len(self._partials) > self._sweep_at:
                self._sweep_at = 2 * len(self._partials)
                self._start(self._sweep())
        partial.entry = partial.entry or replace(found, head=b"")
        end = len(found.head)
        if end and next(partial.gaps(0, end), None) == (0, end):  # nothing of it is here
            flight = Flight.landed(found.head)
            partial.flights.append(flight)
            self._flying[_tenant(found.key)] += end
            self._start(self._land(partial, flight))

    async def forget(self, key: bytes) -> bool:
        """Drop all pieces of an object, also those on their way: True if there were any."""
        partial = self._partials.get(key)
        if partial is None:
            return False
        starts = self._forget(partial, delete=False)
        for start in starts:
            await self._local.delete(piece_key(key, start))
        return bool(starts)

    def _forget(self, partial: Partial, delete: bool = True) -> list[int]:
        if self._partials.get(partial.key) is partial:
            del self._partials[partial.key]
        starts = list(partial.rest)
        partial.rest.clear()
        for flight in partial.flights:
            flight.fail(GoneError("this object was replaced or deleted"))
        if delete:
            self._start(self._delete(partial.key, starts))
        return starts

    async def _delete(self, key: bytes, starts: Iterable[int]) -> None:
        for start in starts:
            await self._local.delete(piece_key(key, start))

    # reads

    async def read(self, entry: Entry, start: int, end: int | None) -> Span | None:
        """Bytes of an object that `known` or a lookup told of; None if it is gone, StoreError if
        the centre does not give them."""
        begin, stop = clip(start, end, entry.size_bytes)
        partial = self._partials.get(entry.key)
        parts, position = [], begin
        attempts = 0
        while position < stop:
            if partial is None or partial.etag != entry.etag:
                return None
            try:
                async with asyncio.timeout(READ_S):
                    part = await self._next(partial, position, stop)
            except GoneError:
                self._forget(partial)
                return None
            except TimeoutError:
                raise StoreError(f"the centre sent nothing for {READ_S:g} s") from None
            except KdnError as error:
                attempts += 1
                if attempts == ATTEMPTS:
                    raise StoreError(f"the centre: {error}") from error
                continue
            position += len(part)
            parts.append(part)
            partial = self._partials.get(entry.key)
        return Span(entry, begin, parts[0] if len(parts) == 1 else b"".join(parts))

    async def _next(self, partial: Partial, position: int, stop: int) -> bytes | memoryview:
        """The bytes from `position` on that can be had in one go; none if one has to look again."""
        flight = partial.flying(position)
        if flight is not None:
            return await flight.read(position, stop)
        resting = partial.resting(position)
        if resting is None:
            end = min(next(partial.gaps(position, stop))[1], position + MAX_PIECE_BYTES)
            await self._fetch([(partial, position, end)])
            return b""
        start, end = resting
        skip = HEAD_BYTES - start
        span = await self._local.get(
            piece_key(partial.key, start), skip + position, skip + min(stop, end),
            etag=partial.etag,
        )  # fmt: skip
        if span is None or len(span.data) != min(stop, end) - position:
            partial.rest.pop(start, None)  # evicted, or damaged
            return b""
        return span.data

    @contextmanager
    def expecting(self, asks: Iterable[Ask]) -> Iterator[None]:
        """While these are being read in order, fetch what is missing of them ahead."""
        wanted = [ask for ask in asks if ask.key in self._partials]
        task = self._start(self._run_ahead(wanted)) if wanted else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _run_ahead(self, asks: Sequence[Ask]) -> None:
        ahead: list[asyncio.Task[None]] = []
        for group in grouped(self._missing(asks), self._centre):
            # Looked at again: others may have asked for the same meanwhile.
            tasks = await self._fetch(group)
            ahead += tasks
            if len(ahead) >= REQUESTS_AHEAD:
                await asyncio.wait([ahead.pop(0)])

    def _missing(self, asks: Sequence[Ask]) -> Iterator[Wanted]:
        for ask in asks:
            partial = self._partials.get(ask.key)
            if partial is None or partial.entry is None or partial.etag != ask.etag:
                continue
            start, end = clip(ask.start, ask.end, partial.entry.size_bytes)
            for first, last in partial.gaps(start, end):
                for at in range(first, last, MAX_PIECE_BYTES):
                    yield partial, at, min(last, at + MAX_PIECE_BYTES)

    async def _fetch(self, wanted: Sequence[Wanted]) -> list[asyncio.Task[None]]:
        """Ask the centre for what of these ranges (of one collection) is still missing."""
        size_bytes = sum(end - start for _, start, end in wanted)
        await self._take_room(_tenant(wanted[0][0].key), size_bytes)
        flights: list[tuple[Partial, Flight]] = []
        for partial, start, end in wanted:
            if self._partials.get(partial.key) is not partial:
                continue
            for first, last in list(partial.gaps(start, end)):
                flight = Flight(first, last)
                partial.flights.append(flight)
                flights.append((partial, flight))
        unused = size_bytes - sum(flight.size_bytes for _, flight in flights)
        self._give_back(_tenant(wanted[0][0].key), unused)
        return [self._start(self._fly(Group(flights)))] if flights else []

    async def _fly(self, group: Group) -> None:
        error: KdnError = StoreError("it cannot be reached")
        try:
            if time.monotonic() >= self._tier.rests_until_s:
                await self._centre.read_into(group.asks, group)
                self._tier.failures_in_row = 0
                error = GoneError("it was cut there")  # where something is still missing
        except KdnError as fault:
            error = fault
            self._tier.failed()
        finally:
            landings = []
            for partial, flight in group.flights:
                flight.fail(error)
                self.fetched_bytes += flight.ready - flight.start
                landings.append(self._start(self._land(partial, flight)))
        await asyncio.wait(landings)

    async def _land(self, partial: Partial, flight: Flight) -> None:
        """Keep what came; nobody waits for it, and those who read it may do so meanwhile."""
        try:
            data = flight.data()
            if data and partial.entry is not None and self._is_current(partial):
                kept = await self._keep(partial, partial.entry, flight.start, data)
                if kept and self._is_current(partial):
                    partial.rest[flight.start] = flight.ready
                elif kept:
                    await self._local.delete(piece_key(partial.key, flight.start))
        finally:
            partial.flights.remove(flight)
            self._give_back(_tenant(partial.key), flight.size_bytes)
        if partial.is_whole:
            await self._join(partial)

    async def _keep(self, partial: Partial, entry: Entry, start: int, data: bytes) -> bool:
        content = pack_head(entry) + data
        key = piece_key(partial.key, start)
        with suppress(KdnError, TimeoutError, OSError):  # it is a copy: it can be fetched again
            kept = await self._local.put(
                key, content, etag=partial.etag, checksum=xxh3_64_intdigest(content)
            )
            if kept.etag == partial.etag and kept.size_bytes == len(content):
                return True
            await self._local.delete(key)  # of an object before this one
        return False

    async def _join(self, partial: Partial) -> None:
        """All pieces are here: from now on one object."""
        entry = partial.entry
        if entry is None or entry.size_bytes > MAX_JOINED_BYTES:
            return
        async with self._joining:
            if not (self._is_current(partial) and partial.is_whole):
                return
            with suppress(KdnError, TimeoutError, OSError):
                span = await self.read(entry, 0, None)
                if span is None or not self._is_current(partial):
                    return
                data = bytes(span.data)
                checksum = xxh3_64_intdigest(data)
                kept = await self._local.put_entry(entry, data, checksum)
                if not self._is_current(partial):  # deleted meanwhile
                    await self._local.delete(entry.key)
                elif kept.etag == entry.etag:
                    self.joined += 1
                    await self.forget(entry.key)

    # room, tasks

    async def _take_room(self, tenant: bytes, size_bytes: int) -> None:
        def is_room() -> bool:
            flying = self._flying[tenant]
            return not flying or flying + size_bytes <= MAX_FLYING_BYTES

        if not is_room():
            self._num_waiting += 1
            try:
                async with self._room:
                    await self._room.wait_for(is_room)
            finally:
                self._num_waiting -= 1
        self._flying[tenant] += size_bytes

    def _give_back(self, tenant: bytes, size_bytes: int) -> None:
        self._flying[tenant] -= size_bytes
        if size_bytes and self._num_waiting:
            self._start(self._tell_room())

    async def _tell_room(self) -> None:
        async with self._room:
            self._room.notify_all()

    def _is_current(self, partial: Partial) -> bool:
        return self._partials.get(partial.key) is partial

    async def _sweep(self) -> None:
        """Forget objects whose pieces were all evicted."""
        for partial in list(self._partials.values()):
            starts = list(partial.rest)
            keys = [piece_key(partial.key, start) for start in starts]
            for start, piece in zip(starts, await self._local.lookup(keys), strict=True):
                if piece is None:
                    partial.rest.pop(start, None)
            if not partial.rest and not partial.flights and self._is_current(partial):
                del self._partials[partial.key]
        self._sweep_at = max(FIRST_SWEEP, 2 * len(self._partials))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(watched("pulling", KdnError, OSError, TimeoutError))
        return task

    async def close(self) -> None:
        """What is on its way is given up."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _tenant(key: bytes) -> bytes:
    return key[:PREFIX_BYTES]
