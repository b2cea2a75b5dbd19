"""How objects lie in Redis: long ones, damaged ones, what others left there, what is evicted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kdn.bench import servers
from kdn.bench.servers import RedisServer
from kdn.credentials import Credentials
from kdn.errors import FormatError, NoSpaceError, NotAllowedError, StoreError
from kdn.store.base import Entry, Hints, Store
from kdn.store.redis import RedisStore, open_redis_store
from kdn.store.redis_record import (
    PART_BYTES,
    RECORD_BYTES,
    Keys,
    new_record,
    pack_record,
    parse_record,
)
from kdn.store.redis_wire import Job
from kdn.store.streaming import Ask, Collected
from tests.servers import NEEDS_REDIS, emptied
from tests.store.contract import closing, content, etag_of, listed, put, read

LIMIT_S = 30.0
LONG = os.urandom(2 * PART_BYTES + 12_345)


def run(server: RedisServer, test: Callable[[Store], Awaitable[None]], query: str = "") -> None:
    async def bounded() -> None:
        url = server.url + query
        async with asyncio.timeout(LIMIT_S), closing(open_redis_store(url, Credentials())) as store:
            await test(store)

    asyncio.run(bounded())


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    emptied(redis_server)
    return redis_server


def name_of(key: bytes) -> str:
    return Keys("kdn").of(key).decode()


def names(server: RedisServer) -> list[bytes]:
    found: list[bytes] = server.ask("KEYS", "*")
    return sorted(found)


# long objects


def test_a_long_object_is_read_back_in_any_range(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        await put(store, b"long", LONG)
        assert await read(store, b"long") == LONG
        edges = [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, len(LONG)]
        for start in edges:
            for end in edges:
                span = await store.get(b"long", start, end)
                assert span is not None
                assert bytes(span.data) == LONG[start:end]
        [found] = await store.lookup([b"long"], head_bytes=PART_BYTES + 10)
        assert found is not None
        assert found.head == LONG[: PART_BYTES + 10]

    run(server, test)
    assert len(names(server)) == 3


def test_many_asks_are_answered_each_with_its_own(server: RedisServer) -> None:
    """Misses, long objects and empty ranges among them."""
    asks = [
        Ask(b"a", 10, 90, etag_of(content("a", 100))),
        Ask(b"missing", 0, 50, b"e"),
        Ask(b"long", 5, len(LONG) + 9, etag_of(LONG)),
        Ask(b"a", 0, 50, b"another"),
        Ask(b"k" * 99, 0, 50, b"e"),
        Ask(b"b", 30, 30, etag_of(content("b", 100))),
        Ask(b"b", 0, 100, etag_of(content("b", 100))),
    ]
    expected = [
        content("a", 100)[10:90], None, LONG[5:], None, None, b"", content("b", 100),
    ]  # fmt: skip

    async def test(store: Store) -> None:
        for key in (b"a", b"b"):
            await put(store, key, content(key, 100))
        await put(store, b"long", LONG)
        collected, lost = Collected(len(asks)), []
        collected.gone = lost.append  # type: ignore[method-assign]
        await store.read_into(asks, collected)
        assert sorted(lost) == [1, 3, 4]
        assert collected.found == [data or b"" for data in expected]
        pieces = [piece async for piece in store.read_spans(asks)]
        assert [piece.number for piece in pieces] == list(range(len(asks)))
        assert [piece.data for piece in pieces] == expected

    run(server, test)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_half_evicted_object_is_a_miss_and_can_be_put_again(
    server: RedisServer, part: int
) -> None:
    async def test(store: Store) -> None:
        entry = await put(store, b"long", LONG)
        server.ask("DEL", names(server)[part])
        assert await store.lookup([b"long"]) == [None]
        assert await read(store, b"long") is None
        collected, lost = Collected(1), []
        collected.gone = lost.append  # type: ignore[method-assign]
        await store.read_into([Ask(b"long", 0, len(LONG), entry.etag)], collected)
        assert lost == [0]
        other = content("other", 100)
        assert (await put(store, b"long", other)).etag == etag_of(other)
        assert await read(store, b"long") == other

    run(server, test)


def test_nothing_of_a_long_object_is_left_behind(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        await put(store, b"long", LONG)
        other = os.urandom(PART_BYTES + 1)
        await put(store, b"long", other)  # taken
        assert len(names(server)) == 3
        await put(store, b"long", other, replacing=etag_of(LONG))
        assert len(names(server)) == 2
        assert all(server.ask("TTL", name) == -1 for name in names(server)), "kept for good"
        await store.delete(b"long")

    run(server, test, "?wait=0")
    assert names(server) == []


def test_parts_of_a_writer_that_died_end_by_themselves(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(store: Store) -> None:
        assert isinstance(store, RedisStore)

        async def dies(*_: object) -> None:
            raise StoreError("died")

        monkeypatch.setattr(store._publisher, "_publish", dies)
        with pytest.raises(StoreError, match="died"):
            await put(store, b"long", LONG)
        assert await store.lookup([b"long"]) == [None]

    run(server, test)
    assert len(names(server)) == 2
    assert all(0 < server.ask("TTL", name) <= 3600 for name in names(server))


@pytest.mark.parametrize("replacing", [None, b"another"])
def test_whoever_acknowledges_a_long_object_keeps_its_parts(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, replacing: bytes | None
) -> None:
    async def test(store: Store) -> None:
        assert isinstance(store, RedisStore)

        async def dies(*_: object) -> None:
            raise StoreError("died")

        with monkeypatch.context() as patched:
            patched.setattr(store._publisher, "_keep_parts", dies)
            with pytest.raises(StoreError, match="died"):
                await put(store, b"long", LONG)
        await put(store, b"long", LONG, replacing=replacing)
        assert all(server.ask("TTL", name) == -1 for name in names(server)), "kept for good"

    run(server, test, "?wait=0")


def test_a_lost_answer_ends_no_long_object(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(store: Store) -> None:
        assert isinstance(store, RedisStore)
        publisher, run_jobs = store._publisher, store._shards.run

        async def twice(jobs: Sequence[Job]) -> None:
            await run_jobs(jobs)
            if any(command[0] == b"SET" for job in jobs for command in job.commands()):
                await run_jobs(jobs)

        monkeypatch.setattr(publisher._shards, "run", twice)
        assert (await put(store, b"long", LONG)).etag == etag_of(LONG)
        assert all(server.ask("TTL", name) == -1 for name in names(server)), "kept for good"

    run(server, test, "?wait=0")


def test_objects_end_when_they_are_told_to(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        await put(store, b"key", b"data")
        await put(store, b"long", LONG)
        assert await read(store, b"long") == LONG
        assert 0 < server.ask("TTL", name_of(b"key")) <= 1000
        assert all(server.ask("TTL", name) > 0 for name in names(server))

    run(server, test, "?ttl_s=1000")


# what others left there


def _value(key: bytes, size_bytes: int, **changes: Any) -> bytes:
    entry = Entry(key, b"etag", size_bytes, Hints(b"p", 1.0))
    return pack_record(new_record(entry, changes.pop("checksum", 0)))


TORN = "a size of parts that are not there"
HOSTILE = {
    "a list": ("RPUSH", "x"),
    "a hash": ("HSET", "a", "b"),
    "a short string": ("SET", b"KDR1"),
    "zeros": ("SET", bytes(300)),
    "a record of another key": ("SET", _value(b"other", 4) + b"data"),
    "a record without bytes": ("SET", _value(b"key", 4)),
    "fewer bytes than told": ("SET", _value(b"key", 100) + b"data"),
    "more bytes than told": ("SET", _value(b"key", 2) + b"data"),
    "a huge size": ("SET", _value(b"key", 1 << 60) + b"data"),
    TORN: ("SET", _value(b"key", 1 << 31) + bytes(PART_BYTES)),
    "a flipped bit": ("SET", bytes([_value(b"key", 4)[0] ^ 1]) + _value(b"key", 4)[1:] + b"data"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_object_is_a_miss_and_gives_way(server: RedisServer, what: str) -> None:
    command, *values = HOSTILE[what]
    data = content("good", 1000)

    async def test(store: Store) -> None:
        server.ask(command, name_of(b"key"), *values)
        assert await store.lookup([b"key"], head_bytes=10) == [None]
        assert await store.get(b"key") is None
        if what != TORN:  # the part that is there may be read
            assert await store.get(b"key", 1, 3, etag=b"etag") is None
        assert await listed(store) == []
        assert (await store.stats()).objects == (what == TORN)
        assert (await put(store, b"key", data)).etag == etag_of(data)
        assert await read(store, b"key") == data
        server.ask("DEL", name_of(b"key"))
        server.ask(command, name_of(b"key"), *values)
        assert await store.delete(b"key") is False
        assert names(server) in ([], [name_of(b"key").encode() + b":ack"])

    run(server, test)


def test_damaged_bytes_are_a_miss_and_set_aside(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        await put(store, b"key", content("a", 1000))
        server.ask("SETRANGE", name_of(b"key"), RECORD_BYTES + 500, b"\xff\x00\xff")
        assert await store.get(b"key") is None
        assert await store.lookup([b"key"]) == [None]
        stats = await store.stats()
        assert (stats.corruptions, stats.objects) == (1, 0)

    run(server, test)


def test_strange_keys_are_not_listed(server: RedisServer) -> None:
    for name in ("kdn:{zz}", "kdn:{}", "kdn:{6 1}", "kdn:{61}:x", f"kdn:{{{'61' * 65}}}", "other"):
        server.ask("SET", name, "x")

    async def test(store: Store) -> None:
        await put(store, b"a", b"data")
        assert await listed(store) == [b"a"]
        assert (await store.stats()).objects == 1

    run(server, test)


def test_prefixes_keep_stores_apart(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        await put(store, b"key", b"mine")
        other = open_redis_store(server.url + "?prefix=other", Credentials())
        async with closing(other):
            assert await read(other, b"key") is None
            await put(other, b"key", b"theirs")
            assert await read(other, b"key") == b"theirs"
        assert await read(store, b"key") == b"mine"

    run(server, test)


def test_a_record_is_as_documented() -> None:
    entry = Entry(b"key", b"etag", 5, Hints(b"parent", 0.5))
    record = new_record(entry, 7)
    told = pack_record(record)
    assert len(told) == RECORD_BYTES
    assert told[:9] == b"KDR1\x04etag"
    assert told[37:39] == b"\x01\x06"
    assert told[39:45] == b"parent"
    assert told[103:127] == bytes.fromhex("000000000000e03f 0500000000000000 0700000000000000")
    assert told[127:143] == record.nonce
    assert told[248:] == xxh3_64_intdigest(b"key" + told[:248]).to_bytes(8, "little")
    assert parse_record(b"key", told) == record
    for at in range(RECORD_BYTES):
        damaged = bytearray(told)
        damaged[at] ^= 4
        with pytest.raises(FormatError):
            parse_record(b"key", bytes(damaged))
    for cut in (b"", told[:-1], told + b"x"):
        with pytest.raises(FormatError):
            parse_record(b"key", cut)


# memory, passwords, TLS


@NEEDS_REDIS
def test_the_server_evicts_and_misses_are_misses(tmp_path: Path) -> None:
    """With long objects among them."""

    async def test(store: Store) -> None:
        expected = {b"long": os.urandom(PART_BYTES + 100)}
        await put(store, b"long", expected[b"long"])
        for number in range(400):
            key = b"%d" % number
            expected[key] = os.urandom(200_000)
            await put(store, key, expected[key])
        found = await store.lookup(list(expected))
        held = [key for key, entry in zip(expected, found, strict=True) if entry]
        assert 100 < len(held) < 400
        for key, data in expected.items():
            assert await read(store, key) in (None, data)
        stats = await store.stats()
        assert stats.capacity_bytes == 64 << 20

    with servers.redis_server(
        tmp_path, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"
    ) as server:
        run(server, test)


@NEEDS_REDIS
def test_no_space_is_told_by_name(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put(store, b"small", content("small", 100))
        puts = [put(store, b"%d" % number, os.urandom(1 << 20)) for number in range(10)]
        with pytest.raises(NoSpaceError, match="OOM"):
            await asyncio.gather(*puts)
        assert await read(store, b"small") == content("small", 100)

    with servers.redis_server(tmp_path, "--maxmemory", "4mb") as server:
        run(server, test)


@NEEDS_REDIS
def test_passwords_and_tls(tmp_path: Path, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    port = servers.free_port()
    options = ["--requirepass", "se cret", "--tls-port", str(port), "--tls-cert-file", cert]
    options += ["--tls-key-file", key, "--tls-auth-clients", "no"]
    server = RedisServer(servers.redis_program(), tmp_path, options)

    async def trip(url: str, credentials: Credentials) -> None:
        async with asyncio.timeout(LIMIT_S), closing(open_redis_store(url, credentials)) as store:
            data = os.urandom(300_000)
            await put(store, os.urandom(8), data)
            await put(store, b"key", data)
            assert await read(store, b"key") is not None

    try:
        server.start(lambda: server.ask("PING", password="se cret"))
        plain, secure = f"127.0.0.1:{server.port}", f"127.0.0.1:{port}"
        asyncio.run(trip(f"redis://:se%20cret@{plain}", Credentials()))
        asyncio.run(trip(f"redis://{plain}/3", Credentials(token="se cret")))
        asyncio.run(trip(f"rediss://default:se%20cret@{secure}", Credentials(tls_ca=cert)))
        for url in (f"redis://{plain}", f"redis://:wrong@{plain}"):
            with pytest.raises(NotAllowedError) as refused:
                asyncio.run(trip(url, Credentials()))
            assert "wrong@" not in str(refused.value)
        with pytest.raises(StoreError, match="certificate is not trusted"):
            asyncio.run(trip(f"rediss://:x@{secure}?deadline_s=0.2", Credentials()))
    finally:
        server.stop()
