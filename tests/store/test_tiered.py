"""Tiers: what is found where, what moves, and what broken or slow tiers may and may not do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kdn.background import faults
from kdn.errors import ChecksumError, LimitError, NoSpaceError, StoreError
from kdn.store.base import Entry, Hints, Span, Stats, Store
from kdn.store.disk import open_disk
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore, footprint_bytes
from kdn.store.outbox import ATTEMPTS, Outbox
from kdn.store.single_flight import SingleFlight
from kdn.store.tiered import FAILURES, REST_S, Tier, TieredStore
from tests.store.contract import StoreContract, closing, content, etag_of, listed, put, read

LIMIT_S = 20.0


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test

    asyncio.run(bounded())


def memory(capacity_bytes: int = 1 << 20) -> MemoryStore:
    return MemoryStore(capacity_bytes, open_policy("lru"))


class Flaky(Store):
    """A store in front of another that can fail, stall or be watched."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fails = False
        self.stalls = asyncio.Event()
        self.stalls.set()
        self.calls: list[str] = []
        self.closed = False

    async def _pass(self, name: str) -> None:
        self.calls.append(name)
        await self.stalls.wait()
        if self.fails:
            raise StoreError("gone")

    async def put(self, *args: Any, **named: Any) -> Entry:
        await self._pass("put")
        return await self.store.put(*args, **named)

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        await self._pass("get")
        return await self.store.get(key, start, end, etag=etag)

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        await self._pass("lookup")
        return await self.store.lookup(keys, head_bytes=head_bytes)

    async def delete(self, key: bytes) -> bool:
        await self._pass("delete")
        return await self.store.delete(key)

    async def list(self, prefix: bytes = b"") -> AsyncIterator[Entry]:
        await self._pass("list")
        async for entry in self.store.list(prefix):
            yield entry

    async def stats(self) -> Stats:
        await self._pass("stats")
        return await self.store.stats()

    async def close(self) -> None:
        self.closed = True


def stack(
    *stores: Store, deadline_s: float = 5.0, write_back: bool = False, **options: object
) -> TieredStore:
    tiers = [Tier(f"tier {level}", store, deadline_s) for level, store in enumerate(stores)]
    return TieredStore(tiers, write_back=write_back, **options)  # type: ignore[arg-type]


async def settle(true: Callable[[], Awaitable[bool]]) -> None:
    """Until what goes on in the background has come so far; the test's limit ends it."""
    while not await true():
        await asyncio.sleep(0.001)


async def holds(store: Store, key: bytes) -> bool:
    return (await store.lookup([key])) != [None]


# the contract


class TestThrough(StoreContract):
    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        store = stack(memory(capacity_bytes // 4), memory(capacity_bytes))
        async with closing(store):
            yield store


class TestBack(StoreContract):
    evicts = False  # its parts do

    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        store = stack(memory(capacity_bytes), memory(capacity_bytes), write_back=True)
        async with closing(store):
            yield store


class TestOverDisk(StoreContract):
    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        disk = await open_disk(self.folder, capacity_bytes, open_policy("lru"))
        store = stack(memory(capacity_bytes // 4), disk, deadline_s=30.0)
        async with closing(store):
            yield store


# reads


def test_reads_promote_the_whole_object_to_all_tiers_above() -> None:
    async def test() -> None:
        top, middle, bottom = memory(), memory(), memory()
        store = stack(top, middle, bottom)
        data, hints = content("a", 5000), Hints(b"parent", 2.5)
        await put(bottom, b"a", data, hints)
        span = await store.get(b"a", 10, 20)
        assert span is not None
        assert (span.start, bytes(span.data)) == (10, data[10:20])
        await settle(lambda: holds(top, b"a"))
        assert await read(top, b"a") == await read(middle, b"a") == data
        [entry] = await top.lookup([b"a"])
        assert entry is not None
        assert (entry.etag, entry.hints) == (etag_of(data), hints)
        assert [tier.hits for tier in store.tiers] == [0, 0, 1]
        await store.get(b"a")
        assert [tier.hits for tier in store.tiers] == [1, 0, 1]

    run(test())


def test_little_is_promoted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of one byte must not bring large objects to memory, each of them whole."""
    monkeypatch.setattr("kdn.store.tiered.MAX_PROMOTING_BYTES", 1000)

    async def test() -> None:
        top, bottom = memory(), memory()
        store = stack(top, bottom)
        for name, size in {"large": 1001, "small": 999}.items():
            await put(bottom, name.encode(), content(name, size))
        assert await store.get(b"large", 0, 1)
        assert await store.get(b"small", 0, 1)
        await settle(lambda: holds(top, b"small"))
        assert not await holds(top, b"large")
        await settle(lambda: asyncio.sleep(0, store._promoting_bytes == 0))

    run(test())


def test_a_request_that_a_tier_refuses_is_no_failure_of_the_tier() -> None:
    class Choosy(Flaky):
        async def lookup(self, keys: Any, *, head_bytes: int = 0) -> Any:
            if any(len(key) > 3 for key in keys):
                raise LimitError("key: expected at most 3 bytes")
            return await super().lookup(keys, head_bytes=head_bytes)

    async def test() -> None:
        bottom = Choosy(memory())
        store = stack(memory(), bottom)
        await put(bottom.store, b"a", content("a", 10))
        for _ in range(5):
            assert await store.lookup([b"a long key"]) == [None]
        [found] = await store.lookup([b"a"])
        assert found is not None

    run(test())


def test_an_etag_may_be_found_below_another_object() -> None:
    async def test() -> None:
        top, bottom = memory(), memory()
        store = stack(top, bottom)
        await put(top, b"a", content("one", 100))
        await put(bottom, b"a", content("two", 100))
        span = await store.get(b"a", etag=etag_of(content("two", 100)))
        assert span is not None
        assert bytes(span.data) == content("two", 100)
        await asyncio.sleep(0.01)
        assert await read(store, b"a") == content("one", 100)

    run(test())


def test_identical_reads_share_one_flight() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(memory(), bottom)
        await put(bottom.store, b"a", content("a", 100))
        bottom.stalls.clear()
        reads = [asyncio.create_task(store.get(b"a", 0, 50)) for _ in range(10)]
        await asyncio.sleep(0.01)
        reads[0].cancel()  # the one that started it
        bottom.stalls.set()
        spans = await asyncio.gather(*reads[1:])
        assert {bytes(span.data) for span in spans if span} == {content("a", 100)[:50]}
        assert len(spans) == 9
        await settle(lambda: holds(store.tiers[0].store, b"a"))
        assert bottom.calls == ["get", "get"], "one for all readers, one to promote"

    run(test())


def test_lookup_asks_below_only_for_what_is_missing() -> None:
    async def test() -> None:
        top, bottom = Flaky(memory()), Flaky(memory())
        store = stack(top, bottom)
        await put(top.store, b"a", content("a", 10))
        await put(bottom.store, b"b", content("b", 10))
        found = await store.lookup([b"b", b"x", b"a"], head_bytes=4)
        assert [entry and entry.head for entry in found] == [
            content("b", 10)[:4],
            None,
            content("a", 10)[:4],
        ]
        assert [entry and entry.key for entry in await store.lookup([b"a"])] == [b"a"]
        assert bottom.calls == ["lookup"]

    run(test())


def test_lists_the_union_in_order_even_if_a_tier_fails() -> None:
    async def test() -> None:
        top, bottom = memory(), Flaky(memory())
        store = stack(top, bottom)
        for key in (b"a", b"c"):
            await put(top, key, content(key, 10))
        for key in (b"b", b"c", b"d"):
            await put(bottom.store, key, content(key, 10))
        assert await listed(store) == [b"a", b"b", b"c", b"d"]
        bottom.fails = True
        assert await listed(store) == [b"a", b"c"]
        assert store.tiers[1].errors == 1

    run(test())


# faults


def test_a_failing_tier_is_a_miss_with_a_counted_error_and_then_rests() -> None:
    async def test() -> None:
        now_s = 0.0
        bottom = Flaky(memory())
        store = stack(memory(), bottom, clock=lambda: now_s)
        await put(store, b"top", content("top", 10))
        await put(bottom.store, b"a", content("a", 10))
        bottom.fails = True
        bottom.calls.clear()
        for _ in range(10):
            assert await store.get(b"a") is None
            assert await read(store, b"top") == content("top", 10)
        assert bottom.calls == ["get"] * FAILURES
        assert store.tiers[1].errors == FAILURES
        bottom.fails = False
        assert await store.get(b"a") is None
        now_s += REST_S
        assert await read(store, b"a") == content("a", 10)

    run(test())


def test_a_slow_tier_costs_its_deadline_and_no_more() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(memory(), bottom, deadline_s=0.05)
        await put(bottom.store, b"a", content("a", 10))
        bottom.stalls.clear()
        started_s = asyncio.get_running_loop().time()
        assert await store.get(b"a") is None
        assert await store.lookup([b"a"]) == [None]
        assert 0.09 < asyncio.get_running_loop().time() - started_s < 2.0
        assert store.tiers[1].errors == 2
        bottom.stalls.set()
        assert await read(store, b"a") == content("a", 10)

    run(test())


def test_a_failing_top_does_not_hide_what_is_below() -> None:
    async def test() -> None:
        top, bottom = Flaky(memory()), Flaky(memory())
        top.fails = True
        store = stack(top, bottom)
        await put(store, b"a", content("a", 10))
        assert await read(store, b"a") == content("a", 10)

    run(test())


def test_a_put_needs_one_tier_that_keeps_it() -> None:
    """One that outlives the process, as these two say they do."""

    async def test() -> None:
        top, bottom = Flaky(memory(2000)), Flaky(memory())
        store = stack(top, bottom)
        bottom.fails = True
        await put(store, b"a", content("a", 10))
        assert await read(store, b"a") == content("a", 10)
        with pytest.raises(StoreError, match="tier 0, tier 1"):
            await put(store, b"large", content("large", 5000))
        bottom.fails = False
        await put(store, b"large", content("large", 5000))
        assert await read(store, b"large") == content("large", 5000)
        top.fails = bottom.fails = True
        with pytest.raises(StoreError):
            await put(store, b"b", content("b", 10))

    run(test())


@pytest.mark.parametrize("full", [True, False])
def test_a_put_that_only_memory_would_keep_is_no_put(full: bool) -> None:
    async def test() -> None:
        top, bottom = memory(), Flaky(memory(1000 if full else 1 << 20))
        bottom.fails = not full
        store = stack(top, bottom)
        with pytest.raises(NoSpaceError if full else StoreError, match="tiers tier 1 can keep"):
            await put(store, b"a", content("a", 10))
        assert await listed(top) == []
        assert await store.get(b"a") is None
        assert (await store.stats()).puts == 0

    run(test())


def test_memory_alone_keeps_what_it_can() -> None:
    async def test() -> None:
        store = stack(memory(), memory(1000))
        await put(store, b"a", content("a", 10))
        assert await read(store, b"a") == content("a", 10)

    run(test())


def test_a_lasting_tier_may_lie_above_one_that_fails() -> None:
    async def test() -> None:
        middle, bottom = Flaky(memory()), Flaky(memory())
        top = memory()
        store = stack(top, middle, bottom)
        bottom.fails = True
        await put(store, b"a", content("a", 10))
        assert await read(top, b"a") == await read(middle, b"a") == content("a", 10)

    run(test())


def test_what_the_caller_got_wrong_is_the_callers_error() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(memory(), bottom)
        with pytest.raises(ChecksumError):
            await store.put(b"a", b"data", etag=b"e", checksum=1)
        assert bottom.calls == []
        assert store.tiers[1].errors == 0

    run(test())


def test_a_key_taken_below_is_not_taken_again_above() -> None:
    async def test() -> None:
        top, bottom = memory(), memory()
        store = stack(top, bottom)
        await put(bottom, b"a", content("first", 100))
        entry = await put(store, b"a", content("second", 100))
        assert entry.etag == etag_of(content("first", 100))
        assert not await holds(top, b"a")

    run(test())


def test_a_put_of_a_taken_key_tells_what_a_reader_finds() -> None:
    """A reader finds what is above first, whatever else a tier below has."""

    async def test() -> None:
        above, below = memory(), memory()
        await put(above, b"a", b"above")
        await put(below, b"a", b"below")
        async with closing(stack(above, below)) as store:
            entry = await put(store, b"a", b"new")
            assert entry.etag == etag_of(b"above")
            assert await store.lookup([b"a"]) == [entry]

    run(test())


def test_a_delete_that_a_tier_does_not_confirm_is_an_error() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(memory(), bottom)
        await put(store, b"a", content("a", 10))
        bottom.fails = True
        with pytest.raises(StoreError, match="tier 1"):
            await store.delete(b"a")
        bottom.fails = False
        assert await store.delete(b"a") is True
        assert await store.get(b"a") is None

    run(test())


def test_a_read_under_way_does_not_bring_a_deleted_object_back() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        top = memory()
        store = stack(top, bottom)
        await put(bottom.store, b"a", content("a", 100))
        bottom.stalls.clear()
        reading = asyncio.create_task(store.get(b"a"))
        await asyncio.sleep(0.01)
        deleting = asyncio.create_task(store.delete(b"a"))
        await asyncio.sleep(0.01)
        bottom.stalls.set()
        await asyncio.gather(reading, deleting)
        await asyncio.sleep(0.01)
        assert await store.get(b"a") is None
        assert not await holds(top, b"a")

    run(test())


def test_a_promotion_under_way_does_not_bring_a_deleted_object_back() -> None:
    async def test() -> None:
        bottom, top = Flaky(memory()), Flaky(memory())
        store = stack(top, bottom)
        await put(bottom.store, b"a", content("a", 100))
        promoting = asyncio.create_task(store.get(b"a"))
        await settle(lambda: asyncio.sleep(0, "get" in bottom.calls))
        top.stalls.clear()  # the promotion now waits to put
        await promoting
        await asyncio.sleep(0.01)
        deleting = asyncio.create_task(store.delete(b"a"))
        await asyncio.sleep(0.01)
        top.stalls.set()
        assert await deleting is True
        assert await listed(store) == []

    run(test())


# write-back

SIZE = 1000


def small(objects: int) -> MemoryStore:
    """Holds so many objects of SIZE bytes and three-byte keys."""
    each = footprint_bytes(Entry(b"key", bytes(16), SIZE))
    return memory(objects * each + each // 2)


def keys(count: int) -> list[bytes]:
    return [b"k%02d" % number for number in range(count)]


def test_write_back_puts_on_top_and_evictions_flow_down() -> None:
    async def test() -> None:
        middle, bottom = memory(), memory()
        store = stack(small(3), middle, bottom, write_back=True)
        for key in keys(3):
            await put(store, key, content(key, SIZE), Hints(b"p", 1.5))
        assert await listed(middle) == await listed(bottom) == []
        for key in keys(5)[3:]:
            await put(store, key, content(key, SIZE))
        await settle(lambda: holds(middle, b"k01"))
        assert await listed(middle) == await listed(bottom) == keys(2)
        [entry] = await bottom.lookup([b"k00"])
        assert entry is not None
        assert entry.hints == Hints(b"p", 1.5)
        for key in keys(5):
            assert await read(store, key) == content(key, SIZE)
        assert await listed(store) == keys(5)
        await store.close()
        assert store.lost == 0

    run(test())


def test_closing_flushes_what_is_only_on_top() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(small(3), bottom, write_back=True, outbox_bytes=1)
        for key in keys(7):
            await put(store, key, content(key, SIZE))
        await store.close()
        assert bottom.closed
        for key in keys(7):
            assert await read(bottom.store, key) == content(key, SIZE)

    run(test())


def test_what_is_on_its_way_down_is_still_found() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(small(2), bottom, write_back=True)
        await put(store, b"k00", content(b"k00", SIZE))
        await put(store, b"k01", content(b"k01", SIZE))
        top = store.tiers[0].store
        await put(top, b"k02", content(b"k02", SIZE))  # evicts k00
        bottom.stalls.clear()
        assert not await holds(top, b"k00")
        found = await store.get(b"k00", 5, 9)
        assert found is not None
        assert bytes(found.data) == content(b"k00", SIZE)[5:9]
        assert [entry and entry.head for entry in await store.lookup([b"k00"], head_bytes=3)] == [
            content(b"k00", SIZE)[:3]
        ]
        bottom.stalls.set()
        await store.close()

    run(test())


def test_only_what_was_written_here_flows_down() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(small(2), bottom, write_back=True)
        for key in keys(6):
            await put(bottom.store, key, content(key, SIZE))
        for key in keys(6):
            await store.get(key)
            await settle(lambda key=key: holds(store.tiers[0].store, key))  # type: ignore[misc]
        await store.close()
        assert "put" not in bottom.calls

    run(test())


def test_a_put_waits_for_room_below_and_fails_without_loss() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(small(2), bottom, write_back=True, outbox_bytes=1, deadline_s=0.05)
        for key in keys(2):
            await put(store, key, content(key, SIZE))
        bottom.stalls.clear()
        await put(store, b"k02", content(b"k02", SIZE))
        with pytest.raises(StoreError, match="wait for them"):
            await put(store, b"k03", content(b"k03", SIZE))
        assert len(store._outbox) == 1
        assert await read(store, b"k00") == content(b"k00", SIZE)
        assert await store.get(b"k03") is None
        bottom.stalls.set()

    run(test())


def test_a_tier_below_that_recovers_gets_everything() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        now_s = 0.0
        store = stack(small(2), bottom, write_back=True, clock=lambda: now_s)
        for key in keys(2):
            await put(store, key, content(key, SIZE))
        bottom.fails = True
        await put(store, b"k02", content(b"k02", SIZE))
        await settle(lambda: asyncio.sleep(0, "put" in bottom.calls))
        bottom.fails = False
        await settle(lambda: holds(bottom.store, b"k00"))
        await store.close()
        assert store.lost == 0
        assert await listed(bottom.store) == keys(3)

    run(test())


def test_what_no_tier_takes_is_counted_and_told() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(small(2), bottom, write_back=True, clock=lambda: 0.0)
        store._outbox._retry_s = 0.001
        await put(store, b"k00", content(b"k00", SIZE))
        bottom.fails = True
        with pytest.raises(StoreError, match="1 objects were taken by no tier below"):
            await store.close()
        assert store.lost == 1
        assert bottom.closed

    run(test())


def test_too_large_for_the_top_goes_straight_below() -> None:
    async def test() -> None:
        bottom = memory()
        store = stack(small(2), bottom, write_back=True)
        await put(store, b"large", content("large", 50_000))
        assert await read(bottom, b"large") == content("large", 50_000)
        with pytest.raises(NoSpaceError):
            await put(store, b"huge", content("huge", 2 << 20))

    run(test())


def test_deleting_what_is_on_its_way_down() -> None:
    async def test() -> None:
        bottom = Flaky(memory())
        store = stack(small(2), bottom, write_back=True)
        for key in keys(2):
            await put(store, key, content(key, SIZE))
        bottom.stalls.clear()
        putting = asyncio.create_task(put(store, b"k02", content(b"k02", SIZE)))
        await asyncio.sleep(0.01)
        bottom.stalls.set()
        await putting
        assert await store.delete(b"k00") is True
        await asyncio.sleep(0.01)
        assert await listed(store) == [b"k01", b"k02"]
        await store.close()
        assert await listed(bottom.store) == [b"k01", b"k02"]

    run(test())


# parts


def test_outbox_gives_up_after_so_many_attempts() -> None:
    async def test() -> None:
        tried: list[bytes] = []

        async def refuse(entry: Entry, data: bytes) -> bool:
            tried.append(entry.key)
            return False

        outbox = Outbox(refuse, 100, retry_s=0.001)
        outbox.add(Entry(b"a", b"e", 3), b"abc")
        await outbox.drain(5.0)
        assert tried == [b"a"] * ATTEMPTS
        assert (outbox.lost, outbox.size_bytes, len(outbox)) == (1, 0, 0)

    run(test())


def test_outbox_survives_a_write_that_raises() -> None:
    """What it cannot write is lost and counted; it neither stays for ever nor stops the rest."""

    async def test() -> None:
        written: list[bytes] = []

        async def write(entry: Entry, data: bytes) -> bool:
            if entry.key == b"bad":
                raise TypeError("a mistake in a store")
            written.append(entry.key)
            return True

        before = faults["writing to the tiers below"]
        outbox = Outbox(write, 100, retry_s=0.001)
        for key in (b"bad", b"a", b"b"):
            outbox.add(Entry(key, b"e", 3), b"abc")
        await outbox.drain(5.0)
        assert written == [b"a", b"b"]
        assert (outbox.lost, outbox.size_bytes, len(outbox)) == (1, 0, 0)
        assert faults["writing to the tiers below"] == before + ATTEMPTS

    run(test())


def test_a_promotion_that_fails_unexpectedly_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for it, so nobody else would tell."""

    class Broken(MemoryStore):
        async def put(self, *args: object, **named: object) -> Entry:
            raise TypeError("a mistake in a store")

    async def test() -> None:
        below = memory()
        await put(below, b"a", b"abc")
        top = Broken(100, open_policy("lru"))
        tiers = TieredStore([Tier("top", top, 1.0), Tier("below", below, 1.0)])
        assert await read(tiers, b"a") == b"abc"
        await tiers.close()

    run(test())
    assert "a mistake in a store" in caplog.text


def test_a_flight_that_fails_fails_for_all_and_is_forgotten() -> None:
    async def test() -> None:
        flights: SingleFlight[int] = SingleFlight()
        gate = asyncio.Event()

        async def fail() -> int:
            await gate.wait()
            raise StoreError("gone")

        async def answer() -> int:
            return 7

        waiting = [asyncio.create_task(flights.run("k", fail)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(flights) == 1
        gate.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [StoreError] * 3
        assert await flights.run("k", answer) == 7
        await flights.close(1.0)

    run(test())


def test_checksums_are_of_the_bytes_that_move() -> None:
    """A tier that gives damaged bytes without noticing cannot poison those above under a checksum
    of its own: lengths are compared, and each store verifies what it is given."""

    async def test() -> None:
        class Short(Flaky):
            async def get(
                self,
                key: bytes,
                start: int = 0,
                end: int | None = None,
                *,
                etag: bytes | None = None,
            ) -> Span | None:
                span = await super().get(key, start, end, etag=etag)
                return span and Span(span.entry, span.start, bytes(span.data)[:5])

        top, bottom = memory(), Short(memory())
        store = stack(top, bottom)
        await put(bottom.store, b"a", content("a", 100))
        await store.get(b"a", 0, 5)
        await asyncio.sleep(0.01)
        assert not await holds(top, b"a")

    run(test())
