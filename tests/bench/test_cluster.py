"""The parts of `kdn bench cluster` that judge others: they must be able to find fault."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kdn.bench.cluster.crowd import BATCH, Buffers, Seen, check, crowd, read_prompt
from kdn.bench.cluster.items import Item, make_items, put_all
from kdn.bench.cluster.ledger import Ledger, Operation, load, verify
from kdn.bench.cluster.long_link import long_link
from kdn.bench.cluster.raw import RawRedis
from kdn.bench.cluster.regions import Versions, histogram
from kdn.bench.cluster.report import figures_of, passes_of, print_report
from kdn.bench.cluster.rows import Rows
from kdn.bench.cluster.shards import start_shards
from kdn.bench.servers import MissingError
from kdn.errors import StoreError
from kdn.store.base import Entry, Span
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.node.harness import run


def store() -> MemoryStore:
    return MemoryStore(1 << 30, open_policy("lru"))


def some(number: int, size_bytes: int = 2000) -> list[Item]:
    return list(islice(make_items(size_bytes, 3), number))


class Forgetful(MemoryStore):
    """Acknowledges every tenth put, and keeps nothing of it."""

    puts = 0

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        self.puts += 1
        if self.puts % 10 == 0:
            return entry
        return await super().put_entry(entry, data, checksum, replacing)


class Forger(MemoryStore):
    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        found = await super().get(key, start, end, etag=etag)
        if found is None:
            return None
        return Span(found.entry, found.start, bytes(found.data[:-1]) + b"!")


class Broken(MemoryStore):
    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        raise StoreError("away")


async def loaded(tried: MemoryStore, seconds: float = 0.3) -> Ledger:
    ledger = Ledger()
    async with load(tried, ledger, 2, 2, [1]):
        await asyncio.sleep(seconds)
    return ledger


class TestLedger:
    def test_a_good_store_loses_nothing(self) -> None:
        async def test() -> None:
            tried = store()
            ledger = await loaded(tried)
            found = await verify(tried, ledger)
            assert found["acknowledged"] > 10
            assert (found["acknowledged_lost"], found["wrong_bytes"]) == (0, 0)
            assert ledger.outage(0.0)["errors"] == 0

        run(test())

    def test_what_was_acknowledged_and_is_not_there_is_found(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kdn.bench.cluster.ledger.VERIFY_PAUSE_S", 0.01)

        async def test() -> None:
            tried = Forgetful(1 << 30, open_policy("lru"))
            ledger = await loaded(tried)
            found = await verify(tried, ledger)
            assert found["acknowledged_lost"] == tried.puts // 10 > 0

        run(test())

    def test_wrong_bytes_are_found_by_readers_and_at_the_end(self) -> None:
        async def test() -> None:
            tried = Forger(1 << 30, open_policy("lru"))
            ledger = await loaded(tried)
            assert ledger.wrong_bytes > 0
            found = await verify(tried, ledger)
            assert found["wrong_bytes"] == ledger.wrong_bytes + found["acknowledged"]

        run(test())

    def test_errors_are_counted_with_their_reasons(self) -> None:
        async def test() -> None:
            ledger = await loaded(Broken(1 << 30, open_policy("lru")))
            assert ledger.outage(0.0)["errors"] > 0
            assert ledger.reasons() == ["StoreError: away"]

        run(test())

    def test_an_outage_lasts_until_the_last_that_failed_or_was_held_up(self) -> None:
        ledger = Ledger()
        ledger.operations = [
            Operation("get", 1.0, 2.0, "before"), Operation("get", 10.0, 10.1, ""),
            Operation("get", 10.0, 10.5, "x"), Operation("put", 10.2, 11.5, "x"),
            Operation("put", 10.3, 13.0, ""), Operation("get", 13.0, 13.1, ""),
        ]  # fmt: skip
        assert ledger.outage(10.0) == {
            "errors": 2, "error_s": 1.0, "back_s": 3.0, "operations": 5
        }  # fmt: skip

    def test_what_still_waits_is_held_up(self) -> None:
        ledger, start_s = Ledger(), time.monotonic()
        with ledger.noted("get"):
            ledger.under_way = {0: ("get", start_s - 3.0)}
            assert ledger.outage(start_s)["back_s"] >= 0.0
            assert ledger.since(start_s)[0].was_held_up
            ledger.under_way = dict.fromkeys(range(2), ("get", start_s))
        assert [one.kind for one in ledger.operations] == ["get"]


class TestCrowd:
    def test_reads_are_timed_and_right(self) -> None:
        async def test() -> None:
            tried, items = store(), some(40)
            await put_all(tried, items)
            seen = await crowd(tried, items, 3, 0.2)
            assert seen["reads"] > 0
            assert seen["bytes_per_s"] > 0
            assert (seen["errors"], seen["missing"], seen["wrong_bytes"]) == (0, 0, 0)

        run(test())

    def test_what_is_missing_or_wrong_is_seen(self) -> None:
        async def test() -> None:
            tried, items = store(), some(BATCH)
            await put_all(tried, items[1:])
            buffers, seen = Buffers(BATCH, 2000), Seen()
            await read_prompt(tried, items, buffers)
            check(items, buffers, seen, _Always(1))
            assert seen.missing == BATCH
            await put_all(tried, items)
            await read_prompt(tried, items, buffers)
            buffers.got(5)[7] ^= 1
            seen = Seen()
            check(items, buffers, seen, _Always(5))
            assert (seen.missing, seen.wrong_bytes) == (0, 1)

        run(test())


class _Always:
    def __init__(self, number: int) -> None:
        self.number = number

    def randrange(self, most: int) -> Any:
        return self.number


@pytest.mark.parametrize("number", [1, 2])
def test_raw_reads_bring_what_was_put(tmp_path: Path, number: int) -> None:
    items = some(BATCH, 3000)
    buffers = [memoryview(bytearray(3000)) for _ in items]
    try:
        with start_shards(tmp_path, number) as shards:
            raw = RawRedis(shards)
            raw.put(items)
            assert raw.read(items, buffers) == 3000 * BATCH
            raw.close()
    except MissingError as error:
        pytest.skip(str(error))
    assert all(item.is_whole(data) for item, data in zip(items, buffers, strict=True))


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                while data := client.recv(1 << 16):
                    client.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_a_link_delays_counts_and_can_be_cut(echo: tuple[str, int]) -> None:
    with long_link(echo, None, 0.03) as link:
        with socket.create_connection(("127.0.0.1", link.port), timeout=5) as one:
            began_s = time.monotonic()
            one.sendall(b"hello")
            assert one.recv(10) == b"hello"
            assert time.monotonic() - began_s >= 0.06
            assert (link.up_bytes, link.down_bytes) == (5, 5)
            link.cut()
            assert not _recv(one)
        with socket.create_connection(("127.0.0.1", link.port), timeout=5) as one:
            assert not _recv(one)
        link.restore()
        with socket.create_connection(("127.0.0.1", link.port), timeout=5) as one:
            one.sendall(b"again")
            assert one.recv(10) == b"again"


def _recv(one: socket.socket) -> bytes:
    try:
        return one.recv(10)
    except ConnectionError:
        return b""


def test_ages_count_from_when_something_newer_was_acknowledged() -> None:
    written = Versions([10.0, 11.0, 12.0], [1, 2, 3])
    assert written.age_s(11.5, 2) == 0.0
    assert written.age_s(11.5, 1) == 0.5
    assert written.age_s(13.0, 1) == 2.0
    assert written.age_s(13.0, 3) == 0.0
    assert written.age_s(10.5, 0) == 0.5
    told = histogram([0.0, 0.0, 0.02, 0.5, 9.0])
    assert [count for count in told.values() if count] == [2, 1, 1, 1]
    assert sum(told.values()) == 5


ROWS: list[dict[str, Any]] = [
    {"part": "a", "what": "ratio", "store": "redis", "ratio": 0.9},
    {"part": "a", "what": "ratio", "store": "s3", "ratio": 0.7},
    {"part": "b", "what": "kill a master", "back_s": 3.0, "cluster_s": 2.5, "errors": 1},
    {"part": "b", "what": "kill a node", "errors": 2, "back_s": 0.0},
    {"part": "b", "what": "kill a master, all", "acknowledged_lost": 1, "wrong_bytes": 0,
     "reasons": ["StoreError: x"]},
    {"part": "c", "what": "one document", "long_link_copies": 1.01, "wrong_bytes": 0},
    {"part": "c", "what": "staleness", "not_monotonic": 0, "histogram": {"0 s": 3}},
    {"part": "c", "what": "force_latest", "stale_force_latest": 0},
]  # fmt: skip


def test_the_report_fails_what_fails(tmp_path: Path) -> None:
    saved = tmp_path / "rows.json"
    rows = Rows({"seed": 1}, Console(file=io.StringIO()), saved)
    for row in ROWS:
        rows.add(**row)
        assert json.loads(saved.read_text())["rows"][-1] == row
    told = figures_of(rows)
    wanted = {"redis_of_raw", "s3_of_raw", "acknowledged_lost", "wrong_bytes", "failover_s",
              "long_link_copies", "stale_force_latest"}  # fmt: skip
    assert wanted <= told.keys()
    assert told["failover_s"] == 3.0
    assert passes_of(told) == {
        "redis_of_raw": True, "s3_of_raw": False, "failover_over_cluster_s": True,
        "long_link_copies": True, "acknowledged_lost": False, "wrong_bytes": True,
        "node_errors": False, "not_monotonic": True, "stale_force_latest": True,
    }  # fmt: skip
    out = io.StringIO()
    results = {**told, "passes": passes_of(told), "notes": [], "hardware": {}, "rows": rows.rows}
    print_report(Console(file=out, width=150), results)
    assert "FAILS" in out.getvalue()
    assert "StoreError: x" in out.getvalue()
