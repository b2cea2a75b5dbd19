"""Depots of one store: each answers as the others do, and no cache tells of what was deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kdn.bench.servers import RedisServer
from kdn.config import DepotSettings, TenantSettings
from kdn.depot import following
from kdn.depot.depot import Depot, open_depot
from kdn.depot.tenants import Tenant
from kdn.errors import ConditionError, QuotaError, StoreError, UnsupportedError
from kdn.store.base import Entry
from kdn.store.shared import SharedStore
from tests.depot.test_depot import anything, manifest, put
from tests.depot.test_names import store_url
from tests.node.harness import key_of, run
from tests.store.contract import content, etag_of

ANN = TenantSettings("ann", quota_bytes=100_000)
QUICK_S = 0.05
Pair = tuple[Depot, Depot]


@pytest.fixture(params=["redis", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(following, "FOLLOW_S", QUICK_S)
    return store_url(request, request.param, tmp_path)


@asynccontextmanager
async def depot_at(url: str, *tenants: TenantSettings, **settings: object) -> AsyncIterator[Depot]:
    wanted = {"memory_bytes": 2**22, "disk_bytes": 0, "store_timeout_s": 10.0, **settings}
    chosen = DepotSettings(store=url, **wanted)  # type: ignore[arg-type]
    async with open_depot(chosen, tenants) as depot:
        yield depot


def on_two(url: str, test: Callable[[Depot, Depot], Awaitable[None]]) -> None:
    async def work() -> None:
        async with depot_at(url, ANN) as one, depot_at(url, ANN) as other:
            await test(one, other)

    run(work())


async def until(is_so: Callable[[], Awaitable[bool]], deadline_s: float = 5.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not await is_so():
            await asyncio.sleep(0.01)


def chunk_key(tenant: Tenant, number: int) -> bytes:
    return tenant.store_key("chunks", key_of(number))


async def read(depot: Depot, number: int) -> bytes | None:
    span = await depot.store.get(chunk_key(depot.tenants[0], number))
    return None if span is None else bytes(span.data)


def test_what_one_puts_the_other_reads(url: str) -> None:
    async def test(one: Depot, other: Depot) -> None:
        [tenant], [same] = one.tenants, other.tenants
        data = content("1", 5000)
        kept, created = await put(one, tenant, 1, data)
        assert created
        assert await read(other, 1) == data
        assert await put(other, same, 1, content("2", 600)) == (kept, False)
        made = await one.put_manifest(tenant, "n", manifest(1), anything)
        assert await other.names.get("ann", "n") == (made, manifest(1))
        with pytest.raises(ConditionError):
            await other.put_manifest(same, "n", b"{}", lambda newest: newest is None)
        await other.put_manifest(same, "n", b"{}", lambda newest: newest == made.etag)
        assert [about.version for about in await one.names.history("ann", "n")] == [2, 1]

    on_two(url, test)


def test_a_quota_holds_across_nodes(url: str) -> None:
    async def test(one: Depot, other: Depot) -> None:
        size_bytes, put_bytes = 5_000, 0
        for number in range(100):
            depot = (one, other)[number % 2]
            try:
                await put(depot, depot.tenants[0], number, content(str(number), size_bytes))
            except QuotaError:
                break
            put_bytes += size_bytes
        assert put_bytes <= ANN.quota_bytes * (1 + 2 / 64)
        assert put_bytes >= ANN.quota_bytes * (1 - 2 / 64) - size_bytes
        told = [(await depot.held(depot.tenants[0])) for depot in (one, other, one)]
        assert told[1] == told[2]
        assert (told[1].objects, told[1].size_bytes) == (put_bytes // size_bytes, put_bytes)
        with pytest.raises(QuotaError):
            await other.put_manifest(other.tenants[0], "n", b"{}" + b" " * size_bytes, anything)
        for number in range(4):
            assert await one.delete(chunk_key(one.tenants[0], number))
        assert (await one.held(one.tenants[0])).objects == put_bytes // size_bytes - 4
        await put(other, other.tenants[0], 1, content("again", size_bytes))

    on_two(url, test)


def test_a_recount_sets_right_what_drifted(url: str) -> None:
    async def test(one: Depot, other: Depot) -> None:
        [tenant] = one.tenants
        await put(one, tenant, 1, content("1", 700))
        await one.put_manifest(tenant, "n", manifest(1), anything)
        assert one.counts is not None
        one.counts.add(tenant, 5, 5000)  # as of a node that died before it deleted
        assert (await other.held(other.tenants[0])).size_bytes == len(manifest(1))
        assert (await one.held(tenant)).size_bytes == 5700 + len(manifest(1))
        await one.counts.recount(tenant, 3600.0)
        held = await other.held(other.tenants[0])
        assert (held.objects, held.size_bytes) == (1, 700 + len(manifest(1)))

    on_two(url, test)


def test_what_is_deleted_leaves_the_caches_of_others(url: str) -> None:
    async def test(one: Depot, other: Depot) -> None:
        [tenant] = one.tenants
        for number in (1, 2):
            await put(one, tenant, number, content(str(number), 5000))
        assert isinstance(other.store, SharedStore)
        await until(lambda: _true(other.store.is_current()))  # type: ignore[attr-defined]
        memory = other.store.tiers[0].store
        for number in (1, 2):
            assert await read(other, number) is not None
            await until(lambda n=number: _is_there(memory, chunk_key(tenant, n)))  # type: ignore[misc]
        await one.put_manifest(tenant, "n", manifest(1), anything)
        report = await one.delete_manifest(tenant, "n", anything, chunks=True)
        assert report == {"deleted": [key_of(1).hex()], "kept": [], "missing": []}
        await one.delete(chunk_key(tenant, 2))
        for number in (1, 2):
            await until(lambda n=number: _is_gone(other, n))  # type: ignore[misc]
        assert await other.names.find("ann", "n") is None

    on_two(url, test)


async def _true(is_so: bool) -> bool:
    return is_so


async def _is_there(store: object, key: bytes) -> bool:
    [entry] = await store.lookup([key])  # type: ignore[attr-defined]
    return entry is not None


async def _is_gone(depot: Depot, number: int) -> bool:
    return await read(depot, number) is None


def test_what_is_replaced_is_replaced_for_all(url: str) -> None:
    async def test(one: Depot, other: Depot) -> None:
        [tenant], [same] = one.tenants, other.tenants
        old, new, third = content("old", 500), content("new", 600), content("third", 700)
        await put(one, tenant, 1, old)
        assert await read(other, 1) == old
        kept, _ = await put(one, tenant, 1, new, replacing=etag_of(old))
        assert kept.etag == etag_of(new)
        kept, _ = await put(other, same, 1, third, replacing=etag_of(old))
        assert kept.etag == etag_of(new), "it came too late, whatever its cache said"
        assert await read(other, 1) == new

    on_two(url, test)


def test_what_only_a_cache_has_is_put_again(url: str) -> None:
    """As after an eviction by the store."""

    async def test(one: Depot, other: Depot) -> None:
        [tenant] = one.tenants
        assert isinstance(one.store, SharedStore)
        await until(lambda: _true(one.store.is_current()))  # type: ignore[attr-defined]
        data = content("1", 500)
        await put(one, tenant, 1, data)
        await one.store.tiers[-1].store.delete(chunk_key(tenant, 1))
        assert await read(one, 1) == data, "from its memory"
        _, created = await put(one, tenant, 1, data)
        assert created
        assert await read(other, 1) == data

    on_two(url, test)


def test_a_node_that_hears_nothing_reads_past_its_caches(url: str) -> None:
    now_s = 100.0

    async def test(one: Depot, other: Depot) -> None:
        nonlocal now_s
        [tenant] = one.tenants
        await put(one, tenant, 1, content("1", 500))
        store = other.store
        assert isinstance(store, SharedStore)
        follower = following.Follower(
            store,
            other.names,
            None,
            clock=lambda: now_s,  # type: ignore[arg-type]
        )
        assert not store.is_current(), "before it has heard anything"
        await follower.follow()
        assert store.is_current()
        await put(other, other.tenants[0], 2, content("2", 500))
        await one.store.delete(chunk_key(tenant, 2))  # and nobody is told
        assert await read(other, 2) is not None, "from its memory"
        now_s += following.STALE_S
        assert await read(other, 2) is None
        assert await other.store.lookup([chunk_key(tenant, 2)]) == [None]
        assert await read(other, 1) is not None

    on_two(url, test)


def test_a_cache_on_disk_follows_across_restarts(tmp_path: Path, url: str) -> None:
    async def work() -> None:
        cached = {"data": tmp_path / "data", "disk_bytes": 2**24, "memory_bytes": 0}
        async with depot_at(url, ANN) as one:
            [tenant] = one.tenants
            async with depot_at(url, ANN, **cached) as other:
                # Before it follows, it keeps nothing.
                await until(lambda: _true(other.store.is_current()))  # type: ignore[attr-defined]
                for number in (1, 2):
                    await put(other, other.tenants[0], number, content(str(number), 500))
                await asyncio.sleep(4 * QUICK_S)
            await one.delete(chunk_key(tenant, 1))
            async with depot_at(url, ANN, **cached) as other:
                assert isinstance(other.store, SharedStore)
                disk = other.store.tiers[0].store
                await until(lambda: _true(other.store.is_current()))  # type: ignore[attr-defined]
                kept = [await _is_there(disk, chunk_key(tenant, number)) for number in (1, 2)]
                assert kept == [False, True]
        assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["cache", "followed"]

    run(work())


def test_a_store_that_is_away(tmp_path: Path, redis_server: RedisServer) -> None:
    """Writes fail by name, reads miss, and what is cached stays readable for a while."""

    async def work() -> None:
        server = RedisServer("redis-server", tmp_path / "redis")
        server.start()
        try:
            url = f"{server.url}?deadline_s=0.4&silence_s=0.2&connect_s=0.2"
            async with depot_at(url, store_timeout_s=5.0) as depot:
                [tenant] = depot.tenants
                await until(lambda: _true(depot.store.is_current()))  # type: ignore[attr-defined]
                await put(depot, tenant, 1, content("1", 500))
                server.kill()
                assert await read(depot, 1) == content("1", 500)
                assert await read(depot, 2) is None
                for change in (
                    put(depot, tenant, 2, content("2", 500)),
                    depot.put_manifest(tenant, "n", b"{}", anything),
                    depot.delete(chunk_key(tenant, 1)),
                    depot.names.find("public", "n"),
                ):
                    with pytest.raises(StoreError):
                        await change
        finally:
            server.stop()

    run(work())


@pytest.mark.parametrize("url", ["http://localhost:1", "ftp://x", "/folder", "redis:"])
def test_what_is_no_store(url: str) -> None:
    async def work() -> None:
        async with depot_at(url):
            pass

    with pytest.raises(UnsupportedError):
        run(work())


def test_nothing_is_written_where_a_node_has_no_disk(tmp_path: Path) -> None:
    async def work() -> None:
        async with depot_at(f"file://{tmp_path}/bucket", data=tmp_path / "data") as depot:
            [tenant] = depot.tenants
            entry = Entry(chunk_key(tenant, 1), b"e", 1)
            await depot.put(tenant, entry, b"x", xxh3_64_intdigest(b"x"), None)
            await depot.put_manifest(tenant, "n", json.dumps({}).encode(), anything)

    run(work())
    assert not (tmp_path / "data").exists()
