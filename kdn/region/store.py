"""The store of a region: what is here, what waits to be sent, and what the centre has.

Objects are immutable, so whatever is here is right, and is answered for without asking the centre.
The first writer wins at the centre: if another stream is there under a key by the time ours
arrives, this region drops its own and serves the centre's from then on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import replace

from kdn.errors import KdnError, NoSpaceError, RefusedError, StoreError
from kdn.region.centre import CentreStore
from kdn.region.outbox import Outbox
from kdn.region.pulling import Puller
from kdn.store.base import Entry, Span, Stats, Store, TierReport, check_put, is_taken
from kdn.store.streaming import Ask
from kdn.store.tally import Usage, Watcher
from kdn.store.tiered import Tier, merged

logger = logging.getLogger(__name__)

LOCAL_S = 30.0
LOOKS = 2
"""At what is here, if it moves from one place to the other meanwhile."""
CENTRE_S = 20.0
"""For the centre to answer a lookup, or to take an object that the outbox has no room for."""
DOUBTFUL_S = 0.3
"""A centre that did not answer the last time is waited for only so long. Engines want to know soon
what is here."""


class RegionStore(Store):
    def __init__(self, local: Store, outbox: Store | None, centre: CentreStore,
                 upward: CentreStore) -> None:  # fmt: skip
        """`outbox` is on disk; without one, a put waits for the centre. `upward` has connections of
        its own, so that what is sent is in nobody's way."""
        self._local, self._centre, self._upward = local, centre, upward
        self._tier = Tier("centre", centre, CENTRE_S)
        self.puller = Puller(local, centre, self._tier)
        self.outbox = Outbox(outbox, local, upward, self._settled) if outbox else None
        self._own = (local, outbox) if outbox else (local,)
        self._lookups: dict[tuple[bytes, int], asyncio.Task[dict[bytes, Entry]]] = {}

    async def open(self, tenants: Sequence[bytes]) -> None:
        """Take over what is here of the tenants with these prefixes."""
        await self.puller.load(tenants)
        if self.outbox is not None:
            await self.outbox.open()

    def is_central(self, key: bytes) -> bool:
        """Whether the centre has answered for what is here under this key."""
        return self.outbox is None or key not in self.outbox

    # reads

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        for _ in range(LOOKS):
            joined = self.puller.joined
            span = await self._local.get(key, start, end, etag=etag)
            if span is None and self.outbox is not None and key in self.outbox:
                span = await self.outbox.store.get(key, start, end, etag=etag)
            span = span or await self._pull(key, start, end, etag)
            if span is not None or joined == self.puller.joined:
                break  # or else it may have become whole meanwhile
        return span

    async def _pull(
        self, key: bytes, start: int, end: int | None, etag: bytes | None
    ) -> Span | None:
        entry = await self.puller.known(key)
        if entry is None:
            [entry] = await self._ask_centre([key], 0)
        if entry is None or etag not in (None, entry.etag):
            return None
        return await self.puller.read(entry, start, end)

    def expecting(self, asks: Iterable[Ask]) -> AbstractContextManager[None]:
        return self.puller.expecting(asks)

    async def held(self, key: bytes) -> Entry | None:
        """The whole object that is here under a key, if there is one."""
        for store in self._own:
            [found] = await self._look_in(store, [key])
            if found is not None:
                return found
        return None

    async def _look_in(
        self, store: Store, keys: Sequence[bytes], head_bytes: int = 0
    ) -> list[Entry | None]:
        """One of our own. What the outbox has and does not know of is sent from now on."""
        entries = await store.lookup(keys, head_bytes=head_bytes)
        if self.outbox is not None and store is self.outbox.store:
            for entry in filter(None, entries):
                self.outbox.found(replace(entry, head=b""))
        return entries

    async def here(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> dict[bytes, Entry]:
        """What can be answered for without the centre, with as much of their heads as is here."""
        found: dict[bytes, Entry] = {}
        for _ in range(LOOKS):
            joined = self.puller.joined
            for store in self._own:
                missing = [key for key in dict.fromkeys(keys) if key not in found]
                entries = await self._look_in(store, missing, head_bytes)
                found.update((entry.key, entry) for entry in entries if entry)
            for key in dict.fromkeys(keys):
                if key not in found and (entry := await self.puller.known(key)) is not None:
                    found[key] = entry
            if joined == self.puller.joined:
                break  # or else something may have become whole meanwhile
        return found

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        found = await self.here(keys, head_bytes=head_bytes)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        told = await self._ask_centre(missing, head_bytes)
        found.update((entry.key, entry) for entry in told if entry)
        if head_bytes:
            short = [e for e in found.values() if len(e.head) < min(head_bytes, e.size_bytes)]
            for entry in short:  # without its head an object is none
                del found[entry.key]
            found.update(await self._with_heads(short, head_bytes))
        return [found.get(key) for key in keys]

    async def _with_heads(self, entries: Sequence[Entry], head_bytes: int) -> dict[bytes, Entry]:
        """Objects that are here in pieces, as far as their heads can be had."""
        asks = [Ask(one.key, 0, min(head_bytes, one.size_bytes), one.etag) for one in entries]
        found = {}
        with self.expecting(asks):
            for entry in entries:
                with suppress(StoreError):
                    if (span := await self.puller.read(entry, 0, head_bytes)) is not None:
                        found[entry.key] = replace(entry, head=bytes(span.data))
        return found

    async def _ask_centre(self, keys: Sequence[bytes], head_bytes: int) -> list[Entry | None]:
        """One question for all who ask the same meanwhile. It goes on when nobody waits for it any
        more, and shows whether the centre is back."""
        new = [key for key in keys if (key, head_bytes) not in self._lookups]
        if new:
            task = asyncio.create_task(self._look_up(new, head_bytes))
            for key in new:
                self._lookups[key, head_bytes] = task
        flights = {self._lookups[key, head_bytes] for key in keys}
        found: dict[bytes, Entry] = {}
        if flights:
            limit_s = DOUBTFUL_S if self._tier.failures_in_row else None
            done, _ = await asyncio.wait(flights, timeout=limit_s)
            for flight in done:
                found.update(flight.result())
        return [found.get(key) for key in keys]

    async def _look_up(self, keys: Sequence[bytes], head_bytes: int) -> dict[bytes, Entry]:
        try:
            entries = await self._tier.ask(lambda c: _lookup(c, keys, head_bytes))
            found = {entry.key: entry for entry in entries or () if entry}
            for entry in found.values():
                self.puller.learn(entry)
            return found
        finally:
            for key in keys:
                del self._lookups[key, head_bytes]

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        """Also what only the centre has; if it does not answer, what is here."""
        tiers = [Tier("local", self._local, LOCAL_S), self._tier]
        if self.outbox is not None:
            tiers.insert(1, Tier("outbox", self.outbox.store, LOCAL_S))
        async with aclosing(merged([tier.list(prefix) for tier in tiers])) as entries:
            async for entry in entries:
                yield entry

    def usage(self, prefix: bytes) -> Usage:
        return self._local.usage(prefix)

    @property
    def own(self) -> Store | None:
        return self._local.own

    def watch(self, watcher: Watcher) -> None:
        self._local.watch(watcher)

    async def tier_reports(self) -> Sequence[TierReport]:
        """Of what is here. Bytes that come from the centre are counted by the puller."""
        return await self._local.tier_reports()

    @property
    def centre_rests(self) -> bool:
        """The centre failed again and again, and is left alone for a while."""
        return time.monotonic() < self._tier.rests_until_s

    async def stats(self) -> Stats:
        return await self._local.stats()

    # writes

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        if replacing is not None or self.outbox is None:
            return await self._put_through(entry, data, checksum, replacing)
        if (found := await self.held(entry.key)) is not None:
            return found
        try:
            kept = await self.outbox.add(entry, data, checksum)
        except NoSpaceError:
            return await self._put_through(entry, data, checksum, None)
        if kept.etag == entry.etag:
            with suppress(KdnError, OSError, TimeoutError):  # the outbox serves it as well
                await self._local.put_entry(entry, data, checksum)
        return kept

    async def _put_through(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None
    ) -> Entry:
        """To the centre, now. What is here afterwards is what the centre has."""
        check_put(entry, data, checksum)
        try:
            async with asyncio.timeout(CENTRE_S):
                kept = await self._centre.put_entry(entry, data, checksum, replacing)
        except TimeoutError:
            raise StoreError(f"the centre did not answer within {CENTRE_S:g} s") from None
        if replacing is not None:
            await self._drop(entry.key, kept.etag, replacing)
        elif kept.etag != entry.etag:
            await self._drop(entry.key, kept.etag, None)
        if kept.etag == entry.etag:
            with suppress(KdnError, OSError, TimeoutError):
                await self._local.put_entry(entry, data, checksum)
        return kept

    async def _drop(self, key: bytes, kept: bytes, replacing: bytes | None) -> None:
        """What is here of another object than the centre keeps, or of the one that gave way: its
        bytes were no good, even if the new object has the same etag."""
        await self.puller.forget(key)
        for store in self._own:
            [found] = await store.lookup([key])
            if found is not None and (found.etag != kept or not is_taken(found, replacing)):
                if self.outbox is not None and store is self.outbox.store:
                    await self.outbox.remove(key)
                else:
                    await store.delete(key)

    async def _settled(self, sent: Entry, kept: Entry) -> None:
        """The centre has answered for what was put here."""
        if kept.etag == sent.etag:
            return
        [found] = await self._local.lookup([sent.key])
        if found is not None and found.etag == sent.etag:
            await self._local.delete(sent.key)

    async def delete(self, key: bytes) -> bool:
        """Here and at the centre. StoreError if the centre does not answer: it may still be there;
        here it is gone."""
        was_here = await self._forget(key)
        try:
            async with asyncio.timeout(CENTRE_S):
                if self.outbox is not None:
                    was_here |= await self.outbox.withdraw(key)
                was_here |= await self._centre.delete(key)
        except TimeoutError:
            raise StoreError(f"the centre did not answer within {CENTRE_S:g} s") from None
        # Whoever looked it up before it was deleted there may bring it back.
        for (known, _), lookup in list(self._lookups.items()):
            if known == key:
                await asyncio.wait([lookup])
        await self._forget(key)
        return was_here

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Copies of what the centre has deleted."""
        for key in keys:
            await self._forget(key)

    async def _forget(self, key: bytes) -> bool:
        """First the pieces: they may be becoming an object at this moment."""
        had_pieces = await self.puller.forget(key)
        return await self._local.delete(key) or had_pieces

    async def close(self) -> None:
        await self.puller.close()
        if self.outbox is not None:
            await self.outbox.close()
        await self._local.close()
        await self._upward.close()
        await self._centre.close()


async def _lookup(centre: Store, keys: Sequence[bytes], head_bytes: int) -> list[Entry | None]:
    """A token that the centre refuses is one tenant's affair: the centre itself is well."""
    try:
        return await centre.lookup(keys, head_bytes=head_bytes)
    except RefusedError as error:
        logger.warning("the centre refuses to say what it has: %s", error)
        return []
