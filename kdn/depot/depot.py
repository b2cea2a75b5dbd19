"""All that a data folder holds, for all its tenants: objects in a store, names in SQLite.

Chunks that the newest version of a name uses are held on disk, as far as they fit into their
tenant's share: eviction takes what nobody named. Every operation has a deadline.

Or all that a store holds which many share (`DepotSettings.store`): then objects, names and counts
are there, and a depot has nothing of its own but caches. What is evicted is up to that store.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from prometheus_client.metrics_core import Metric

from kdn.config import DepotSettings, TenantSettings
from kdn.depot.counts import SharedCounts
from kdn.depot.following import Follower
from kdn.depot.manifests import chunks_of
from kdn.depot.names import FeedReport, Must, NameStore, SharedNames, Totals, Version
from kdn.depot.shared_names import open_shared_names
from kdn.depot.sqlite_names import SqliteNames
from kdn.depot.stores import open_shared_store, open_store
from kdn.depot.tenants import Tenant, owners_of, tenants_of
from kdn.depot.turns import Turns, Work
from kdn.errors import ConditionError, StoreError, UnsupportedError
from kdn.files import private_folder
from kdn.store.base import Entry, Store, is_taken
from kdn.store.evict import Retention, open_policy
from kdn.store.shared import SharedStore
from kdn.store.tally import Usage

DATA = re.compile(r"\w+\.sqlite(?:-\w+)?|objects|outbox|cache|followed(?:\.new)?|lost\+found")
"""What there may be in a data folder."""
DELETES_AT_ONCE = 32
CANCEL_S = 0.2
SLICE_S = 0.0005
IN_THREAD_BYTES = 256 * 2**10
"""Manifests beyond this are parsed in a thread: others may run while their keys are read."""
Result = TypeVar("Result")
Report = dict[str, list[str]]
"""Of a deleted name: keys of chunks that are `deleted`, `kept` (others use them), `missing`."""


@dataclass(frozen=True)
class RegionReport:
    """How far a region is behind its centre, and what it sent and fetched since it started."""

    waiting_objects: int
    waiting_bytes: int
    """Put here, and not yet at the centre."""
    outbox_bytes: int
    outbox_capacity_bytes: int
    sent_objects: int
    send_failures: int
    refused_objects: int
    lost_objects: int
    pulled_bytes: int
    is_reachable: bool
    """Whether the centre answered when it was last asked."""
    feeds: Mapping[str, FeedReport]
    """By tenant."""


@dataclass
class Depot:
    """Keys of objects are store keys here: those that a `Tenant` makes."""

    store: Store
    names: NameStore
    tenants: Sequence[Tenant]
    timeout_s: float
    """For one operation."""
    policy: Retention | None = None
    """Of the disk: told what names use."""
    counts: SharedCounts | None = None
    """Of tenants, where many share the store."""
    changed: Callable[[Entry], None] = lambda entry: None
    """Called with whatever was put, replaced or deleted."""
    turns: Turns = field(default_factory=Turns)
    _puts: WeakValueDictionary[bytes, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """By store key: one put of a key at a time, so that exactly one of many created the object."""
    _parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large manifest is parsed: for that moment it takes up to 13 times its bytes."""

    async def wait(self, operation: Awaitable[Result]) -> Result:
        """An operation, with its deadline."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await operation
        except TimeoutError:
            raise StoreError(f"the store took longer than {self.timeout_s} s") from None

    # objects

    def is_central(self, key: bytes) -> bool:
        """Whether all who share this depot's objects have it, not only this one."""
        return True

    def waiting(self, tenant: Tenant) -> Usage:
        """What a tenant has put here that is not central yet."""
        return Usage()

    def metrics(self) -> list[Metric]:
        """More of them for `/metrics`."""
        return []

    async def region_report(self) -> RegionReport | None:
        """None: there is no centre."""
        return None

    async def held(self, tenant: Tenant) -> Usage:
        """A tenant's objects, and what they and its manifests take of its quota."""
        if self.counts is not None:
            return await self.wait(self.counts.held(tenant))
        names = await self.wait(self.names.totals(tenant.name))
        usage = self.store.usage(tenant.prefix)
        return Usage(usage.objects, usage.size_bytes + names.size_bytes)

    async def check_quota(self, tenant: Tenant, more_bytes: int) -> None:
        """QuotaError if so much more would be too much."""
        if not tenant.quota.limit_bytes or more_bytes <= 0:
            return
        if self.counts is not None:
            await self.wait(self.counts.check(tenant, more_bytes))
        else:
            tenant.quota.check(more_bytes, (await self.held(tenant)).size_bytes)

    async def check_room(
        self, tenant: Tenant, key: bytes, size_bytes: int, replacing: bytes | None
    ) -> Entry | None:
        """What is under a key. QuotaError if it is free (or gives way), and an object of that size
        would be too much."""
        # What only a cache of this node has is not there: the next node would not find it.
        store = self.store
        look_up = store.lookup_shared if isinstance(store, SharedStore) else store.lookup
        (old,) = await self.wait(look_up([key]))
        if not is_taken(old, replacing):
            await self.check_quota(tenant, size_bytes - (old.size_bytes if old else 0))
        return old

    async def put(
        self, tenant: Tenant, entry: Entry, data: bytes, checksum: int, replacing: bytes | None
    ) -> tuple[Entry, bool]:
        """What is there now, and whether this made it. See `Store.put`."""
        async with self._puts.setdefault(entry.key, asyncio.Lock()):
            old = await self.check_room(tenant, entry.key, len(data), replacing)
            if old is not None and old.is_beginning_of(entry) and replacing is None:
                replacing = old.etag  # it was cut, here or by who put it: now it is whole
                await self.check_quota(tenant, len(data) - old.size_bytes)
            if old is not None and _is_more(old, entry):
                return old, False
            if old is not None and is_taken(old, replacing):
                if isinstance(self.store, SharedStore):
                    await self.wait(self.store.agree(old))
                return old, False
            with tenant.quota.reserve(len(data)):
                kept = await self.wait(self.store.put_entry(entry, data, checksum, replacing))
            for known in filter(None, (old, kept)):
                self.changed(known)
            if kept.etag == entry.etag:
                self._count(tenant, [old] if old else [], [kept])
                if self.counts is not None:
                    await self.wait(self.counts.settle(tenant))
            if replacing is not None:
                await self.tell_removed([entry.key])
            return kept, old is None and kept.etag == entry.etag

    async def delete(self, key: bytes) -> bool:
        """True if it was here."""
        (entry,) = await self.wait(self.store.lookup([key]))
        was_here = await self.wait(self.store.delete(key))
        if was_here and entry is not None:
            self.changed(entry)
            self._count(self._owner(key), [entry], [])
        await self.tell_removed([key])
        return was_here

    def _owner(self, key: bytes) -> Tenant:
        return next(tenant for tenant in self.tenants if key.startswith(tenant.prefix))

    def _count(self, tenant: Tenant, gone: Sequence[Entry], came: Sequence[Entry]) -> None:
        if self.counts is not None:
            more_bytes = sum(entry.size_bytes for entry in came)
            more_bytes -= sum(entry.size_bytes for entry in gone)
            self.counts.add(tenant, len(came) - len(gone), more_bytes)

    async def tell_removed(self, keys: Sequence[bytes]) -> None:
        """The caches of other nodes: when this returns, they are going to know."""
        if isinstance(self.names, SharedNames) and keys:
            with suppress(UnsupportedError):  # where nothing can be told, no node uses a cache
                await self.wait(self.names.remove(keys))

    # names

    async def put_manifest(self, tenant: Tenant, name: str, manifest: bytes, must: Must) -> Version:
        """Make a name's next version, and hold what it uses. MalformedError, ConditionError if
        `must` does not hold, QuotaError."""
        return await self.wait(self._put_manifest(tenant, name, manifest, must))

    async def _put_manifest(
        self, tenant: Tenant, name: str, manifest: bytes, must: Must
    ) -> Version:
        own = tenant.settings
        most = Totals(own.max_names, own.max_names_bytes, own.max_named_chunks)
        async with tenant.changes:  # so that of each tenant one manifest at a time is parsed
            if len(manifest) > IN_THREAD_BYTES:
                async with self._parsing:
                    chunks = await asyncio.to_thread(chunks_of, manifest)
            else:
                chunks = chunks_of(manifest)
            await self.check_quota(tenant, len(manifest))
            made = await self.names.put(tenant.name, name, manifest, chunks, must, most)
            if self.counts is not None:
                self.counts.add_manifest(tenant, len(manifest))
            await self._retain(tenant, name, chunks)
        return made

    async def delete_manifest(
        self, tenant: Tenant, name: str, must: Must, chunks: bool
    ) -> Report | None:
        """Forget a name, and the chunks that only it used if `chunks`. None if there is no such
        name, ConditionError if `must` does not hold."""
        return await self.wait(self._delete_manifest(tenant, name, must, chunks))

    async def _delete_manifest(
        self, tenant: Tenant, name: str, must: Must, chunks: bool
    ) -> Report | None:
        report: Report = {"deleted": [], "kept": [], "missing": []}
        async with tenant.changes:
            newest = await self.names.find(tenant.name, name)
            if newest is None:
                return None
            if not must(newest.etag):
                raise ConditionError(newest.etag)
            if chunks:
                report = await self._delete_chunks(tenant, name)
            # Only now: after a crash the name still knows what is to be deleted.
            await self.names.delete(tenant.name, name, must)
            await self._retain(tenant, name, ())
        return report

    async def _delete_chunks(self, tenant: Tenant, name: str) -> Report:
        """Delete what only this name uses, and look again whether it is gone."""
        own, shared = await self.names.chunks_of(tenant.name, name)
        keys = _keys(tenant, own)
        entries = await self.store.lookup(keys)
        deleted = [chunk.hex() for chunk, entry in zip(own, entries, strict=True) if entry]
        missing = [chunk.hex() for chunk, entry in zip(own, entries, strict=True) if not entry]
        for first in range(0, len(keys), DELETES_AT_ONCE):
            # Even those that were not found: a damaged object may still lie there.
            batch = keys[first : first + DELETES_AT_ONCE]
            await asyncio.gather(*(self.store.delete(key) for key in batch))
        for entry in filter(None, entries):
            self.changed(entry)
        self._count(tenant, list(filter(None, entries)), [])
        await self.tell_removed(keys)
        left = await self.store.lookup(keys)
        if any(left):
            raise StoreError(f"{sum(map(bool, left))} chunks are still there after deletion")
        return {"deleted": deleted, "kept": [chunk.hex() for chunk in shared], "missing": missing}

    async def _retain(self, tenant: Tenant, name: str, chunks: Iterable[bytes]) -> None:
        """`name` now uses these chunks; none to forget it."""
        if self.policy is None:
            return
        work = Work(self.turns, tenant.name, SLICE_S)
        steps = self.policy.retaining(tenant.prefix + name.encode(), _keys(tenant, chunks))
        try:
            for _ in steps:
                if work.is_over:
                    await work.rest()
        finally:  # all of them, even if nobody waits for it any more
            for _ in steps:
                pass


def _keys(tenant: Tenant, chunks: Iterable[bytes]) -> list[bytes]:
    return [tenant.store_key("chunks", chunk) for chunk in chunks]


@asynccontextmanager
async def open_depot(
    settings: DepotSettings, tenant_settings: Sequence[TenantSettings] = ()
) -> AsyncIterator[Depot]:
    """What is in the folder `settings.data`, which is made if need be; closed (and flushed) on
    leaving. One process at a time may have it open. Or what is in the store `settings.store`, which
    many may have open: of the folder then only what is cached on disk."""
    if settings.store:
        async with _open_shared(settings, tenant_settings) as depot:
            yield depot
        return
    data, tenants = settings.data, tenants_of(tenant_settings)
    _make_folder(data)
    async with AsyncExitStack() as opened:
        names = SqliteNames(data / "names.sqlite")
        opened.push_async_callback(names.close)
        owners = owners_of(tenants)
        policy = open_policy(settings.policy, owners=owners)
        for tenant in tenants:  # before anything is evicted
            async for name, chunks in names.newest_chunks(tenant.name):
                policy.retain(tenant.prefix + name.encode(), _keys(tenant, chunks))
        store = await open_store(settings, policy, owners)
        opened.push_async_callback(store.close)
        yield Depot(store, names, tenants, settings.store_timeout_s, policy)


@asynccontextmanager
async def _open_shared(
    settings: DepotSettings, tenant_settings: Sequence[TenantSettings]
) -> AsyncIterator[Depot]:
    """Nothing is asked of the store yet: one that is away now may be there later."""
    tenants = tenants_of(tenant_settings)
    if settings.disk_bytes:
        _make_folder(settings.data)
    async with AsyncExitStack() as opened:
        names = open_shared_names(settings.store, settings.store_credentials)
        opened.push_async_callback(names.close)
        store = await open_shared_store(settings, owners_of(tenants))
        opened.push_async_callback(store.close)
        counts = SharedCounts(names, store, tenants)
        opened.push_async_callback(counts.tell_all)
        work = [counts.run()]
        if isinstance(store, SharedStore):
            kept = settings.data / "followed" if settings.disk_bytes else None
            work.append(Follower(store, names, kept).run())
        for one in work:
            opened.push_async_callback(_end, asyncio.create_task(one))
        yield Depot(store, names, tenants, settings.store_timeout_s, counts=counts)


async def _end(task: asyncio.Task[None]) -> None:
    """Libraries below may swallow a cancellation that comes while they end a wait of their own."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_S)


def _make_folder(data: Path) -> None:
    try:
        private_folder(data, DATA)
    except OSError as error:
        raise StoreError(f"data folder {data}: {error}") from error


def _is_more(old: Entry, new: Entry) -> bool:
    """Whether the old one is the same stream with more levels. The etag of a chunk binds its bytes,
    so whoever has fewer of them has nothing better."""
    return bool(new.hints.cuts) and old.etag == new.etag and old.size_bytes > new.size_bytes
