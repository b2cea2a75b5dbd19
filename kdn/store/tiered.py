"""Stores over stores: RAM over disk over another node.

A read asks the tiers from the top and brings what it finds below to the tiers above, in the
background. Identical reads of lower tiers share one flight. A tier that fails or takes longer than
its deadline counts as a miss, with a counted error, so a broken tier costs time and hits but never
an answer; after FAILURES failures in a row it is left alone for REST_S.

A put goes to all tiers, the lowest first, and succeeds if a tier keeps it whose objects outlive the
process; if none does, nothing of it stays in memory. (Where every tier is memory, any will do.)

The first writer wins as far as one store can tell: a key that is taken in a tier that answers is
not put into those above it.

A tier may cut objects to make room (`Hints.cuts`). Those below it may have more of them, and are
asked for what it lacks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar
from weakref import WeakValueDictionary

from xxhash import xxh3_64_intdigest

from kdn.errors import KdnError, LimitError, NoSpaceError, StoreError
from kdn.store.base import Entry, Span, Stats, Store, TierReport, check_put, is_taken
from kdn.store.costs import total
from kdn.store.memory import MemoryStore
from kdn.store.single_flight import SingleFlight
from kdn.store.tally import OWNER_BYTES, Usage, Watcher

FAILURES = 3
REST_S = 2.0
MAX_PROMOTIONS = 16
MAX_PROMOTING_BYTES = 128 << 20
"""Of objects on their way to faster tiers; a larger one is only read where it is."""
CLOSE_S = 60.0
"""For reads and promotions under way to end, then for each tier to close."""
FAULTS = (KdnError, OSError, TimeoutError)

T = TypeVar("T")


@dataclass
class Tier:
    """One store of a stack, and what it did."""

    name: str
    store: Store
    deadline_s: float
    """Of one operation; of a list: of each step."""
    hits: int = 0
    owners: dict[bytes, int] = field(default_factory=dict)
    """The hits by how keys begin."""
    errors: int = 0
    """Operations that failed or took too long."""
    failures_in_row: int = 0
    rests_until_s: float = 0.0

    async def ask(
        self, call: Callable[[Store], Awaitable[T]], clock: Callable[[], float] = time.monotonic
    ) -> T | None:
        """Its answer; None if it fails, takes too long, or did so lately."""
        if clock() < self.rests_until_s:
            return None
        try:
            async with asyncio.timeout(self.deadline_s):
                answer = await call(self.store)
        except NoSpaceError:
            raise
        except LimitError:  # of what was asked: that says nothing of the tier
            self.errors += 1
            return None
        except FAULTS:
            self.failed(clock)
            return None
        self.failures_in_row = 0
        return answer

    def hit(self, key: bytes) -> None:
        """It had what was asked for."""
        self.hits += 1
        owner = key[:OWNER_BYTES]
        self.owners[owner] = self.owners.get(owner, 0) + 1

    def failed(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Count it, and leave the tier alone if it fails again and again."""
        self.errors += 1
        self.failures_in_row += 1
        if self.failures_in_row >= FAILURES:
            self.rests_until_s = clock() + REST_S

    async def list(
        self, prefix: bytes, clock: Callable[[], float] = time.monotonic
    ) -> AsyncGenerator[Entry]:
        """As far as it answers."""
        entries = self.store.list(prefix)
        while entry := await self.ask(lambda _: anext(entries, None), clock):
            yield entry


async def merged(sources: Sequence[AsyncGenerator[Entry]]) -> AsyncGenerator[Entry]:
    """Lists in key order as one; of several entries of a key, the first source's."""
    async with AsyncExitStack() as stack:
        for source in sources:
            await stack.enter_async_context(aclosing(source))
        heads = [await anext(source, None) for source in sources]
        while any(heads):
            key = min(entry.key for entry in heads if entry)
            yield next(entry for entry in heads if entry and entry.key == key)
            for i, entry in enumerate(heads):
                if entry and entry.key == key:
                    heads[i] = await anext(sources[i], None)


class TieredStore(Store):
    def __init__(
        self, tiers: Sequence[Tier], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert tiers, "expected at least one tier"
        self.tiers = tuple(tiers)
        self._top, self._below = self.tiers[0], self.tiers[1:]
        self._clock = clock
        self._reads: SingleFlight[Span | None] = SingleFlight()
        self._promotions: SingleFlight[None] = SingleFlight()
        self._promoting_bytes = 0
        self._deletes: SingleFlight[bool] = SingleFlight()
        # One replacement of a key at a time: the second must see what the first one put.
        self._replacing: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._deletions = 0  # begun and ended; a read that spans one brings nothing up
        self._counts = Stats()  # hits, misses and puts
        self._closed = False
        self.is_current: Callable[[], bool] = lambda: True  # may faster tiers be read at all?

    # reads

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        top = self._top
        if isinstance(top.store, MemoryStore):  # never waits, so a deadline would only cost time
            span = await top.store.get(key, start, end, etag=etag)
        else:
            span = await self._ask(top, lambda store: store.get(key, start, end, etag=etag))
        if span is not None:
            top.hit(key)
        if self._below and (span is None or span.is_short_of(end)):
            read = (key, start, end, etag)
            fuller = await self._reads.run(read, lambda: self._get_below(key, start, end, etag))
            if span is None or (fuller is not None and len(fuller.data) > len(span.data)):
                span = fuller
        self._counts.hits += span is not None
        self._counts.misses += span is None
        return span

    def peek(self, key: bytes) -> Entry | None:
        """Of the first tier that knows at once. One above it may have another object only while a
        replacement is under way."""
        if not self.is_current():
            return None
        found: Entry | None = None
        for tier in self.tiers:
            entry = tier.store.peek(key)
            if entry is not None and (found is None or found.is_beginning_of(entry)):
                found = entry
            if found is not None and not found.is_cut:
                break
        return found

    def get_now(self, key: bytes, start: int, end: int, etag: bytes) -> Span | None:
        """Brings nothing up: what can be had at once is fast enough where it is."""
        if not self.is_current():
            return None
        for tier in self.tiers:
            span = tier.store.get_now(key, start, end, etag)
            if span is not None and not span.is_short_of(end):
                tier.hit(key)
                self._counts.hits += 1
                return span
        return None

    async def _get_below(
        self, key: bytes, start: int, end: int | None, etag: bytes | None
    ) -> Span | None:
        deletions = self._deletions
        for level, tier in enumerate(self._below, 1):
            span = await self._ask(tier, lambda store: store.get(key, start, end, etag=etag))
            if span is not None:
                tier.hit(key)
                if deletions == self._deletions and key not in self._deletes:
                    self._start_promotion(span, level)
                return span
        return None

    def _start_promotion(self, span: Span, level: int) -> None:
        entry = span.entry
        room = self._promoting_bytes + entry.size_bytes <= MAX_PROMOTING_BYTES
        if room and len(self._promotions) < MAX_PROMOTIONS and entry.key not in self._promotions:
            self._promoting_bytes += entry.size_bytes
            task = self._promotions.start(entry.key, lambda: self._promote(span, level))
            task.add_done_callback(lambda _: self._promoted(entry.size_bytes))

    def _promoted(self, size_bytes: int) -> None:
        self._promoting_bytes -= size_bytes

    async def _promote(self, span: Span, level: int) -> None:
        """Bring an object from a tier to all above it."""
        entry, whole = span.entry, span
        if len(span.data) < entry.size_bytes:
            found = await self._ask(
                self.tiers[level], lambda store: store.get(entry.key, etag=entry.etag)
            )
            if found is None or len(found.data) != entry.size_bytes:
                return
            whole = found
        data = bytes(whole.data)
        for tier in reversed(self.tiers[:level]):
            await self._put_into(tier, whole.entry, data)

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        found: dict[bytes, Entry] = {}
        for tier in self.tiers:
            # A tier below may have more of an object that was cut in this one.
            missing = [k for k in dict.fromkeys(keys) if k not in found or found[k].is_cut]
            if not missing:
                break
            entries = await self._ask(tier, _lookup(missing, head_bytes))
            found.update(
                (entry.key, entry)
                for entry in entries or ()
                if entry and (entry.key not in found or found[entry.key].is_beginning_of(entry))
            )
        return [found.get(key) for key in keys]

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        """A tier that fails is left out from there on, with a counted error."""
        async with aclosing(merged([t.list(prefix, self._clock) for t in self.tiers])) as entries:
            async for entry in entries:
                yield entry

    def used(self, keys: Sequence[bytes]) -> None:
        for tier in self.tiers:
            tier.store.used(keys)

    def usage(self, prefix: bytes) -> Usage:
        """Of the tier that holds the most of it."""
        each = [tier.store.usage(prefix) for tier in self.tiers]
        return max(each, key=lambda usage: usage.size_bytes)

    @property
    def own(self) -> Store | None:
        each = (tier.store.own for tier in reversed(self.tiers))
        return next((own for own in each if own is not None), None)

    def watch(self, watcher: Watcher) -> None:
        if self.own is not None:
            self.own.watch(watcher)

    async def tier_reports(self) -> Sequence[TierReport]:
        return [
            TierReport(
                tier.name, await self._ask(tier, lambda store: store.stats()), tier.hits,
                dict(tier.owners), tier.errors, self._clock() < tier.rests_until_s,
            )
            for tier in self.tiers
        ]  # fmt: skip

    async def stats(self) -> Stats:
        """Hits, misses and puts of the whole; sizes of the fullest tier, which holds what the
        others hold; evictions of the lowest."""
        each = [await self._ask(tier, lambda store: store.stats()) for tier in self.tiers]
        known = [stats for stats in each if stats] or [Stats()]
        return replace(
            self._counts,
            objects=max(stats.objects for stats in known),
            size_bytes=max(stats.size_bytes for stats in known),
            capacity_bytes=max(stats.capacity_bytes for stats in known),
            evictions=known[-1].evictions,
            cuts=known[-1].cuts,
            corruptions=sum(stats.corruptions for stats in known),
            tiers={tier.name: tier.hits for tier in self.tiers},
            costs=total(stats.costs for stats in known),
        )

    # writes

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        check_put(entry, data, checksum)
        if replacing is not None:
            kept = await self._replace(entry, data, replacing)
        else:
            kept = await self._put_through(entry, data)
        self._counts.puts += kept.etag == entry.etag
        return kept

    async def _put_through(self, entry: Entry, data: bytes) -> Entry:
        """Into all tiers, the lowest first; one must keep it that outlives the process, if there is
        such a tier."""
        lasting = sum(not tier.store.volatile for tier in self.tiers) or len(self.tiers)
        lowest_first = list(reversed(self.tiers))
        lowest_first.sort(key=lambda tier: tier.store.volatile)
        kept, full = None, 0
        for number, tier in enumerate(lowest_first):
            if number == lasting and kept is None:
                break
            answer = await self._put_into(tier, entry, data)
            if isinstance(answer, NoSpaceError):
                full += 1
            elif answer is not None:
                kept = answer
                if answer.etag != entry.etag:  # a reader finds what a tier above has before this
                    [found] = await self.lookup([entry.key])
                    return found or answer
        if kept is None:
            names = ", ".join(tier.name for tier in reversed(lowest_first[:lasting]))
            error = NoSpaceError if full == lasting else StoreError
            raise error(f"none of the tiers {names} can keep {len(data)} bytes")
        return kept

    async def _replace(self, entry: Entry, data: bytes, replacing: bytes) -> Entry:
        """Take the old object out of every tier, then put the new one. StoreError if a tier does
        not answer: the old one may still be there."""
        async with self._replacing.setdefault(entry.key, asyncio.Lock()):
            [found] = await self.lookup([entry.key])
            is_less = found is not None and found.is_beginning_of(entry)
            if found and not is_less and not is_taken(found, replacing):
                await self.delete(entry.key)
            return await self._put_through(entry, data)

    async def _put_into(self, tier: Tier, entry: Entry, data: bytes) -> Entry | NoSpaceError | None:
        """What the tier answers; None if it failed."""
        checksum = xxh3_64_intdigest(data)
        try:
            return await self._ask(tier, lambda store: store.put_entry(entry, data, checksum))
        except NoSpaceError as error:
            return error

    async def delete(self, key: bytes) -> bool:
        """StoreError if a tier does not answer: then the bytes may still be there."""
        return await self._deletes.run(key, lambda: self._delete(key))

    async def _delete(self, key: bytes) -> bool:
        self._deletions += 1
        await self._promotions.landed(key)
        was_here, failed = False, []
        for tier in reversed(self.tiers):
            try:
                async with asyncio.timeout(tier.deadline_s):
                    was_here |= await tier.store.delete(key)
            except FAULTS as error:
                tier.errors += 1
                failed.append(f"{tier.name}: {error!r}")
        self._deletions += 1
        if failed:
            raise StoreError(f"could not delete from {'; '.join(failed)}")
        return was_here

    async def close(self) -> None:
        """StoreError if a tier could not be closed; the others are."""
        if self._closed:
            return
        self._closed = True
        failed = []
        await self._reads.close(CLOSE_S)
        await self._promotions.close(CLOSE_S)
        for tier in self.tiers:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await tier.store.close()
            except FAULTS as error:
                failed.append(f"{tier.name}: {error!r}")
        if failed:
            raise StoreError("; ".join(failed))

    async def _ask(self, tier: Tier, call: Callable[[Store], Awaitable[T]]) -> T | None:
        return await tier.ask(call, self._clock)


def _lookup(
    keys: Sequence[bytes], head_bytes: int
) -> Callable[[Store], Awaitable[list[Entry | None]]]:
    return lambda store: store.lookup(keys, head_bytes=head_bytes)
