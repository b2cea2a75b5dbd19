"""A data folder without HTTP: quotas, conditions, names that take their chunks along, as errors and
values of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kdn.config import NodeSettings, TenantSettings
from kdn.depot.depot import Depot, open_depot
from kdn.depot.tenants import Tenant
from kdn.errors import ConditionError, MalformedError, QuotaError, StoreError
from kdn.store.base import Entry
from tests.node.harness import key_of, run
from tests.store.contract import content, etag_of


@asynccontextmanager
async def depot_in(folder: Path, *tenants: TenantSettings) -> AsyncIterator[Depot]:
    settings = NodeSettings(data=folder, memory_bytes=2**20, disk_bytes=2**24)
    async with open_depot(settings, tenants) as depot:
        yield depot


async def put(
    depot: Depot, tenant: Tenant, number: int, data: bytes, replacing: bytes | None = None
) -> tuple[Entry, bool]:
    entry = Entry(tenant.store_key("chunks", key_of(number)), etag_of(data), len(data))
    return await depot.put(tenant, entry, data, xxh3_64_intdigest(data), replacing)


def manifest(*numbers: int) -> bytes:
    keys = [key_of(number).hex() for number in numbers]
    return json.dumps({"models": {"aa": {"chunks": keys}}}).encode()


def anything(newest: str | None) -> bool:
    return True


def test_the_first_writer_wins_and_one_that_is_named_gives_way(tmp_path: Path) -> None:
    async def work() -> None:
        async with depot_in(tmp_path) as depot:
            [tenant] = depot.tenants
            changed: list[Entry] = []
            depot.changed = changed.append
            old, new = content("old", 500), content("new", 600)
            first, created = await put(depot, tenant, 1, old)
            assert (first.etag, created) == (etag_of(old), True)
            assert await put(depot, tenant, 1, new) == (first, False)
            assert changed == [first]
            second, created = await put(depot, tenant, 1, new, replacing=etag_of(old))
            assert (second.etag, created) == (etag_of(new), False)
            assert changed[1:] == [first, second]
            assert await depot.delete(second.key)
            assert not await depot.delete(second.key)
            assert changed[3:] == [second]

    run(work())


def test_a_quota_counts_objects_and_manifests(tmp_path: Path) -> None:
    async def work() -> None:
        async with depot_in(tmp_path, TenantSettings("ann", quota_bytes=1000)) as depot:
            [tenant] = depot.tenants
            await put(depot, tenant, 1, content("1", 600))
            with pytest.raises(QuotaError, match="500 more bytes"):
                await put(depot, tenant, 2, content("2", 500))
            larger, replacing = content("larger", 900), etag_of(content("1", 600))
            kept, _ = await put(depot, tenant, 1, larger, replacing)
            assert kept.size_bytes == 900, "300 more"
            body = manifest(1)
            assert len(body) < 100
            await depot.put_manifest(tenant, "n", body, anything)
            with pytest.raises(QuotaError):
                await depot.put_manifest(tenant, "m", body, anything)
            assert (await depot.held(tenant)).size_bytes == 900 + len(body)

    run(work())


def test_more_names_than_a_tenant_may_have(tmp_path: Path) -> None:
    async def work() -> None:
        async with depot_in(tmp_path, TenantSettings("ann", max_names=1)) as depot:
            [tenant] = depot.tenants
            await depot.put_manifest(tenant, "n", b"{}", anything)
            with pytest.raises(QuotaError, match="names of all names"):
                await depot.put_manifest(tenant, "m", b"{}", anything)

    run(work())


def test_conditions_and_misses(tmp_path: Path) -> None:
    async def work() -> None:
        async with depot_in(tmp_path) as depot:
            [tenant] = depot.tenants
            made = await depot.put_manifest(tenant, "n", b"{}", lambda newest: newest is None)
            for change in (
                depot.put_manifest(tenant, "n", b"{}", lambda newest: newest is None),
                depot.delete_manifest(tenant, "n", lambda newest: newest == "other", False),
            ):
                with pytest.raises(ConditionError) as caught:
                    await change
                assert caught.value.newest == made.etag
            assert await depot.delete_manifest(tenant, "none", anything, True) is None
            nothing: dict[str, list[str]] = {"deleted": [], "kept": [], "missing": []}
            assert await depot.delete_manifest(tenant, "n", anything, False) == nothing

    run(work())


@pytest.mark.parametrize(
    "body",
    [
        b"[]", b"{", b'{"a": NaN}', b'{"models": []}', b'{"models": {"AA": {}}}',
        b'{"models": {"aa": {"chunks": ["xy"]}}}', b'{"models": {"aa": {"profile": 1}}}',
    ],
)  # fmt: skip
def test_what_is_no_manifest(tmp_path: Path, body: bytes) -> None:
    async def work() -> None:
        async with depot_in(tmp_path) as depot:
            [tenant] = depot.tenants
            with pytest.raises(MalformedError):
                await depot.put_manifest(tenant, "n", body, anything)
            assert await depot.names.find(tenant.name, "n") is None

    run(work())


def test_an_operation_has_a_deadline(tmp_path: Path) -> None:
    async def work() -> None:
        async with depot_in(tmp_path) as depot:
            [tenant] = depot.tenants
            depot.timeout_s = 0.05
            async with tenant.changes:
                with pytest.raises(StoreError, match="longer"):
                    await depot.put_manifest(tenant, "n", b"{}", anything)

    run(work())


def test_no_http_is_needed() -> None:
    code = "import sys, kdn.depot.depot; print(sorted({'aiohttp', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
