"""A region's depot: its stores and its copy of names, opened, and at work in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from prometheus_client.metrics_core import Metric

from kdn.background import supervise
from kdn.config import DepotSettings, TenantSettings
from kdn.depot.depot import DATA, Depot, RegionReport, Report
from kdn.depot.manifests import chunks_of
from kdn.depot.names import Must, Version
from kdn.depot.stores import DISK_DEADLINE_S, open_store
from kdn.depot.tenants import Tenant, owners_of, tenants_of
from kdn.errors import StoreError, UnsupportedError
from kdn.files import private_folder
from kdn.metrics import REGION
from kdn.region.centre import CentreStore, open_clients
from kdn.region.centre_names import CentreNames
from kdn.region.following import Following
from kdn.region.names import RegionNames
from kdn.region.names_copy import NamesCopy
from kdn.region.outbox import KeepAll
from kdn.region.store import RegionStore
from kdn.store.base import Entry, Stats, Store, is_taken
from kdn.store.disk import open_disk
from kdn.store.evict import Retention, open_policy
from kdn.store.http_answers import unhex
from kdn.store.node_client import HttpLimits
from kdn.store.tally import Usage

logger = logging.getLogger(__name__)

READ_LIMITS = HttpLimits(deadline_s=300.0)
SEND_LIMITS = HttpLimits(connections=8, silence_s=120.0, deadline_s=600.0)
NAMES_WAIT_S = 2.0
"""For the chunks that a name uses to be central, before the name is."""


@dataclass
class RegionDepot(Depot):
    """Quotas are the centre's; here they count what is not yet there."""

    @property
    def region(self) -> RegionStore:
        assert isinstance(self.store, RegionStore)
        return self.store

    def is_central(self, key: bytes) -> bool:
        return self.region.is_central(key)

    def waiting(self, tenant: Tenant) -> Usage:
        outbox = self.region.outbox
        return outbox.usage(tenant.prefix) if outbox else Usage()

    def metrics(self) -> list[Metric]:
        assert isinstance(self.names, RegionNames)
        waiting = [self.waiting(tenant) for tenant in self.tenants]
        outbox = self.region.outbox
        told: dict[str, float] = {
            "waiting_objects": sum(one.objects for one in waiting),
            "waiting_bytes": sum(one.size_bytes for one in waiting),
            "names_age_seconds": self.names.age_s,
            "pulled_bytes_total": self.region.puller.fetched_bytes,
        }
        if outbox is not None:
            told |= {
                "sent_objects_total": outbox.sent,
                "send_failures_total": outbox.failures,
                "refused_objects_total": outbox.refused,
                "lost_objects_total": outbox.lost,
            }
        return [REGION[f"kdn_region_{name}"].shown(value) for name, value in told.items()]

    async def region_report(self) -> RegionReport:
        assert isinstance(self.names, RegionNames)
        outbox = self.region.outbox
        waiting = [self.waiting(tenant) for tenant in self.tenants]
        stats = await self.wait(outbox.store.stats()) if outbox else Stats()
        return RegionReport(
            waiting_objects=sum(one.objects for one in waiting),
            waiting_bytes=sum(one.size_bytes for one in waiting),
            outbox_bytes=stats.size_bytes,
            outbox_capacity_bytes=stats.capacity_bytes,
            sent_objects=outbox.sent if outbox else 0,
            send_failures=outbox.failures if outbox else 0,
            refused_objects=outbox.refused if outbox else 0,
            lost_objects=outbox.lost if outbox else 0,
            pulled_bytes=self.region.puller.fetched_bytes,
            is_reachable=not (self.region.centre_rests or (outbox and outbox.is_failing)),
            feeds=self.names.feeds,
        )

    async def held(self, tenant: Tenant) -> Usage:
        """What counts here: the centre counts the rest."""
        return self.waiting(tenant)

    async def check_room(
        self, tenant: Tenant, key: bytes, size_bytes: int, replacing: bytes | None
    ) -> Entry | None:
        """Of what is here: a put does not wait for the centre, which may have another one. Pieces
        do not count: the rest of them may be gone from there."""
        old = await self.wait(self.region.held(key))
        if not is_taken(old, replacing):
            await self.check_quota(tenant, size_bytes)
        return old

    async def _delete_manifest(
        self, tenant: Tenant, name: str, must: Must, chunks: bool
    ) -> Report | None:
        assert isinstance(self.names, RegionNames)
        async with tenant.changes:
            report = await self.names.remove(tenant.name, name, must, chunks)
            if report is not None:
                gone = report["deleted"] + report["missing"]
                await self._withdraw(tenant, map(unhex, gone))
                await self._retain(tenant, name, ())
        return report

    async def _withdraw(self, tenant: Tenant, chunks: Iterable[bytes]) -> None:
        """Copies of chunks that the centre no longer has, and those that wait to be sent there."""
        for chunk in chunks:
            key = tenant.store_key("chunks", chunk)
            if self.region.is_central(key):
                await self.region.forget([key])
            else:
                await self.region.delete(key)


@asynccontextmanager
async def open_region(
    settings: DepotSettings, tenant_settings: Sequence[TenantSettings] = ()
) -> AsyncIterator[RegionDepot]:
    """As `open_depot`, for settings with an upstream."""
    _check(settings)
    data, tenants = settings.data, tenants_of(tenant_settings)
    try:
        private_folder(data, DATA)
    except OSError as error:
        raise StoreError(f"data folder {data}: {error}") from error
    async with AsyncExitStack() as opened:
        policy = open_policy(settings.policy, owners=owners_of(tenants), may_cut=False)
        store = await _open_store(settings, tenants, policy)
        opened.push_async_callback(store.close)
        clients = open_clients(settings, tenants, HttpLimits())
        for client in clients.values():
            opened.push_async_callback(client.close)
        centres = {
            name: CentreNames(client, settings.upstream_timeout_s)
            for name, client in clients.items()
        }
        copy = NamesCopy(data / "region.sqlite", settings.upstream)
        following = {
            tenant.name: Following(
                tenant.name, centres[tenant.name], copy, gone=partial(_drop, store, copy, tenant)
            )
            for tenant in tenants
        }
        hurry = partial(_hurry, store, {tenant.name: tenant for tenant in tenants})
        names = RegionNames(
            copy, centres, following, max_stale_s=settings.max_stale_s,
            timeout_s=settings.upstream_timeout_s, before_put=hurry,
        )  # fmt: skip
        opened.push_async_callback(names.close)
        tasks = [
            asyncio.create_task(supervise("following names", one.run)) for one in following.values()
        ]
        opened.push_async_callback(_stop, tasks)
        yield RegionDepot(store, names, tenants, settings.store_timeout_s, policy)


def _check(settings: DepotSettings) -> None:
    """What a region cannot be as well."""
    if getattr(settings, "store", ""):
        raise UnsupportedError("store and upstream: expected one of them, found both")
    if getattr(settings, "workers", 1) != 1:
        raise UnsupportedError("upstream: a region has one worker")


async def _open_store(
    settings: DepotSettings, tenants: Sequence[Tenant], policy: Retention
) -> RegionStore:
    async with AsyncExitStack() as opened:
        local = await open_store(replace(settings, upstream=""), policy, owners_of(tenants))
        opened.push_async_callback(local.close)
        outbox: Store | None = None
        if settings.disk_bytes and settings.outbox_bytes:
            outbox = await open_disk(
                settings.data / "outbox", settings.outbox_bytes, KeepAll(),
                deadline_s=DISK_DEADLINE_S,
            )  # fmt: skip
            opened.push_async_callback(outbox.close)
        centre, upward = (
            CentreStore(open_clients(settings, tenants, limits), tenants)
            for limits in (READ_LIMITS, SEND_LIMITS)
        )
        store = RegionStore(local, outbox, centre, upward)
        await store.open([tenant.prefix for tenant in tenants])
        opened.pop_all()
    return store


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def _hurry(
    store: RegionStore, tenants: dict[str, Tenant], tenant: str, chunks: Iterable[bytes]
) -> None:
    """Send the chunks of a name before it: whoever finds it elsewhere finds them, too."""
    if store.outbox is not None:
        keys = [tenants[tenant].store_key("chunks", chunk) for chunk in chunks]
        await store.outbox.hurry(keys, NAMES_WAIT_S)


async def _drop(store: RegionStore, copy: NamesCopy, tenant: Tenant, held: Version) -> None:
    """A name was deleted somewhere: its chunks may be gone from the centre, so the copies here go.
    Those that another name uses are fetched again."""
    manifest = await copy.manifest(tenant.name, held)
    if manifest is not None:
        chunks = await asyncio.to_thread(chunks_of, manifest)
        await store.forget([tenant.store_key("chunks", chunk) for chunk in chunks])
