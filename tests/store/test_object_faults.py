"""Buckets in which somebody else wrote, servers that are away, and what is paid for."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kdn.bench.s3_servers import S3Server
from kdn.bench.servers import free_port
from kdn.errors import LimitError, StoreError, UnsupportedError
from kdn.store.base import Entry, Hints
from kdn.store.disk_format import BLOCK_BYTES, encode_header
from kdn.store.streaming import Ask, Collected
from tests.store.contract import closing, content, etag_of, listed, put, read

pytest.importorskip("obstore")

from obstore.store import MemoryStore as MemoryBucket

from kdn.store import object_bucket, object_reads
from kdn.store.object import ObjectStore, open_object_store
from kdn.store.object_bucket import Abilities, Bucket
from kdn.store.object_layout import key_of, path_of
from kdn.store.object_location import parse_location

KEY = b"0123456789"
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def _no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdn.store.object_requests.LEAVE_S", 0)


def run(test: Callable[[ObjectStore, MemoryBucket], Awaitable[None]]) -> None:
    """With a store, and the bucket under it."""

    async def bounded() -> None:
        bucket = MemoryBucket()
        async with asyncio.timeout(LIMIT_S), closing(ObjectStore(Bucket(bucket, "b"))) as store:
            assert isinstance(store, ObjectStore)
            await test(store, bucket)

    asyncio.run(bounded())


def ask_for(data: bytes, start: int = 0, end: int | None = None) -> Ask:
    return Ask(KEY, start, len(data) if end is None else end, etag_of(data))


async def streamed(store: ObjectStore, *asks: Ask) -> tuple[list[bytes], list[int]]:
    """What came of each, and which were gone: both ways of reading agree on that."""

    class Noted(Collected):
        def __init__(self) -> None:
            super().__init__(len(asks))
            self.lost: list[int] = []

        def gone(self, number: int) -> None:
            self.lost.append(number)

    into, pieces = Noted(), Noted()
    await store.read_into(asks, into)
    async for number, _, data in store.read_spans(asks):
        if data is None:
            pieces.gone(number)
        else:
            pieces.found[number] += bytes(data)
    assert (into.found, sorted(into.lost)) == (pieces.found, pieces.lost)
    return into.found, into.lost


def laid_out(entry: Entry, data: bytes) -> bytes:
    return encode_header(entry, data) + data


DATA = content("sound", 3 * BLOCK_BYTES + 17)
SOUND = laid_out(Entry(KEY, etag_of(DATA), len(DATA)), DATA)


def resealed(head: bytearray, size: int) -> bytes:
    """A header whose own checksum fits."""
    struct.pack_into("<Q", head, size - 8, xxh3_64_intdigest(bytes(head[: size - 8])))
    return bytes(head)


def huge() -> bytes:
    head = bytearray(SOUND[:4096])
    struct.pack_into("<IQ", head, 12, 0xFFFF_FFF0, 2**62)
    return bytes(head)


def swollen() -> bytes:
    """It says that it is larger than it is."""
    more = content("more", 5 * BLOCK_BYTES)
    return encode_header(Entry(KEY, b"e", len(more)), more) + DATA


def foreign_hint(saved_s: float) -> bytes:
    entry = Entry(KEY, b"e", 5, Hints(None, 1.0))
    head = bytearray(encode_header(entry, b"hello"))
    struct.pack_into("<d", head, 24, saved_s)
    return resealed(head, len(head)) + b"hello"


HOSTILE = {
    "empty": b"",
    "short": b"KDNFILE",
    "text": b"hello " * 1000,
    "a header alone": SOUND[: len(SOUND) - len(DATA)],
    "cut": SOUND[:-1],
    "one more": SOUND + b"x",
    "another's": laid_out(Entry(b"other", etag_of(DATA), len(DATA)), DATA),
    "huge": huge(),
    "swollen": swollen(),
    "a bit of the header": SOUND[:70] + bytes([SOUND[70] ^ 1]) + SOUND[71:],
    "seconds that are none": foreign_hint(float("nan")),
    "seconds before now": foreign_hint(-1.0),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_none_of_ours_is_a_miss_and_gives_way(what: str) -> None:
    async def test(store: ObjectStore, bucket: MemoryBucket) -> None:
        await bucket.put_async(path_of(KEY), HOSTILE[what])
        for _ in range(2):
            assert await store.lookup([KEY], head_bytes=100) == [None]
            assert await store.get(KEY) is None
        assert await streamed(store, ask_for(DATA)) == ([b""], [0])
        assert await listed(store) == []
        assert (await store.stats()).corruptions == 1
        entry = await put(store, KEY, DATA)
        assert entry.etag == etag_of(DATA)
        assert await read(store, KEY) == DATA
        assert await streamed(store, ask_for(DATA)) == ([DATA], [])
        assert (await store.stats()).corruptions == 1

    run(test)


@pytest.mark.parametrize("at", [0, BLOCK_BYTES + 5, len(DATA) - 1])
def test_a_wrong_byte_is_never_returned(at: int) -> None:
    async def test(store: ObjectStore, bucket: MemoryBucket) -> None:
        wrong = bytearray(SOUND)
        wrong[len(SOUND) - len(DATA) + at] ^= 1
        await bucket.put_async(path_of(KEY), bytes(wrong))
        block = at // BLOCK_BYTES
        others = [number for number in range(4) if number != block]
        for number in others:  # those are sound, and can be verified for themselves
            begin = number * BLOCK_BYTES
            span = await store.get(KEY, begin + 3, begin + 9)
            assert span is not None
            assert bytes(span.data) == DATA[begin + 3 : begin + 9]
        assert await store.get(KEY, block * BLOCK_BYTES + 1, block * BLOCK_BYTES + 2) is None
        assert await store.lookup([KEY]) == [None], "set aside as a whole"
        assert (await store.stats()).corruptions == 1
        await put(store, KEY, DATA)
        assert await read(store, KEY) == DATA

    run(test)


def test_a_damaged_object_can_be_deleted() -> None:
    async def test(store: ObjectStore, bucket: MemoryBucket) -> None:
        await bucket.put_async(path_of(KEY), b"rubbish")
        assert await store.delete(KEY) is False
        assert [meta for page in bucket.list() for meta in page] == []

    run(test)


def test_what_changes_underneath_is_never_mixed() -> None:
    """Between the lookup and the read, and between two ranges."""

    async def test(store: ObjectStore, bucket: MemoryBucket) -> None:
        other = content("other", len(DATA))
        await put(store, KEY, DATA)
        [entry] = await store.lookup([KEY])
        assert entry is not None
        first = await store.get(KEY, 0, 10, etag=entry.etag)
        assert first is not None
        there = laid_out(Entry(KEY, etag_of(other), len(other)), other)
        await bucket.put_async(path_of(KEY), there)
        assert await streamed(store, ask_for(DATA, 10, 20)) == ([b""], [0])
        assert await store.get(KEY, 10, 20, etag=entry.etag) is None
        span = await store.get(KEY, 10, 20)
        assert span is not None
        assert (span.entry.etag, bytes(span.data)) == (etag_of(other), other[10:20])
        await bucket.delete_async(path_of(KEY))
        assert await store.get(KEY, 10, 20) is None
        assert await streamed(store, ask_for(other)) == ([b""], [0])

    run(test)


def test_the_parts_of_a_large_object_are_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_reads, "PART_BYTES", BLOCK_BYTES)

    async def test(store: ObjectStore, bucket: MemoryBucket) -> None:
        other = content("other", len(DATA))
        await put(store, KEY, DATA)
        changed = laid_out(Entry(KEY, etag_of(other), len(other)), other)
        get, asked = store.bucket.get, 0

        async def meddled(path: str, *args: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 3:
                await bucket.put_async(path, changed)
            return await get(path, *args, **options)

        monkeypatch.setattr(store.bucket, "get", meddled)
        assert await read(store, KEY) == other, "all of it anew"
        assert asked > 4

    run(test)


def test_large_objects_go_in_parts_and_the_first_wins(
    moto_s3: S3Server, s3_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_bucket, "LARGE_BYTES", 6 << 20)
    monkeypatch.setattr(object_bucket, "UPLOAD_PART_BYTES", 5 << 20)

    async def test() -> None:
        url = moto_s3.url("tests/large")
        async with closing(open_object_store(url)) as one, closing(open_object_store(url)) as two:
            # One after the other: moto looks and writes in two steps, and two may look at once.
            first, second = os.urandom(11 << 20), os.urandom(11 << 20)
            kept = [await put(one, KEY, first), await put(two, KEY, second)]
            assert [entry.etag for entry in kept] == [etag_of(first)] * 2
            assert await read(two, KEY) == first
            assert isinstance(one, ObjectStore)
            left = [path async for page in one.bucket.list("uploads") for path in page]
            assert left == [], "nothing is left of the uploads"
            assert (await one.stats()).costs.requests["copy"] == 2, "one to try it, one in earnest"

    asyncio.run(test())


@pytest.mark.parametrize("abilities", [Abilities(True, False), Abilities(False, False)])
def test_servers_that_ignore_conditions_still_give_one_answer(abilities: Abilities) -> None:
    async def test() -> None:
        bucket = MemoryBucket()
        store = ObjectStore(Bucket(bucket, "b", abilities=abilities))
        writers = [content(f"writer {i}", 100 + i) for i in range(8)]
        entries = await asyncio.gather(*(put(store, KEY, data) for data in writers))
        winner = await read(store, KEY)
        assert winner is not None
        assert {entry.etag for entry in entries} == {etag_of(winner)}
        other = content("other", 50)
        entry = await put(store, KEY, other, replacing=etag_of(winner))
        assert entry.etag == etag_of(other)
        assert await read(store, KEY) == other

    asyncio.run(test())


def test_finds_out_what_servers_keep_to(
    moto_s3: S3Server, rclone_s3: S3Server, s3_environment: None
) -> None:
    async def test() -> None:
        for server, expected in ((moto_s3, (True, True)), (rclone_s3, (False, False))):
            for requests in (3, 3 if server is rclone_s3 else 2):  # from the second time on
                store = open_object_store(server.url("tests/abilities"))
                assert await store.bucket.abilities() == expected
                assert store.bucket.costs.requests["put"] == requests

    asyncio.run(test())


# servers that are away


def test_a_server_that_is_away_is_an_error_and_soon(s3_environment: None) -> None:
    async def test() -> None:
        url = f"s3://kdn/p?endpoint=http://127.0.0.1:{free_port()}&region=us-east-1"
        async with closing(open_object_store(url)) as store:
            began_s = time.monotonic()
            works: tuple[Awaitable[Any], ...] = (
                store.lookup([b"%d" % n for n in range(100)]),
                store.get(KEY),
                put(store, KEY, DATA),
                store.delete(KEY),
                listed(store),
                store.read_into([ask_for(DATA)], Collected(1)),
            )
            answers = await asyncio.gather(*works, return_exceptions=True)
            assert [type(answer) for answer in answers] == [StoreError] * len(answers)
            assert time.monotonic() - began_s < 10

    asyncio.run(test())


def test_a_server_that_falls_silent_is_an_error_at_the_deadline(
    s3_environment: None, rclone_s3: S3Server
) -> None:
    async def test() -> None:
        store = open_object_store(rclone_s3.url("tests/silent"))
        await put(store, KEY, DATA)
        store.bucket.deadline_s = 0.5
        rclone_s3.pause()
        try:
            for work in (store.lookup([KEY]), store.get(KEY), put(store, b"new", DATA)):
                began_s = time.monotonic()
                with pytest.raises(StoreError, match="no answer within"):
                    await work
                assert time.monotonic() - began_s < 8  # seconds are for a busy machine
        finally:
            rclone_s3.resume()
        store.bucket.deadline_s = 10
        assert await read(store, KEY) == DATA, "and when it is back, all is well"

    asyncio.run(test())


def test_an_endpoint_without_tls_says_what_it_needs(
    s3_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")

    async def look() -> None:
        async with closing(open_object_store("s3://bucket/kdn")) as store:
            await store.lookup([KEY])

    with pytest.raises(StoreError, match=r"needs \?allow_http=true"):
        asyncio.run(asyncio.wait_for(look(), LIMIT_S))


def test_a_bucket_that_is_none_is_named(moto_s3: S3Server, s3_environment: None) -> None:
    async def test() -> None:
        store = open_object_store(moto_s3.url().replace("s3://kdn/", "s3://nobodys-bucket/"))
        with pytest.raises(StoreError, match="nobodys-bucket"):
            await put(store, KEY, DATA)

    asyncio.run(test())


# costs


def test_counts_what_is_paid_for() -> None:
    async def test(store: ObjectStore, bucket: MemoryBucket) -> None:
        keys = [b"%d" % number for number in range(32)]
        for key in keys:
            await put(store, key, content(key, 1000))
        costs = (await store.stats()).costs
        assert costs.requests == {"put": 32 + 3}, "and three to know the server"
        assert costs.sent_bytes >= 32_000
        fresh = ObjectStore(Bucket(bucket, "b"))
        found = await fresh.lookup([*keys, b"none"], head_bytes=100)
        assert sum(entry is not None for entry in found) == 32
        assert (await fresh.stats()).costs.requests == {"get": 33}, "one a key, and no list"
        asks = [Ask(entry.key, 0, 1000, entry.etag) for entry in found if entry]
        received = Collected(32)
        await fresh.read_into(asks, received)
        assert received.found == [content(key, 1000) for key in keys]
        costs = (await fresh.stats()).costs
        assert costs.requests == {"get": 65}, "and one a span"
        assert 32_000 <= costs.received_bytes <= 33 * 4096 + 33_000
        copied = costs.copy()
        await fresh.get(keys[0])
        assert costs == copied, "copies are given away"

    run(test)


# locations


@pytest.mark.parametrize(
    ("url", "name", "options"),
    [
        ("s3://bucket", "s3://bucket", {}),
        ("s3://bucket/a/b/", "s3://bucket/a/b", {}),
        (
            "s3://b/p?endpoint=http://127.0.0.1:9000&region=r&allow_http=true",
            "s3://b/p",
            {"endpoint": "http://127.0.0.1:9000", "region": "r", "allow_http": "true"},
        ),
        ("az://container/x?account=me", "az://container/x", {"account": "me"}),
        ("file:///srv/kdn", "file:///srv/kdn", {}),
    ],
)
def test_reads_locations(url: str, name: str, options: dict[str, str]) -> None:
    location = parse_location(url)
    assert (location.name, location.options) == (name, options)


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://key:secret@bucket/prefix",
        "s3://bucket?secret_access_key=hunter2",
        "s3://bucket?allow_http=perhaps",
        "s3://bucket?endpoint=ftp://host",
        "gs://bucket?region=r",
        "file://host/path",
        "file:relative",
        "http://host",
    ],
)
def test_refuses_other_locations_and_shows_no_secret(url: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        parse_location(url)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("url", ["az://container/x", "file:///dev/null/kdn"])
def test_what_cannot_be_opened_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UnsupportedError, match=url.partition("?")[0]):
        open_object_store(url)


def test_paths_sort_as_keys_do() -> None:
    keys = [os.urandom(size) for size in range(1, 65) for _ in range(20)]
    keys += [key[:size] for key in keys[-20:] for size in (1, 8, 9, 10, 11, 63)]
    assert sorted(map(path_of, keys)) == [path_of(key) for key in sorted(keys)]
    assert [key_of(path_of(key)) for key in keys] == keys
    for path in ("objects/00/-/xy", "objects/00/-/", "names/00/-/00", "objects/00/00", "-"):
        assert key_of(path) is None


def test_what_is_larger_than_anybody_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdn.store.object.MAX_OBJECT_BYTES", 1000)

    async def test(store: ObjectStore, bucket: MemoryBucket) -> None:
        with pytest.raises(LimitError):
            await put(store, KEY, content("large", 1001))

    run(test)
