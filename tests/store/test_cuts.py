"""Objects that are cut to make room: in memory, on disk and in tiers. What is left keeps its name,
every byte of it is right, and more bytes make it whole again."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextlib import closing as closing_now
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kdn.errors import FormatError, LimitError, NoSpaceError
from kdn.store.base import Entry, Hints, Store, is_taken
from kdn.store.disk import open_disk
from kdn.store.disk_folder import ObjectFolder
from kdn.store.disk_format import decode_header, encode_header
from kdn.store.evict import Retention, open_policy
from kdn.store.memory import MemoryStore
from kdn.store.tally import Usage
from kdn.store.tiered import Tier, TieredStore
from tests.store.contract import AMPLE_BYTES, closing, content, etag_of, put, read

SIZE, KEPT = 40_000, 12_000
CUTS = (4_000, KEPT, SIZE)
ROOM = 3 * (SIZE + 6_000)
"""For three whole objects, whatever a store adds to each."""
HINTS = Hints(saved_s=1.0, cuts=CUTS)
KINDS = ("memory", "disk", "tiered")


@asynccontextmanager
async def opened(
    kind: str, folder: Path, room: int = ROOM, policy: str = "graded"
) -> AsyncIterator[Store]:
    """`tiered`: both of the same size."""
    async with AsyncExitStack() as stack:
        stores: list[tuple[str, Store]] = []
        if kind != "disk":
            stores.append(("memory", MemoryStore(room, open_policy(policy))))
        if kind != "memory":
            stores.append(("disk", await open_disk(folder, room, open_policy(policy))))
        tiers = [Tier(name, store, 30.0) for name, store in stores]
        store = TieredStore(tiers) if len(tiers) > 1 else stores[0][1]
        yield await stack.enter_async_context(closing(store))


def run(kind: str, folder: Path, test: Callable[[Store], Awaitable[None]], **options: str) -> None:
    async def work() -> None:
        async with asyncio.timeout(60.0), opened(kind, folder, **options) as store:
            await test(store)

    asyncio.run(work())


def data_of(number: int) -> bytes:
    return content(f"object {number}", SIZE)


async def put_some(store: Store, count: int) -> None:
    for number in range(count):
        await put(store, b"%d" % number, data_of(number), HINTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_store_cuts_before_it_drops(kind: str, tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put_some(store, 6)
        stats = await store.stats()
        assert (stats.objects, stats.evictions) == (6, 0)
        assert stats.cuts >= 4
        assert stats.size_bytes <= stats.capacity_bytes
        assert await read(store, b"5") == data_of(5), "the newest is whole"
        total = 0
        for number in range(6):
            [entry] = await store.lookup([b"%d" % number], head_bytes=100)
            assert entry is not None
            assert entry.etag == etag_of(data_of(number)), "it is still the same object"
            assert entry.size_bytes in (KEPT, SIZE)
            assert entry.is_cut == (entry.size_bytes == KEPT)
            assert entry.head == data_of(number)[:100]
            assert await read(store, entry.key) == data_of(number)[: entry.size_bytes]
            span = await store.get(entry.key, KEPT - 10, SIZE, etag=entry.etag)
            assert span is not None
            assert bytes(span.data) == data_of(number)[KEPT - 10 : entry.size_bytes]
            total += entry.size_bytes
        assert store.usage(b"") == Usage(6, total)
        assert [e.size_bytes for e in [e async for e in store.list()]].count(KEPT) >= 4

    run(kind, tmp_path, test)


@pytest.mark.parametrize("kind", KINDS)
def test_then_it_drops(kind: str, tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put_some(store, 30)
        stats = await store.stats()
        assert stats.evictions > 0
        assert 6 <= stats.objects < 30
        assert stats.size_bytes <= stats.capacity_bytes

    run(kind, tmp_path, test)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_object_with_more_bytes_makes_it_whole(kind: str, tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put_some(store, 6)
        assert await read(store, b"0") == data_of(0)[:KEPT]
        entry = await put(store, b"0", data_of(0), HINTS)
        assert (entry.size_bytes, entry.is_cut) == (SIZE, False)
        assert await read(store, b"0") == data_of(0)
        stats = await store.stats()
        assert stats.size_bytes <= stats.capacity_bytes
        assert stats.objects == 6

    run(kind, tmp_path, test)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_takes_its_place(kind: str, tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put_some(store, 6)
        other = await put(store, b"0", content("another", SIZE), HINTS)
        assert (other.etag, other.size_bytes) == (etag_of(data_of(0)), KEPT), "the first one wins"
        checksum = xxh3_64_intdigest(data_of(9))
        told = await store.put(b"0", data_of(9), etag=etag_of(data_of(0)), checksum=checksum)
        assert told.size_bytes == KEPT, "without cuts it is not known to be the same"
        assert await read(store, b"0") == data_of(0)[:KEPT]
        named = await put(store, b"0", content("x", 50), replacing=etag_of(data_of(0)))
        assert (named.size_bytes, await read(store, b"0")) == (50, content("x", 50))

    run(kind, tmp_path, test)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shorter_one_does_not_cut_it(kind: str, tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put_some(store, 1)
        short = data_of(0)[:KEPT]
        checksum = xxh3_64_intdigest(short)
        entry = await store.put(
            b"0", short, etag=etag_of(data_of(0)), checksum=checksum, hints=HINTS
        )
        assert entry.size_bytes == SIZE
        assert await read(store, b"0") == data_of(0)

    run(kind, tmp_path, test)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(KEPT,), (SIZE, KEPT), (0, SIZE), (*range(1, 40), SIZE)])
def test_cuts_that_cannot_be_are_refused(kind: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        with pytest.raises(LimitError, match="cuts"):
            await put(store, b"0", data_of(0), Hints(cuts=cuts))
        assert await read(store, b"0") is None

    run(kind, tmp_path, test)


@pytest.mark.parametrize("kind", KINDS)
def test_other_policies_cut_nothing(kind: str, tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put_some(store, 6)
        stats = await store.stats()
        assert (stats.cuts, stats.objects) == (0, 3)

    run(kind, tmp_path, test, policy="cost")


def test_what_names_retain_is_not_cut(tmp_path: Path) -> None:
    policy = open_policy("graded")
    policy.retain(b"name", [b"0", b"1"])

    async def test() -> None:
        async with closing(await open_disk(tmp_path, ROOM, policy)) as store:
            await put_some(store, 4)
            assert await read(store, b"0") == data_of(0)
            assert await read(store, b"1") == data_of(1)
            assert await read(store, b"2") == data_of(2)[:KEPT]

    asyncio.run(test())


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_without_room_for_the_whole_what_is_there_stays(kind: str, tmp_path: Path) -> None:
    """On disk: the file of the beginning gives way only to the whole one."""
    policy = open_policy("graded")

    async def test() -> None:
        on_disk = kind == "disk"
        made = await open_disk(tmp_path, ROOM, policy) if on_disk else MemoryStore(ROOM, policy)
        async with closing(made) as store:
            await put_some(store, 4)
            assert await read(store, b"0") == data_of(0)[:KEPT]
            every = [b"%d" % number for number in range(4)]
            policy.retain(b"name", every)
            with pytest.raises(NoSpaceError):
                await put(store, b"0", data_of(0), HINTS)
            assert await read(store, b"0") == data_of(0)[:KEPT]
            stats = await store.stats()
            assert (stats.objects, stats.size_bytes <= stats.capacity_bytes) == (4, True)

    asyncio.run(test())


# on disk


def test_what_cannot_be_written_whole_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    async def test(store: Store) -> None:
        await put_some(store, 6)
        with monkeypatch.context() as patched:
            patched.setattr(ObjectFolder, "_write_synced", full)
            with pytest.raises(NoSpaceError):
                await put(store, b"0", data_of(0), HINTS)
        assert await read(store, b"0") == data_of(0)[:KEPT]
        assert (await put(store, b"0", data_of(0), HINTS)).size_bytes == SIZE
        assert await read(store, b"0") == data_of(0)

    run("disk", tmp_path, test)


def test_cut_objects_are_there_after_a_restart_and_may_be_cut_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened("disk", tmp_path) as store:
            await put_some(store, 6)
        for forget in (False, True):
            if forget:  # all of it is in the files as well
                (tmp_path / "index.sqlite").unlink()
            async with opened("disk", tmp_path) as store:
                sizes = [entry.size_bytes async for entry in store.list()]
                assert sizes.count(KEPT) >= 4
                assert len(sizes) == 6
                assert (await store.stats()).corruptions == 0
                for number in range(6):
                    found = await read(store, b"%d" % number)
                    assert found in (data_of(number), data_of(number)[:KEPT])
        async with opened("disk", tmp_path) as store:
            for number in range(6, 8):
                await put(store, b"%d" % number, data_of(number), HINTS)
            assert (await store.stats()).cuts > 0, "what was whole before the restart is cut"

    asyncio.run(test())


def test_an_index_of_an_older_version_is_taken_over(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened("disk", tmp_path, policy="cost") as store:
            await put(store, b"a", content("a", 500), Hints(b"p", 0.5))
        with closing_now(sqlite3.connect(tmp_path / "index.sqlite")) as index:
            index.execute("ALTER TABLE objects DROP COLUMN cuts")
            index.execute("PRAGMA user_version=1")
            index.commit()
        async with opened("disk", tmp_path) as store:
            [entry] = await store.lookup([b"a"])
            assert entry == Entry(b"a", etag_of(content("a", 500)), 500, Hints(b"p", 0.5))
            await put(store, b"b", data_of(1), HINTS)
        async with opened("disk", tmp_path) as store:
            [entry] = await store.lookup([b"b"])
            assert entry is not None
            assert entry.hints == HINTS

    asyncio.run(test())


def test_an_index_that_says_otherwise_is_corrected(tmp_path: Path) -> None:
    """As after a crash between the file and the index."""

    async def test() -> None:
        async with opened("disk", tmp_path) as store:
            await put_some(store, 6)
        with closing_now(sqlite3.connect(tmp_path / "index.sqlite")) as index:
            index.execute(f"UPDATE objects SET size_bytes = {SIZE}")
            index.commit()
        async with opened("disk", tmp_path, room=AMPLE_BYTES) as store:
            assert await read(store, b"0") == data_of(0)[:KEPT]
            [entry] = await store.lookup([b"0"])
            assert entry is not None
            assert entry.size_bytes == KEPT
            assert (await store.stats()).corruptions == 0

    asyncio.run(test())


def test_a_damaged_object_is_not_cut_but_goes(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened("disk", tmp_path) as store:
            await put_some(store, 3)
            for file in (tmp_path / "objects").iterdir():
                data = bytearray(file.read_bytes())
                data[300] ^= 1
                file.write_bytes(data)
            await put(store, b"new", data_of(9), HINTS)
            assert await read(store, b"new") == data_of(9)
            stats = await store.stats()
            assert (stats.cuts, stats.evictions) == (0, 1)

    asyncio.run(test())


def test_reading_while_objects_are_cut(tmp_path: Path) -> None:
    """A reader gets right bytes, as many as there are, and never a miss or an error. (While one is
    made whole again it may miss it.)"""

    async def read_on(store: Store, number: int, done: asyncio.Event) -> int:
        etag, sizes = etag_of(data_of(number)), set()
        while not done.is_set():
            span = await store.get(b"%d" % number, 0, SIZE, etag=etag)
            if span is None:
                assert number == 0
                await asyncio.sleep(0.001)
                continue
            assert bytes(span.data) in (data_of(number), data_of(number)[:KEPT])
            sizes.add(len(span.data))
        return len(sizes)

    async def test(store: Store) -> None:
        done = asyncio.Event()
        await put_some(store, 3)
        readers = [asyncio.create_task(read_on(store, number, done)) for number in (0, 1, 2)]
        for turn in range(12):
            key = b"%d" % (3 + turn % 3)
            await put(store, key, data_of(3 + turn % 3), HINTS)
            await put(store, b"0", data_of(0), HINTS)
            await asyncio.sleep(0.005)
            await store.delete(key)
        done.set()
        assert sum(await asyncio.gather(*readers)) > 3, "some of them saw both"
        assert (await store.stats()).corruptions == 0

    run("disk", tmp_path, test)


def test_headers_of_files_with_cuts() -> None:
    entry = Entry(b"\x01\x02", b"\x03", 5, Hints(b"\x04", 0.5, (5, 9)))
    head = encode_header(entry, b"hello")
    assert head[8:12] == b"\x02\0\0\0"
    assert decode_header(head + b"hello").entry == entry
    for cuts in ((9, 5), (4, 9), (5, 5)):
        wrong = Entry(entry.key, entry.etag, 5, Hints(None, 0.5, cuts))
        with pytest.raises(FormatError):
            decode_header(encode_header(wrong, b"hello") + b"hello")


# tiers


def test_what_memory_cut_is_read_from_the_disk(tmp_path: Path) -> None:
    async def test() -> None:
        memory = MemoryStore(ROOM, open_policy("graded"))
        disk = await open_disk(tmp_path, AMPLE_BYTES, open_policy("graded"))
        store = TieredStore([Tier("memory", memory, 1.0), Tier("disk", disk, 30.0)])
        async with closing(store):
            await put_some(store, 6)
            assert await read(memory, b"0") == data_of(0)[:KEPT]
            [entry] = await store.lookup([b"0"], head_bytes=10)
            assert entry is not None
            assert (entry.size_bytes, entry.head) == (SIZE, data_of(0)[:10])
            peeked = store.peek(b"0")
            assert peeked is not None
            assert peeked.size_bytes == SIZE
            hits = store.tiers[0].hits
            first = await store.get(b"0", 0, KEPT, etag=entry.etag)
            assert first is not None
            assert bytes(first.data) == data_of(0)[:KEPT]
            assert store.tiers[0].hits == hits + 1, "memory has that much of it"
            rest = await store.get(b"0", KEPT - 5, SIZE, etag=entry.etag)
            assert rest is not None
            assert bytes(rest.data) == data_of(0)[KEPT - 5 :]
            now = store.get_now(b"1", 0, 100, etag_of(data_of(1)))
            assert now is not None
            assert bytes(now.data) == data_of(1)[:100]
            late = store.get_now(b"1", 0, SIZE, etag_of(data_of(1)))
            assert late is None or bytes(late.data) == data_of(1), "never a part of what was asked"

    asyncio.run(test())


def test_caches_of_a_shared_store_cut_nothing() -> None:
    policy = open_policy("graded", may_cut=False)
    assert isinstance(policy, Retention)
    assert not policy.may_cut
    assert open_policy("graded").may_cut


def test_the_beginning_of_an_object_is_not_taken() -> None:
    etag, whole = b"e" * 16, Hints(cuts=CUTS)
    new = Entry(b"k", etag, SIZE, whole)
    assert not is_taken(Entry(b"k", etag, KEPT), None, new)
    assert is_taken(Entry(b"k", etag, KEPT + 1), None, new), "not where it may be cut"
    assert is_taken(Entry(b"k", b"f" * 16, KEPT), None, new)
    assert is_taken(Entry(b"k", etag, SIZE), None, new)
