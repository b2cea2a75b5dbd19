"""What every store must do, whatever it is made of: one suite, run over all of them.

A test module takes part by deriving a class and saying how a store is opened:

    class TestMyStore(StoreContract):
        @asynccontextmanager
        async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
            ...

`self.folder` is empty and its own for every test. Set `evicts` to False for a store without a
bound of its own, and `counts` for one that holds nothing here. Sizes count differently in each
store, so bounds are tested without exact sums.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from hashlib import blake2b
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kdn.errors import ChecksumError, LimitError, NoSpaceError
from kdn.protocol.frames import MAX_ETAG_BYTES
from kdn.store.base import MAX_KEY_BYTES, Entry, Hints, Span, Store
from kdn.store.tally import Usage

AMPLE_BYTES = 64 << 20
LIMIT_S = 60.0
BLOCK = 1 << 16


def content(seed: str | bytes, size_bytes: int) -> bytes:
    """The same on every platform; no two places of it alike."""
    name = seed if isinstance(seed, bytes) else seed.encode()
    blocks = (blake2b(name + b"/%d" % i).digest() for i in range(-(-size_bytes // 64)))
    return b"".join(blocks)[:size_bytes]


def etag_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


async def put(
    store: Store,
    key: bytes,
    data: bytes,
    hints: Hints | None = None,
    replacing: bytes | None = None,
) -> Entry:
    """A put that is as it should be."""
    checksum = xxh3_64_intdigest(data)
    return await store.put(
        key, data, etag=etag_of(data), checksum=checksum, hints=hints, replacing=replacing
    )


async def read(store: Store, key: bytes) -> bytes | None:
    span = await store.get(key)
    return None if span is None else bytes(span.data)


async def listed(store: Store, prefix: bytes = b"") -> list[bytes]:
    return [entry.key async for entry in store.list(prefix)]


class StoreContract(ABC):
    evicts = True
    counts = True
    folder: Path

    @pytest.fixture(autouse=True)
    def _give_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @abstractmethod
    def open(self, capacity_bytes: int) -> AbstractAsyncContextManager[Store]:
        """An empty store, closed at the end."""

    def run(
        self, test: Callable[[Store], Awaitable[None]], capacity_bytes: int = AMPLE_BYTES
    ) -> None:
        async def with_store() -> None:
            async with asyncio.timeout(LIMIT_S), self.open(capacity_bytes) as store:
                await test(store)

        asyncio.run(with_store())

    def test_what_each_owner_holds_is_told_at_once(self) -> None:
        async def test(store: Store) -> None:
            if not self.counts:
                assert store.usage(b"a/") == Usage()
                return
            await put(store, b"a/1", content("1", 100))
            assert store.usage(b"a/") == Usage(1, 100), "counted when first asked"
            assert store.usage(b"b/") == Usage()
            await put(store, b"a/2", content("2", 50))
            await put(store, b"a/2", content("other", 70))
            await put(store, b"b/1", content("3", 30))
            assert (store.usage(b"a/"), store.usage(b"b/")) == (Usage(2, 150), Usage(1, 30))
            await store.delete(b"a/1")
            await store.delete(b"a/1")
            assert store.usage(b"a/") == Usage(1, 50)

        self.run(test)

    # put and get

    @pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
    def test_gives_back_what_was_put(self, size: int) -> None:
        async def test(store: Store) -> None:
            data = content("a", size)
            entry = await put(store, b"key", data)
            assert (entry.key, entry.etag, entry.size_bytes) == (b"key", etag_of(data), size)
            span = await store.get(b"key")
            assert span is not None
            assert (span.entry.key, span.entry.etag) == (b"key", etag_of(data))
            assert (span.entry.size_bytes, span.start, bytes(span.data)) == (size, 0, data)

        self.run(test)

    @pytest.mark.parametrize(
        ("start", "end"),
        [
            (0, 10),
            (7, 8),
            (0, BLOCK),
            (BLOCK - 1, BLOCK + 1),
            (BLOCK, 2 * BLOCK),
            (BLOCK + 5, None),
            (2 * BLOCK, 1 << 40),
            (5, 5),
            (5, 3),
            (2 * BLOCK + 99, 2 * BLOCK + 100),
        ],
    )
    def test_ranges(self, start: int, end: int | None) -> None:
        async def test(store: Store) -> None:
            data = content("ranges", 2 * BLOCK + 100)
            await put(store, b"key", data)
            span = await store.get(b"key", start, end)
            assert span is not None
            assert (span.start, bytes(span.data)) == (start, data[start:end])
            assert span.entry.size_bytes == len(data)

        self.run(test)

    @pytest.mark.parametrize("start", [100, 101, 1 << 40])
    def test_a_range_beyond_the_end_is_empty(self, start: int) -> None:
        async def test(store: Store) -> None:
            await put(store, b"key", content("end", 100))
            span = await store.get(b"key", start, start + 10)
            assert span is not None
            assert (bytes(span.data), span.entry.size_bytes) == (b"", 100)

        self.run(test)

    def test_a_miss_is_none(self) -> None:
        async def test(store: Store) -> None:
            assert await store.get(b"nothing") is None
            assert await store.get(b"nothing", 5, 6, etag=b"any") is None
            assert await store.lookup([b"nothing"]) == [None]
            assert await store.delete(b"nothing") is False

        self.run(test)

    def test_another_etag_is_a_miss(self) -> None:
        async def test(store: Store) -> None:
            data = content("etag", 100)
            await put(store, b"key", data)
            assert await store.get(b"key", etag=b"other") is None
            span = await store.get(b"key", 1, 2, etag=etag_of(data))
            assert span is not None
            assert bytes(span.data) == data[1:2]

        self.run(test)

    def test_the_first_writer_wins(self) -> None:
        async def test(store: Store) -> None:
            first, second = content("first", 100), content("second", 50)
            await put(store, b"key", first)
            entry = await put(store, b"key", second)
            assert (entry.etag, entry.size_bytes) == (etag_of(first), 100)
            assert await read(store, b"key") == first

        self.run(test)

    def test_a_put_tells_what_a_lookup_finds(self) -> None:
        """So that nobody needs to look again."""

        async def test(store: Store) -> None:
            mine, others = content("mine", 300), content("others", 200)
            for data, hints, replacing in (
                (mine, Hints(b"parent", 0.5), None),  # new
                (others, Hints(None, 8.0), None),  # taken
                (others, Hints(None, 8.0), etag_of(others)),  # taken by another than it names
                (others, Hints(None, 8.0), etag_of(mine)),  # replaced
            ):
                entry = await put(store, b"key", data, hints, replacing)
                assert await store.lookup([b"key"]) == [entry]
            assert entry == Entry(b"key", etag_of(others), 200, Hints(None, 8.0))

        self.run(test)

    def test_one_of_many_writers_at_once_wins(self) -> None:
        async def test(store: Store) -> None:
            writers = [content(f"writer {i}", 1000 + i) for i in range(20)]
            entries = await asyncio.gather(*(put(store, b"key", data) for data in writers))
            winner = await read(store, b"key")
            assert winner in writers
            assert {entry.etag for entry in entries} == {etag_of(winner)}
            assert {entry.size_bytes for entry in entries} == {len(winner)}

        self.run(test)

    # replacement

    def test_replaces_the_object_it_names(self) -> None:
        async def test(store: Store) -> None:
            bad, good = content("bad", 3000), content("good", 2000)
            await put(store, b"key", bad, Hints(b"parent", 2.0))
            entry = await put(store, b"key", good, Hints(b"parent", 3.0), etag_of(bad))
            assert (entry.etag, entry.size_bytes) == (etag_of(good), 2000)
            assert await read(store, b"key") == good
            assert await store.get(b"key", 0, 10, etag=etag_of(bad)) is None
            [found] = await store.lookup([b"key"], head_bytes=10)
            assert found is not None
            assert (found.etag, found.head, found.hints.saved_s) == (etag_of(good), good[:10], 3.0)
            assert await listed(store) == [b"key"]
            assert (await store.stats()).objects == 1
            assert await store.delete(b"key")
            assert (await store.stats()).size_bytes == 0

        self.run(test)

    def test_replaces_no_other_object(self) -> None:
        async def test(store: Store) -> None:
            first, second = content("first", 100), content("second", 50)
            await put(store, b"key", first)
            entry = await put(store, b"key", second, replacing=b"other")
            assert (entry.etag, entry.size_bytes) == (etag_of(first), 100)
            assert await read(store, b"key") == first
            again = await put(store, b"key", first, replacing=etag_of(first))
            assert again.etag == etag_of(first)
            wrong = xxh3_64_intdigest(second) ^ 1
            with pytest.raises(ChecksumError):
                await store.put(b"key", second, etag=b"e", checksum=wrong, replacing=etag_of(first))
            assert await read(store, b"key") == first

        self.run(test)

    def test_replacing_what_is_gone_is_a_put(self) -> None:
        async def test(store: Store) -> None:
            data = content("new", 100)
            entry = await put(store, b"key", data, replacing=b"old")
            assert entry.etag == etag_of(data)
            assert await read(store, b"key") == data

        self.run(test)

    def test_one_of_many_replacements_wins_and_readers_see_no_mix(self) -> None:
        async def reader(store: Store, known: dict[bytes, bytes]) -> None:
            for start in range(0, 3000, 100):
                span = await store.get(b"key", start, start + 1000)
                if span is not None:
                    whole = known[span.entry.etag]
                    assert bytes(span.data) == whole[start : start + 1000]

        async def test(store: Store) -> None:
            bad = content("bad", 3000)
            await put(store, b"key", bad)
            writers = [content(f"writer {i}", 1000 + i) for i in range(10)]
            known = {etag_of(data): data for data in (bad, *writers)}
            entries, *_ = await asyncio.gather(
                asyncio.gather(
                    *(put(store, b"key", data, replacing=etag_of(bad)) for data in writers)
                ),
                *(reader(store, known) for _ in range(5)),
            )
            winner = await read(store, b"key")
            assert winner in writers
            assert {entry.etag for entry in entries} == {etag_of(winner)}

        self.run(test)

    def test_keys_of_any_bytes(self) -> None:
        keys = [
            b"\0",
            b"/",
            b"..",
            b"a/b",
            b"\xff" * MAX_KEY_BYTES,
            b"\n",
            "é".encode(),
            b"-",
            b"%",
        ]

        async def test(store: Store) -> None:
            for key in keys:
                await put(store, key, content(key, 30))
            for key in keys:
                assert await read(store, key) == content(key, 30)
            assert await listed(store) == sorted(keys)

        self.run(test)

    # what is refused

    def test_a_wrong_checksum_is_refused(self) -> None:
        async def test(store: Store) -> None:
            data = content("sum", 100)
            with pytest.raises(ChecksumError):
                await store.put(b"key", data, etag=b"e", checksum=xxh3_64_intdigest(data) ^ 1)
            assert await store.get(b"key") is None
            assert await listed(store) == []
            await put(store, b"key", data)
            assert await read(store, b"key") == data

        self.run(test)

    @pytest.mark.parametrize(
        ("key", "etag"),
        [
            (b"", b"e"),
            (b"k" * (MAX_KEY_BYTES + 1), b"e"),
            (b"k", b""),
            (b"k", b"e" * (MAX_ETAG_BYTES + 1)),
        ],
    )
    def test_names_beyond_the_limits_are_refused(self, key: bytes, etag: bytes) -> None:
        async def test(store: Store) -> None:
            with pytest.raises(LimitError):
                await store.put(key, b"data", etag=etag, checksum=xxh3_64_intdigest(b"data"))
            assert await listed(store) == []

        self.run(test)

    def test_what_can_never_fit_is_refused_and_evicts_nothing(self) -> None:
        async def test(store: Store) -> None:
            await put(store, b"small", content("small", 100))
            with pytest.raises(NoSpaceError):
                await put(store, b"large", content("large", 200_001))
            assert await store.get(b"large") is None
            assert await read(store, b"small") == content("small", 100)

        if self.evicts:
            self.run(test, capacity_bytes=200_000)

    # lookup, list, delete

    def test_lookup_answers_every_key_in_order(self) -> None:
        async def test(store: Store) -> None:
            for name in (b"a", b"b", b"c"):
                await put(store, name, content(name, 100))
            keys = [b"c", b"x", b"a", b"a", b"y", b"b"]
            found = await store.lookup(keys)
            assert [entry and entry.key for entry in found] == [b"c", None, b"a", b"a", None, b"b"]
            assert all(entry is None or entry.head == b"" for entry in found)
            assert await store.lookup([]) == []

        self.run(test)

    @pytest.mark.parametrize("head_bytes", [1, 100, BLOCK + 1])
    def test_lookup_brings_heads(self, head_bytes: int) -> None:
        async def test(store: Store) -> None:
            long, short = content("long", 2 * BLOCK), content("short", 50)
            await put(store, b"long", long)
            await put(store, b"short", short)
            found = await store.lookup([b"short", b"x", b"long"], head_bytes=head_bytes)
            heads = [entry and entry.head for entry in found]
            assert heads == [short[:head_bytes], None, long[:head_bytes]]
            assert [entry and entry.size_bytes for entry in found] == [50, None, 2 * BLOCK]

        self.run(test)

    def test_hints_come_back(self) -> None:
        async def test(store: Store) -> None:
            for key, hints in hinted.items():
                await put(store, key, content(key, 100), hints)
            found = await store.lookup(list(hinted))
            assert [entry and entry.hints for entry in found] == list(hinted.values())

        hinted = {
            b"plain": Hints(),
            b"child": Hints(parent=b"plain", saved_s=0.125),
            b"long": Hints(parent=b"p" * MAX_KEY_BYTES, saved_s=1e-9),
        }
        self.run(test)

    def test_lists_in_key_order_by_prefix(self) -> None:
        async def test(store: Store) -> None:
            for key in (b"b2", b"a", b"b1", b"c", b"b"):
                await put(store, key, content(key, 10))
            assert await listed(store) == [b"a", b"b", b"b1", b"b2", b"c"]
            assert await listed(store, b"b") == [b"b", b"b1", b"b2"]
            assert await listed(store, b"d") == []

        self.run(test)

    def test_deleted_is_gone_and_its_key_free(self) -> None:
        async def test(store: Store) -> None:
            await put(store, b"key", content("old", 100))
            assert await store.delete(b"key") is True
            assert await store.get(b"key") is None
            assert await store.lookup([b"key"], head_bytes=1) == [None]
            assert await listed(store) == []
            assert await store.delete(b"key") is False
            await put(store, b"key", content("new", 70))
            assert await read(store, b"key") == content("new", 70)

        self.run(test)

    # bounds and counters

    def test_counts_what_it_does(self) -> None:
        async def test(store: Store) -> None:
            empty = await store.stats()
            assert (empty.objects, empty.size_bytes, empty.puts) == (0, 0, 0)
            for key in (b"a", b"b"):
                await put(store, key, content(key, 1000))
            await store.get(b"a")
            await store.get(b"x")
            await store.delete(b"b")
            stats = await store.stats()
            assert (stats.objects, stats.puts, stats.hits, stats.misses) == (1, 2, 1, 1)
            assert (stats.evictions, stats.corruptions) == (0, 0)
            assert stats.size_bytes >= 1000
            await store.delete(b"a")
            assert (await store.stats()).size_bytes == 0

        self.run(test)

    def test_evicts_to_stay_within_its_capacity(self) -> None:
        async def test(store: Store) -> None:
            keys = [b"key %03d" % i for i in range(100)]
            for key in keys:
                await put(store, key, content(key, 5000))
                assert await read(store, key) == content(key, 5000)
                stats = await store.stats()
                assert stats.size_bytes <= stats.capacity_bytes
            left = await listed(store)
            stats = await store.stats()
            assert 5 <= len(left) < 50
            assert (stats.objects, stats.evictions) == (len(left), 100 - len(left))
            assert stats.size_bytes >= 5000 * len(left)
            for key in keys:
                assert await read(store, key) == (content(key, 5000) if key in left else None)

        if self.evicts:
            self.run(test, capacity_bytes=200_000)

    def test_many_at_once_never_mix_bytes(self) -> None:
        async def reader(store: Store, key: bytes) -> None:
            data = content(key, 3000)
            for start in range(0, 3000, 500):
                span: Span | None = await store.get(key, start, start + 700)
                assert span is None or bytes(span.data) == data[start : start + 700]

        async def writer(store: Store, key: bytes) -> None:
            await put(store, key, content(key, 3000))

        async def test(store: Store) -> None:
            keys = [b"%d" % (i % 25) for i in range(100)]
            work = [task(store, key) for key in keys for task in (writer, reader)]
            await asyncio.gather(*work)
            left = await listed(store)
            assert (await store.stats()).objects == len(left)
            for key in left:
                assert await read(store, key) == content(key, 3000)

        self.run(test, capacity_bytes=100_000 if self.evicts else AMPLE_BYTES)

    def test_closing_twice_is_harmless(self) -> None:
        async def test(store: Store) -> None:
            await store.close()

        self.run(test)


@asynccontextmanager
async def closing(store: Store) -> AsyncIterator[Store]:
    try:
        yield store
    finally:
        await store.close()
