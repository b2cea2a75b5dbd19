"""A store that many nodes share, behind caches of this node's own.

A put is acknowledged when the shared store has it; the caches get it afterwards, as far as they can
hold it. Reads are answered by the first tier that has the object, and a shared store that does not
answer is a miss: whoever reads computes instead. Puts and deletes fail by name then.

Objects do not change, but they are deleted, and now and then replaced. Whoever does that tells the
other nodes, which `drop` them (`depot/following.py`). A node that may have missed such news reads
past its caches: `is_current` says whether they may be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from weakref import WeakValueDictionary

from kdn.errors import StoreError
from kdn.store.base import Entry, Span, Stats, check_put
from kdn.store.tally import Usage
from kdn.store.tiered import FAULTS, Tier, TieredStore


class _Filling:
    """Puts of a key under way: what is dropped meanwhile must not come back to the caches."""

    def __init__(self) -> None:
        self.drops = 0


class SharedStore(TieredStore):
    def __init__(self, caches: Sequence[Tier], shared: Tier) -> None:
        """`caches` from the fastest to the slowest."""
        super().__init__([*caches, shared])
        self._caches, self._shared = list(caches), shared
        self.is_current: Callable[[], bool] = lambda: True
        self._fillings: WeakValueDictionary[bytes, _Filling] = WeakValueDictionary()

    # reads

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        if self.is_current():
            return await super().get(key, start, end, etag=etag)
        return await self._ask(self._shared, lambda store: store.get(key, start, end, etag=etag))

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        if self.is_current():
            return await super().lookup(keys, head_bytes=head_bytes)
        return await self.lookup_shared(keys, head_bytes=head_bytes)

    async def lookup_shared(
        self, keys: Sequence[bytes], *, head_bytes: int = 0
    ) -> list[Entry | None]:
        """What all nodes have, whatever the caches say."""
        found = await self._ask(
            self._shared, lambda store: store.lookup(keys, head_bytes=head_bytes)
        )
        return found if found is not None else [None] * len(keys)

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        """Of the shared store: what it does not have is nowhere."""
        async for entry in self._shared.store.list(prefix):
            yield entry

    def usage(self, prefix: bytes) -> Usage:
        """Nodes that share a store count together (`depot/counts.py`)."""
        return Usage()

    async def stats(self) -> Stats:
        """Of the caches, as far as this node holds anything."""
        return await super().stats()

    # writes

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        check_put(entry, data, checksum)
        filling = self._fillings.setdefault(entry.key, _Filling())
        before = filling.drops
        kept = await self._put_shared(entry, data, checksum, replacing)
        if replacing is not None or kept.etag != entry.etag:
            await self.drop(entry.key)  # a cache may have what was there before
            before += 1
        if kept.etag == entry.etag:
            self._counts.puts += 1
            await self._fill(entry, data, filling, before)
        return kept

    async def _fill(self, entry: Entry, data: bytes, filling: _Filling, drops: int) -> None:
        """Put it into the caches, unless somebody has deleted it since it was put."""
        if filling.drops != drops:
            return
        await self._put_caches(entry, data)
        if filling.drops != drops:
            await self.drop(entry.key)

    async def _put_shared(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None
    ) -> Entry:
        shared = self._shared
        try:
            async with asyncio.timeout(shared.deadline_s):
                return await shared.store.put_entry(entry, data, checksum, replacing)
        except TimeoutError:
            shared.errors += 1
            raise StoreError(f"the store took longer than {shared.deadline_s} s") from None
        except OSError as error:
            shared.errors += 1
            raise StoreError(f"the store cannot be reached: {error}") from error

    async def _put_caches(self, entry: Entry, data: bytes) -> None:
        for tier in reversed(self._caches):
            there = await self._put_into(tier, entry, data)
            if isinstance(there, Entry) and there.etag != entry.etag:  # deleted elsewhere, long ago
                await self._drop(entry.key)
                await self._put_into(tier, entry, data)

    async def _delete(self, key: bytes) -> bool:
        self._dropped(key)
        return await super()._delete(key)

    async def drop(self, key: bytes) -> None:
        """Take it out of the caches. StoreError if one does not answer: it may still be there."""
        self._dropped(key)
        await self._drop(key)

    def _dropped(self, key: bytes) -> None:
        filling = self._fillings.get(key)
        if filling is not None:
            filling.drops += 1

    async def _drop(self, key: bytes) -> None:
        self._deletions += 1  # a read under way brings nothing up
        await self._promotions.landed(key)
        failed = []
        for tier in reversed(self._caches):
            try:
                async with asyncio.timeout(tier.deadline_s):
                    await tier.store.delete(key)
            except FAULTS as error:
                tier.errors += 1
                failed.append(f"{tier.name}: {error!r}")
        self._deletions += 1
        if failed:
            raise StoreError(f"could not delete from {'; '.join(failed)}")

    async def agree(self, entry: Entry) -> None:
        """The shared store has this one: no cache keeps another."""
        for tier in self._caches:
            found = await self._ask(tier, lambda store: store.lookup([entry.key]))
            if any(other and other.etag != entry.etag for other in found or ()):
                await self.drop(entry.key)

    async def drop_all(self) -> None:
        """Everything that the caches hold, or are about to."""
        self._deletions += 1
        for filling in list(self._fillings.values()):
            filling.drops += 1
        await self._promotions.all_landed()
        for tier in self._caches:
            keys = [entry.key async for entry in tier.store.list()]
            for key in keys:
                await self.drop(key)
