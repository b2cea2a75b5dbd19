"""What broken or slow tiers may and may not do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kdn.errors import LimitError, NoSpaceError, StoreError
from kdn.store.base import Entry, Span
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from kdn.store.tiered import FAILURES, REST_S, Tier, TieredStore
from tests.store.contract import content, listed, put, read
from tests.store.tiers import Flaky, holds, memory, run, stack


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


def test_a_promotion_that_fails_unexpectedly_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for it, so nobody else would tell."""

    class Broken(MemoryStore):
        async def put_entry(self, *args: object, **named: object) -> Entry:
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
