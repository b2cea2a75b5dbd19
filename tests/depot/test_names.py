"""What every store of names does, over each there is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from secrets import token_hex

import pytest

from kdn.bench.s3_servers import S3Server
from kdn.bench.servers import RedisServer
from kdn.credentials import Credentials
from kdn.depot import object_log, redis_names, sqlite_names
from kdn.depot.names import MAX_VERSIONS, UNCHANGED, NameStore, SharedNames, Totals, Version
from kdn.depot.object_names import ObjectNames
from kdn.depot.shared_names import open_shared_names
from kdn.depot.small_objects import SmallObjects
from kdn.depot.sqlite_names import SqliteNames
from kdn.errors import ConditionError, ForgottenError, QuotaError, UnsupportedError
from kdn.store.object import open_object_store
from kdn.store.tally import Usage
from tests.node.harness import run
from tests.servers import emptied

Opened = Callable[[], AbstractAsyncContextManager[NameStore]]
FEW = 20
"""Changes that are remembered in tests."""


def yes(newest: str | None) -> bool:
    return True


def unless_there(newest: str | None) -> bool:
    return newest is None


@pytest.fixture(params=["sqlite", "redis", "cluster", "file", "s3"])
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Opened:
    """Opens one store of names; again and again the same."""
    for module in (sqlite_names, redis_names, object_log):
        monkeypatch.setattr(module, "MAX_CHANGES", FEW)
    monkeypatch.setattr(object_log, "STATE_EVERY", 8)
    if request.param == "sqlite":
        return lambda: closing_names(SqliteNames(tmp_path / "names.sqlite"))
    url = store_url(request, request.param, tmp_path)
    return lambda: closing_names(open_shared_names(url, Credentials()))


def store_url(request: pytest.FixtureRequest, kind: str, folder: Path) -> str:
    """Of an empty store."""
    if kind == "redis":
        server = request.getfixturevalue("redis_server")
        emptied(server)
        return str(server.url)
    if kind == "cluster":
        return f"{request.getfixturevalue('redis_cluster').url}?prefix=t{token_hex(4)}"
    if kind == "s3":
        request.getfixturevalue("s3_environment")
        return str(request.getfixturevalue("moto_s3").url(token_hex(4)))
    return f"file://{folder}/bucket"


@asynccontextmanager
async def closing_names(names: NameStore) -> AsyncIterator[NameStore]:
    try:
        yield names
    finally:
        await names.close()


def on(opened: Opened, test: Callable[[NameStore], Awaitable[None]]) -> None:
    async def work() -> None:
        async with opened() as names:
            await test(names)

    run(work())


def test_versions_follow_each_other_and_stay_readable(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        assert await names.find("t", "n") is None
        assert await names.get("t", "n") is None
        assert await names.history("t", "n") == []
        first = await names.put("t", "n", b"first", [b"k"], yes)
        second = await names.put("t", "n", b"the second", [b"k", b"l"], yes)
        assert (first.version, second.version) == (1, 2)
        assert (first.size_bytes, second.size_bytes) == (5, 10)
        assert first.etag != second.etag
        assert await names.get("t", "n") == (second, b"the second")
        assert await names.get("t", "n", 1) == (first, b"first")
        assert await names.get("t", "n", 3) is None
        assert await names.history("t", "n") == [second, first]
        assert await names.get("u", "n") is None, "another tenant's"

    on(opened, test)


def test_going_back_to_old_contents_is_a_new_version(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        first = await names.put("t", "n", b"{}", [], yes)
        second = await names.put("t", "n", b"{}", [], yes)
        assert first.etag != second.etag
        await names.delete("t", "n", yes)
        again = await names.put("t", "n", b"{}", [], yes)
        assert again.version == 1
        assert again.etag not in (first.etag, second.etag)

    on(opened, test)


def test_conditions(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        made = await names.put("t", "n", b"1", [], unless_there)
        with pytest.raises(ConditionError) as caught:
            await names.put("t", "n", b"2", [], unless_there)
        assert caught.value.newest == made.etag
        with pytest.raises(ConditionError):
            await names.delete("t", "n", lambda newest: newest == "other")
        with pytest.raises(ConditionError) as caught:
            await names.put("t", "m", b"2", [], lambda newest: newest == made.etag)
        assert caught.value.newest is None
        await names.put("t", "n", b"2", [], lambda newest: newest == made.etag)
        assert await names.delete("t", "n", yes)
        assert not await names.delete("t", "n", yes)
        assert await names.find("t", "n") is None
        assert await names.manifest("t", made) is None

    on(opened, test)


def test_old_versions_are_forgotten(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        for number in range(MAX_VERSIONS + 3):
            await names.put("t", "n", b"{}", [bytes([number])], yes)
        versions = [v.version for v in await names.history("t", "n")]
        assert versions == list(range(MAX_VERSIONS + 3, 3, -1))
        own, _ = await names.chunks_of("t", "n")
        assert len(own) == MAX_VERSIONS
        assert (await names.totals("t")).size_bytes == 2 * MAX_VERSIONS
        assert await names.get("t", "n", 3) is None

    on(opened, test)


def test_totals_are_those_of_what_is_there(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        rng = Random(7)
        for _ in range(60):
            name = rng.choice("abc")
            chunks = [bytes([rng.randrange(40)]) for _ in range(rng.randrange(10))]
            if rng.random() < 0.1:
                await names.delete("t", name, yes)
            else:
                await names.put("t", name, b"x" * rng.randrange(100), chunks, yes)
        all_names = [about.name for about in await names.page("t", "", "", 10)]
        histories = [await names.history("t", name) for name in all_names]
        used = [sum(map(len, await names.chunks_of("t", name))) for name in all_names]
        size_bytes = sum(about.size_bytes for history in histories for about in history)
        assert await names.totals("t") == Totals(len(all_names), size_bytes, sum(used))
        assert await names.totals("u") == Totals(0, 0, 0)

    on(opened, test)


def test_a_limit_makes_old_versions_give_way_and_then_refuses(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        most = Totals(names=2, size_bytes=100, chunks=3)
        await names.put("t", "n", b"x" * 60, [b"1"], yes, most)
        second = await names.put("t", "n", b"x" * 60, [b"2"], yes, most)
        assert await names.history("t", "n") == [second]
        assert await names.totals("t") == Totals(1, 60, 1)
        for name, size_bytes, chunks, what in (
            ("n", 101, [], "size_bytes"), ("m", 41, [], "size_bytes"),
            ("m", 1, [b"1", b"2", b"3"], "chunks"),
        ):  # fmt: skip
            before = await names.sequence()
            with pytest.raises(QuotaError, match=what):
                await names.put("t", name, b"x" * size_bytes, chunks, yes, most)
            assert await names.history("t", "n") == [second], "nothing gave way for a refusal"
            assert await names.sequence() == before
        await names.put("t", "m", b"x" * 40, [], yes, most)
        with pytest.raises(QuotaError, match="names"):
            await names.put("t", "o", b"", [], yes, most)
        await names.put("u", "o", b"", [], yes, most)

    on(opened, test)


def test_chunks_of_one_name_and_of_several(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        await names.put("t", "n", b"{}", [b"a", b"b"], yes)
        await names.put("t", "n", b"{}", [b"b", b"c"], yes)
        await names.put("t", "m", b"{}", [b"c", b"d"], yes)
        await names.put("u", "n", b"{}", [b"a"], yes)
        assert await names.chunks_of("t", "n") == ([b"a", b"b"], [b"c"])
        assert await names.chunks_of("t", "m") == ([b"d"], [b"c"])
        newest = {name: sorted(chunks) async for name, chunks in names.newest_chunks("t")}
        assert newest == {"m": [b"c", b"d"], "n": [b"b", b"c"]}
        await names.delete("t", "m", yes)
        assert await names.chunks_of("t", "n") == ([b"a", b"b", b"c"], [])

    on(opened, test)


def test_pages(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        made = {}
        for name in ("b", "a", "a/1", "a_", "A", "a/2", "ab"):
            await names.put("t", name, b"old", [], yes)
            made[name] = await names.put("t", name, name.encode(), [], yes)
        found: list[Version] = []
        while page := await names.page("t", "", found[-1].name if found else "", 2):
            assert len(page) <= 2
            found += page
        assert found == [made[name] for name in sorted(made)]
        assert [one.name for one in await names.page("t", "a/", "", 9)] == ["a/1", "a/2"]
        assert [one.name for one in await names.page("t", "a", "a/2", 1)] == ["a_"]
        assert await names.page("t", "a", "b", 9) == []
        assert await names.page("u", "", "", 9) == []

    on(opened, test)


def test_changes_of_all_tenants_in_order(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        begin = await names.sequence()
        assert await names.changes(begin, 10) == []
        first = await names.put("t", "n", b"{}", [], yes)
        other = await names.put("u", "m", b"{}", [], yes)
        second = await names.put("t", "n", b"{}", [], yes)
        await names.delete("t", "n", yes)
        found = await names.changes(begin, 10)
        assert [(one.tenant, one.name, one.version, one.etag) for one in found] == [
            ("t", "n", 1, first.etag), ("u", "m", 1, other.etag),
            ("t", "n", 2, second.etag), ("t", "n", 2, None),
        ]  # fmt: skip
        numbers = [one.sequence for one in found]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == await names.sequence()
        assert await names.changes(numbers[0], 2) == found[1:3]
        assert await names.changes(numbers[-1], 10) == []

    on(opened, test)


def test_a_tenant_s_last_change_is_its_own(opened: Opened) -> None:
    async def work() -> None:
        async with opened() as names:
            assert await names.last_change("t") == UNCHANGED
            await names.put("t", "n", b"{}", [], yes)
            own = await names.sequence()
            for _ in range(FEW + 1):  # its own is not even known any more
                await names.put("u", "m", b"{}", [], yes)
            assert await names.last_change("t") == own
            assert await names.last_change("u") == await names.sequence() > own
            await names.delete("t", "n", yes)
            own = await names.sequence()
            assert await names.last_change("t") == own
        async with opened() as names:
            assert await names.last_change("t") == own
            assert await names.last_change("v") == UNCHANGED

    run(work())


def test_a_refused_change_is_none(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        await names.put("t", "n", b"{}", [], yes)
        before = await names.sequence()
        with pytest.raises(ConditionError):
            await names.put("t", "n", b"{}", [], unless_there)
        with pytest.raises(ConditionError):
            await names.delete("t", "n", unless_there)
        assert not await names.delete("t", "m", yes)
        assert await names.sequence() == before

    on(opened, test)


def test_who_fell_far_behind_is_told_so(opened: Opened) -> None:
    async def test(names: NameStore) -> None:
        begin = await names.sequence()
        for _ in range(FEW + 1):
            await names.put("t", "n", b"{}", [], yes)
        with pytest.raises(ForgottenError):
            await names.changes(begin, 10)
        last = await names.sequence()
        known = await names.changes(last - FEW, 1000)
        assert [one.version for one in known] == list(range(2, FEW + 2))
        with pytest.raises(ForgottenError):
            await names.changes(last + 1, 10)
        with pytest.raises(ForgottenError):
            await names.changes(0, 10)

    on(opened, test)


def test_all_is_there_when_opened_again(opened: Opened) -> None:
    async def work() -> None:
        async with opened() as names:
            begin = await names.sequence()
            made = await names.put("t", "n", b"body", [b"k"], yes)
            changes = await names.changes(begin, 9)
        async with opened() as names:
            assert await names.get("t", "n") == (made, b"body")
            assert await names.chunks_of("t", "n") == ([b"k"], [])
            assert await names.totals("t") == Totals(1, 4, 1)
            assert await names.changes(begin, 9) == changes
            assert (await names.put("t", "n", b"", [], yes)).version == 2

    run(work())


NODES, WRITERS, ROUNDS = 3, 2, 4


async def at_once(opened: Opened, work: Callable[[NameStore, int], Awaitable[None]]) -> None:
    """By several writers at each of several nodes of one store."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(opened()) for _ in range(NODES)]
        async with asyncio.TaskGroup() as group:
            for number in range(NODES * WRITERS):
                group.create_task(work(nodes[number % NODES], number))


@pytest.fixture
def shared(opened: Opened, request: pytest.FixtureRequest) -> Opened:
    if "sqlite" in request.node.name:
        pytest.skip("one process has it open")
    return opened


def test_every_acknowledged_version_is_there_and_nobody_elses(shared: Opened) -> None:
    made: dict[int, tuple[Version, bytes]] = {}

    async def write(names: NameStore, number: int) -> None:
        for count in range(ROUNDS):
            body = f"{number} {count}".encode()
            about = await names.put("t", "n", body, [body], yes)
            assert about.version not in made, "two acknowledged puts have one version"
            made[about.version] = about, body

    async def test() -> None:
        await at_once(shared, write)
        assert sorted(made) == list(range(1, NODES * WRITERS * ROUNDS + 1))
        async with shared() as names:
            history = await names.history("t", "n")
            assert history == [made[version][0] for version in sorted(made, reverse=True)]
            for version in (1, 7, max(made)):
                assert await names.get("t", "n", version) == made[version]
            assert await names.totals("t") == Totals(
                1, sum(len(body) for _, body in made.values()), len(made)
            )

    run(test())


def test_compare_and_set_counts_to_what_was_acknowledged(shared: Opened) -> None:
    async def add(names: NameStore, number: int) -> None:
        for _ in range(ROUNDS):
            while True:
                found = await names.get("t", "n")
                about, body = found if found else (None, b"0")
                etag = about.etag if about else None
                value = str(int(body) + 1).encode()
                try:
                    await names.put("t", "n", value, [], lambda newest, etag=etag: newest == etag)
                except ConditionError:
                    continue
                break

    async def test() -> None:
        await at_once(shared, add)
        async with shared() as names:
            found = await names.get("t", "n")
            assert found is not None
            assert int(found[1]) == NODES * WRITERS * ROUNDS
            assert found[0].version == NODES * WRITERS * ROUNDS

    run(test())


def test_what_one_node_acknowledged_the_others_see_at_once(shared: Opened) -> None:
    async def test() -> None:
        async with shared() as one, shared() as other:
            begin = await one.sequence()
            for count in range(12):
                writer, reader = (one, other) if count % 2 else (other, one)
                made = await writer.put("t", "n", b"%d" % count, [], yes)
                assert await reader.get("t", "n") == (made, b"%d" % count)
                assert (await reader.changes(begin, 100))[-1].etag == made.etag
            assert await other.delete("t", "n", yes)
            assert await one.find("t", "n") is None
            assert (await one.put("t", "n", b"", [], unless_there)).version == 1

    run(test())


def test_a_writer_that_slept_goes_on(shared: Opened) -> None:
    """What it believes to be the next change was made by others, and forgotten, long ago."""

    async def test() -> None:
        async with shared() as one, shared() as other:
            await one.put("t", "mine", b"1", [], yes)
            for count in range(2 * FEW):
                await other.put("t", "n", b"%d" % count, [], yes)
            assert (await one.put("t", "mine", b"2", [], yes)).version == 2
            assert (await one.put("t", "n", b"", [], yes)).version == 2 * FEW + 1
            assert (await other.history("t", "mine"))[0].version == 2

    run(test())


def test_counts_of_all_nodes(shared: Opened) -> None:
    async def test() -> None:
        async with shared() as one, shared() as other:
            assert isinstance(one, SharedNames)
            assert isinstance(other, SharedNames)
            await one.put("t", "n", b"12345", [], yes)
            assert await one.count("t", Usage(2, 100)) == Usage(2, 105)
            assert await other.count("t", Usage()) == Usage(2, 105)
            assert await other.count("t", Usage(-1, -40)) == Usage(1, 65)
            assert await one.count("t", Usage(-7, -1000)) == Usage(0, 5)
            assert await one.count("u", Usage()) == Usage()
            assert await one.begin_recount("t", 3600.0)
            assert not await other.begin_recount("t", 3600.0)
            assert await other.begin_recount("t", 0.0)

    run(test())


def test_removed_objects_are_told(shared: Opened) -> None:
    async def test() -> None:
        async with shared() as one, shared() as other:
            assert isinstance(one, SharedNames)
            assert isinstance(other, SharedNames)
            await one.sequence()
            begin, known = await one.removed(0)
            assert known is None, "nobody knows what was before"
            assert await one.removed(begin) == (begin, [])
            await other.remove([b"a", b"b"])
            await other.put("t", "n", b"", [], yes)
            await other.remove([b"c"])
            now, found = await one.removed(begin)
            assert found == [b"a", b"b", b"c"]
            assert await one.removed(now) == (now, [])

    run(test())


def test_a_server_that_ignores_conditions_holds_no_names(
    rclone_s3: S3Server, s3_environment: None
) -> None:
    async def test() -> None:
        async with closing_names(open_shared_names(rclone_s3.url("n"), Credentials())) as names:
            assert await names.find("t", "n") is None
            with pytest.raises(UnsupportedError, match="conditional writes"):
                await names.put("t", "n", b"{}", [], yes)

    run(test())


def test_a_server_that_evicts_any_key_holds_no_names(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async def test() -> None:
        async with closing_names(open_shared_names(redis_server.url, Credentials())) as names:
            with pytest.raises(UnsupportedError, match="allkeys-lru"):
                await names.put("t", "n", b"{}", [], yes)

    emptied(redis_server)
    redis_server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru", "maxmemory", "100mb")
    try:
        run(test())
    finally:
        redis_server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "0")


def test_what_names_in_a_bucket_cost(tmp_path: Path) -> None:
    """As `object_names.py` says: a constant number of requests, and never a list."""

    async def test() -> None:
        bucket = open_object_store(f"file://{tmp_path}/bucket").bucket

        async def cost(work: Awaitable[object]) -> dict[str, int]:
            before = Counter(bucket.costs.requests)
            await work
            return dict(Counter(bucket.costs.requests) - before)

        async with closing_names(ObjectNames(SmallObjects(bucket))) as names:
            await names.put("t", "n", b"{}", [], yes)
            assert await cost(names.put("t", "n", b"{}", [b"k"], yes)) == {"put": 2}
            assert await cost(names.find("t", "n")) == {"get": 1}
            assert await cost(names.get("t", "n")) == {"get": 2}
            assert await cost(names.page("t", "", "", 9)) == {"get": 1}
            assert await cost(names.chunks_of("t", "n")) == {"get": 1}
            assert await cost(names.changes(await names.sequence(), 9)) == {"get": 1}
            many = asyncio.gather(*(names.find("t", "n") for _ in range(50)))
            assert await cost(many) == {"get": 2}, "those who ask at once share an answer"
            assert await cost(names.delete("t", "n", yes)) == {"get": 1, "put": 1, "delete": 2}

    run(test())
