"""What a region acknowledged reaches the centre, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kdn.errors import NoSpaceError, NotAllowedError, RefusedError, StoreError
from kdn.region import outbox as outbox_module
from kdn.region.outbox import MAX_AT_ONCE, KeepAll, Outbox
from kdn.region.store import DOUBTFUL_S
from kdn.store.base import Entry
from kdn.store.disk import open_disk
from kdn.store.http import HttpStore
from tests.node.harness import Running, config_for, key_of, run, tenant
from tests.region.regions import (
    centre_and_link,
    depot_of,
    forgive,
    region,
    sent,
    store_at,
    until,
    whole,
)
from tests.store.tiers import Flaky, memory


async def put(store: HttpStore, number: int, data: bytes, etag: bytes = b"e") -> Entry:
    return await store.put(key_of(number), data, etag=etag, checksum=xxh3_64_intdigest(data))


async def told_central(node: Running, number: int) -> tuple[Any, ...]:
    """As GET, HEAD and a list tell."""
    path = f"/v1/objects/{key_of(number).hex()}"
    heads = [(await node.ask(way, path))[1].get("Kdn-Central") for way in ("GET", "HEAD")]
    listed = json.loads((await node.ask("GET", "/v1/objects"))[2])["objects"]
    [central] = [one.get("central") for one in listed if one["key"] == key_of(number).hex()]
    return (*heads, central)


def test_what_is_not_yet_central_says_so_and_gets_there(tmp_path: Path) -> None:
    async def work() -> None:
        async with centre_and_link(tmp_path / "centre") as (centre, link):
            link.cut()
            async with region(tmp_path / "r", link) as node, store_at(node) as store:
                for number in range(5):
                    await put(store, number, b"data %d" % number)
                assert await told_central(node, 1) == ("false", "false", False)
            # Another process goes on with it.
            async with region(tmp_path / "r", link) as node, store_at(node) as store:
                assert await told_central(node, 1) == ("false", "false", False)
                link.mend()
                forgive(node)
                await sent(node)
                assert await told_central(node, 1) == (None, None, None)
                async with store_at(centre) as there:
                    for number in range(5):
                        span = await there.get(key_of(number))
                        assert span is not None
                        assert bytes(span.data) == b"data %d" % number

    run(work())


def test_the_first_writer_at_the_centre_wins_everywhere(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "a", link) as a,
            region(tmp_path / "b", centre) as b,
            store_at(a) as at_a,
            store_at(b) as at_b,
        ):
            link.cut()
            assert (await put(at_a, 1, b"mine, of a", b"a")).etag == b"a"
            assert (await put(at_b, 1, b"of b", b"b")).etag == b"b"
            await sent(b)
            link.mend()
            forgive(a)
            await sent(a)
            for store in (at_a, at_b):
                span = await store.get(key_of(1))
                assert span is not None
                assert (bytes(span.data), span.entry.etag) == (b"of b", b"b")

    run(work())


def test_a_full_outbox_waits_for_the_centre(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link, outbox_bytes=40_000) as node,
            store_at(node) as store,
            store_at(centre) as there,
        ):
            link.cut()
            await put(store, 1, bytes(30_000))
            with pytest.raises(StoreError):
                await put(store, 2, bytes(30_000))
            assert await store.lookup([key_of(2)]) == [None]
            link.mend()
            forgive(node)
            await put(store, 3, bytes(100_000))
            assert await there.lookup([key_of(3)]) != [None]
            await sent(node)

    run(work())


def test_objects_of_tenants_stay_apart(tmp_path: Path) -> None:
    async def work() -> None:
        up = (tenant("ann", "up-a"), tenant("bob", "up-b"))
        here = (
            tenant("ann", "a", upstream_token="up-a"),
            tenant("bob", "b", upstream_token="up-b"),
        )
        async with (
            whole(config_for(tmp_path / "centre", *up)) as centre,
            region(tmp_path / "a", centre, *here) as one,
            region(tmp_path / "b", centre, *here) as other,
        ):
            stream = await one.put_chunk(1, token="a")
            await sent(one)
            path = f"/v1/chunks/{key_of(1).hex()}"
            assert (await other.ask("GET", path, token="a"))[::2] == (200, stream)
            assert (await centre.ask("GET", path, token="up-a"))[::2] == (200, stream)
            assert (await other.ask("GET", path, token="b"))[0] == 404
        with pytest.raises(Exception, match=r"tenants\.ann\.upstream_token"):
            async with region(tmp_path / "c", centre, tenant("ann", "a"), tenant("bob", "b")):
                pass

    run(work())


class Watched(Flaky):
    """How many puts are under way at once, and when each began."""

    def __init__(self) -> None:
        super().__init__(memory())
        self.now = self.most = 0
        self.begun: list[int] = []
        self.refuses: set[bytes] = set()

    async def put_entry(self, entry: Entry, *args: Any, **named: Any) -> Entry:
        self.now += 1
        self.most = max(self.most, self.now)
        self.begun.append(self.now)
        try:
            await asyncio.sleep(0.002)
            if entry.key in self.refuses:
                raise RefusedError("no")
            return await super().put_entry(entry, *args, **named)
        finally:
            self.now -= 1


async def _nothing(sent: Entry, kept: Entry) -> None:
    """Both are known."""


def test_after_a_cut_a_few_at_a_time_one_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(outbox_module, "LONGEST_PAUSE_S", 0.08)

    async def work() -> None:
        centre = Watched()
        store = await open_disk(tmp_path / "outbox", 2**22, KeepAll())
        box = Outbox(store, memory(), centre, _nothing)
        await box.open()
        centre.fails = True
        for number in range(60):
            data = b"%d" % number
            await box.add(Entry(key_of(number), b"e", len(data)), data, xxh3_64_intdigest(data))
        await until(lambda: box.failures >= 4)
        assert len(centre.calls) <= 2 * box.failures + 2  # a question each time, nothing more
        centre.refuses.add(key_of(7))
        centre.fails = False
        await until(lambda: len(box) == 1)
        assert centre.begun[0] == 1
        assert centre.most <= MAX_AT_ONCE
        assert key_of(7) in box  # not dropped, and not in the way
        assert box.refused == 1
        await box.close()

    run(work())


def test_full_means_no_space_and_nothing_is_dropped(tmp_path: Path) -> None:
    async def work() -> None:
        centre = Watched()
        centre.fails = True
        store = await open_disk(tmp_path / "outbox", 100_000, KeepAll())
        box = Outbox(store, memory(), centre, _nothing)
        await box.open()
        data = bytes(20_000)
        for number in range(4):
            await box.add(Entry(key_of(number), b"e", 20_000), data, xxh3_64_intdigest(data))
        with pytest.raises(NoSpaceError):
            await box.add(Entry(key_of(9), b"e", 20_000), data, xxh3_64_intdigest(data))
        assert len(box) == 4
        await box.close()

    run(work())


def test_a_put_does_not_wait_for_a_centre_that_is_silent(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (_, link),
            region(tmp_path / "r", link, upstream_timeout_s=20.0) as node,
            store_at(node) as store,
        ):
            link.hold()
            async with asyncio.timeout(10.0):
                await put(store, 1, b"here")
            assert depot_of(node).region.outbox
            link.mend()
            await sent(node)

    run(work())


def test_pieces_of_an_object_that_is_gone_do_not_count_as_stored(tmp_path: Path) -> None:
    async def work() -> None:
        data = bytes(range(256)) * 200
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link) as node,
            store_at(node) as store,
            store_at(centre) as there,
        ):
            await put(there, 1, data)
            assert await store.get(key_of(1), 0, 1000)
            assert await there.delete(key_of(1))
            await put(store, 1, data)
            await sent(node)
            for one in (store, there):
                span = await one.get(key_of(1))
                assert span is not None
                assert bytes(span.data) == data

    run(work())


def test_what_a_put_left_that_was_given_up_is_found_and_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link) as node,
            store_at(node) as store,
            store_at(centre) as there,
        ):
            outbox = depot_of(node).region.outbox
            assert outbox is not None
            put_entry = outbox.store.put_entry

            async def slow(*args: Any, **named: Any) -> Entry:
                await put_entry(*args, **named)
                raise StoreError("the disk took too long")

            link.cut()
            with monkeypatch.context() as patch:
                patch.setattr(outbox.store, "put_entry", slow)
                with pytest.raises(StoreError):
                    await put(store, 1, b"here")
            await put(store, 1, b"here")  # acknowledged
            assert (await told_central(node, 1))[:2] == ("false", "false")
            span = await store.get(key_of(1))
            assert span is not None
            assert bytes(span.data) == b"here"
            link.mend()
            await sent(node)
            assert await there.get(key_of(1))

    run(work())


def test_what_was_refused_and_then_damaged_is_not_tried_for_ever(tmp_path: Path) -> None:
    async def work() -> None:
        now_s = 0.0
        centre, store = Watched(), memory()
        box = Outbox(store, memory(), centre, _nothing, clock=lambda: now_s)
        await box.open()
        centre.refuses.add(key_of(1))
        await box.add(Entry(key_of(1), b"e", 1), b"x", xxh3_64_intdigest(b"x"))
        await until(lambda: box.refused == 1)
        await store.delete(key_of(1))
        now_s = 1000.0
        await box.add(Entry(key_of(2), b"e", 1), b"x", xxh3_64_intdigest(b"x"))
        await until(lambda: not len(box))
        assert box.lost == 1
        assert not box._not_before_s
        await box.close()

    run(work())


def test_a_refused_token_is_not_in_the_way_of_others(tmp_path: Path) -> None:
    """The centre refuses even the question what it has of that tenant."""

    class Strict(Watched):
        async def lookup(self, keys: Sequence[bytes], **named: Any) -> list[Entry | None]:
            if self.refuses & set(keys):
                raise NotAllowedError("no such token")
            return await super().lookup(keys, **named)

    async def work() -> None:
        centre = Strict()
        centre.refuses = {key_of(0), key_of(3)}
        box = Outbox(memory(), memory(), centre, _nothing)
        for number in range(8):
            await box.add(Entry(key_of(number), b"e", 1), b"x", xxh3_64_intdigest(b"x"))
        await box.open()
        await until(lambda: len(box) == 2)
        assert [key in box for key in sorted(centre.refuses)] == [True, True]
        assert (box.refused, box.failures, box.is_failing) == (2, 0, False)
        await box.close()

    run(work())


def test_a_centre_that_did_not_answer_is_hardly_waited_for(tmp_path: Path) -> None:
    """Engines give a lookup half a second: what is here must not be late for what is not. When the
    centre is back, the question that nobody waited for shows it."""

    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (_, link),
            region(tmp_path / "r", link) as node,
            store_at(node) as store,
        ):
            await put(store, 1, b"here")
            await sent(node)
            link.hold()
            tier = depot_of(node).region._tier
            tier.failed()
            async with asyncio.timeout(5 * DOUBTFUL_S):
                found = await store.lookup([key_of(1), key_of(2)])
            assert [one is not None for one in found] == [True, False]
            link.mend()
            await until(lambda: not tier.failures_in_row)

    run(work())
