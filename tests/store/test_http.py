"""The store of another node: the contract over a real one, and what broken nodes may say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from xxhash import xxh3_64_intdigest

import tests.store.contract as contract
from kdn.codec.format import Bitstream
from kdn.errors import (
    KdnError,
    LimitError,
    MismatchError,
    NoSpaceError,
    RefusedError,
    StoreError,
    UnavailableError,
)
from kdn.protocol.frames import MAX_KEY_BYTES, Frame, pack
from kdn.store.base import Entry, Hints, Store
from kdn.store.evict import open_policy
from kdn.store.http import HttpStore
from kdn.store.http_answers import told_entry
from kdn.store.memory import MemoryStore
from kdn.store.node_client import HttpLimits, NodeClient
from kdn.store.tiered import Tier, TieredStore
from tests.node.harness import Running, chunk_stream, config_for, key_of, running, tenant
from tests.store.contract import StoreContract, closing, content, etag_of, listed, put, read

LIMIT_S = 20.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test

    asyncio.run(bounded())


class TestHttp(StoreContract):
    evicts = False  # the node does, and does not say
    counts = False

    @pytest.fixture(autouse=True)
    def _keys_of_a_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(contract, "MAX_KEY_BYTES", MAX_KEY_BYTES)

    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        async with running(config_for(self.folder)) as node, closing(HttpStore(node.url)) as store:
            yield store

    def test_hints_come_back(self) -> None:
        """Seconds saved travel as float32."""

        async def test(store: Store) -> None:
            await put(store, b"plain", content("plain", 10))
            await put(store, b"child", content("child", 10), Hints(b"plain", 1.1))
            found = await store.lookup([b"plain", b"child"])
            assert [entry and entry.hints.parent for entry in found] == [None, b"plain"]
            assert [entry and entry.hints.saved_s for entry in found] == [
                0.0,
                pytest.approx(1.1, rel=1e-6),
            ]
            assert [entry.hints async for entry in store.list(b"c")] == [Hints(b"plain", 1.1)]

        self.run(test)

    def test_more_keys_than_one_request_takes(self) -> None:
        async def test(store: Store) -> None:
            for number in range(3):
                await put(store, b"key %d" % number, content(b"%d" % number, 10))
            asked = [b"key %d" % number for number in range(5000)]
            found = await store.lookup(asked)
            assert [entry is not None for entry in found] == [True] * 3 + [False] * 4997

        self.run(test)

    def test_lists_page_by_page(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kdn.store.node_client.MAX_LISTED", 4)

        async def test(store: Store) -> None:
            keys = [b"%02d" % number for number in range(13)]
            for key in keys:
                await put(store, key, content(key, 10))
            assert await listed(store) == keys

        self.run(test)

    def test_an_object_of_many_frames(self) -> None:
        async def test(store: Store) -> None:
            data = content("large", (5 << 20) + 17)
            await put(store, b"large", data)
            assert await read(store, b"large") == data
            span = await store.get(b"large", 5, 3 << 20)
            assert span is not None
            assert bytes(span.data) == data[5 : 3 << 20]

        self.run(test)

    def test_keys_a_node_cannot_have_are_misses(self) -> None:
        async def test(store: Store) -> None:
            long = b"k" * (MAX_KEY_BYTES + 1)
            assert await store.get(long) is None
            assert await store.lookup([long]) == [None]
            assert await store.delete(long) is False
            with pytest.raises(LimitError):
                await put(store, long, b"data")
            with pytest.raises(LimitError):
                await put(store, b"key", b"data", Hints(long))

        self.run(test)


def chunks_of(url: str, token: str) -> HttpStore:
    return HttpStore(NodeClient(url, token=token), collection="chunks")


def test_chunks_tokens_and_refusals(tmp_path: Path) -> None:
    async def test() -> None:
        config = config_for(tmp_path, tenant("a", "secret"), tenant("b", "other", quota_bytes=3000))
        async with running(config) as node:
            stream = chunk_stream(key_of(1))
            checksum, etag = xxh3_64_intdigest(stream), Bitstream.parse(stream).header.stream_id
            async with closing(chunks_of(node.url, "secret")) as store:
                with pytest.raises(MismatchError):
                    await store.put(key_of(2), stream, etag=b"e" * 16, checksum=checksum)
                entry = await store.put(key_of(1), stream, etag=etag, checksum=checksum)
                assert entry.etag == etag
                assert await read(store, key_of(1)) == stream
            async with closing(chunks_of(node.url, "other")) as store:
                assert await store.get(key_of(1)) is None
                with pytest.raises(NoSpaceError, match="quota"):
                    await store.put(key_of(1), stream, etag=etag, checksum=checksum)
            async with closing(chunks_of(node.url, "wrong")) as store:
                with pytest.raises(StoreError, match="unauthorized"):
                    await store.get(b"key")

    run(test())


async def num_requests(node: Running) -> int:
    """Requests for objects that the node has answered."""
    text = (await node.ask("GET", "/metrics"))[2].decode()
    counts = re.findall(r'kdn_request_seconds_count\{.*route="(.+?)".*\} (\d+)', text)
    return sum(int(number) for route, number in counts if route.startswith("/v1/"))


def test_every_put_is_one_request_and_tells_what_is_there(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(config_for(tmp_path)) as node, closing(HttpStore(node.url)) as store:

            async def asked(data: bytes, hints: Hints, replacing: bytes | None = None) -> Entry:
                before = await num_requests(node)
                entry = await put(store, b"key", data, hints, replacing=replacing)
                assert await num_requests(node) == before + 1
                [found] = await store.lookup([b"key"])
                assert found == entry
                return entry

            old, new = content("old", 300), content("new", 400)
            first = await asked(old, Hints(b"parent", 0.5))
            assert first == Entry(b"key", etag_of(old), 300, Hints(b"parent", 0.5))
            assert await asked(new, Hints(None, 8.0)) == first, "taken"
            assert await asked(new, Hints(), replacing=etag_of(new)) == first, "another one: 412"
            replaced = await asked(new, Hints(None, 8.0), replacing=etag_of(old))
            assert replaced == Entry(b"key", etag_of(new), 400, Hints(None, 8.0))

    run(test())


def test_a_put_that_is_answered_with_another_key_is_refused() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        told = {"key": "00", "etag": "01", "size_bytes": 4, "parent": None, "saved_s": 0}
        return web.json_response(told, status=201)

    async def test() -> None:
        async with fake(answer) as url, closing(quick(url)) as store:
            with pytest.raises(StoreError, match="is there"):
                await put(store, b"key", b"data")

    run(test())


def test_a_node_of_the_version_before() -> None:
    """It tells no hints, and nothing of what is there instead."""
    told = {"key": b"key".hex(), "etag": "01", "size_bytes": 4}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            return web.Response(body=frame_of(b"key", b"", etag=b"other", object_bytes=7))
        if "If-Match" in request.headers:
            return web.json_response({"code": "precondition_failed", "message": ""}, status=412)
        return web.json_response(told, status=201)

    async def test() -> None:
        async with fake(answer) as url, closing(quick(url)) as store:
            assert await put(store, b"key", b"data") == Entry(b"key", b"\x01", 4, Hints())
            there = await put(store, b"key", b"data", replacing=b"bad")
            assert (there.etag, there.size_bytes) == (b"other", 7)

    run(test())


@pytest.mark.parametrize(
    "more",
    [
        {"size_bytes": -1}, {"size_bytes": 4.0}, {"size_bytes": True}, {"size_bytes": None},
        {"saved_s": -1}, {"saved_s": float("nan")}, {"saved_s": float("inf")},
        {"saved_s": 10**400}, {"saved_s": "1"}, {"saved_s": None}, {"saved_s": False},
        {"parent": 3}, {"parent": "x"},
    ],
)  # fmt: skip
def test_nonsense_about_an_object_is_refused_by_name(more: dict[str, Any]) -> None:
    told = {"key": "00", "etag": "01", "size_bytes": 4, "parent": None, "saved_s": 0}
    assert told_entry(told) == Entry(b"\0", b"\x01", 4, Hints())
    with pytest.raises(StoreError, match="expected"):
        told_entry(told | more)


def test_an_object_is_an_object() -> None:
    with pytest.raises(StoreError, match="expected an object"):
        told_entry([])


@pytest.mark.parametrize(
    ("token", "path", "status"),
    [("wrong", "objects", 401), ("reader", "objects", 403), ("writer", "nothing", 404)],
)
def test_a_refusal_that_no_retry_changes(
    tmp_path: Path, token: str, path: str, status: int
) -> None:
    tenants = tenant("t", "reader", "read_tokens"), tenant("u", "writer")

    async def test() -> None:
        async with running(config_for(tmp_path, *tenants)) as node:
            client = NodeClient(node.url, token=token)
            async with closing(HttpStore(client, collection=path)) as store:
                with pytest.raises(RefusedError, match=f"{status} "):
                    await put(store, b"key", b"data")

    run(test())


# nodes that are gone, slow, or wrong


@asynccontextmanager
async def fake(handler: Handler) -> AsyncIterator[str]:
    """A server that answers everything with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


QUICK = HttpLimits(connections=2, connect_s=0.5, silence_s=0.2, deadline_s=0.5)


def quick(url: str) -> HttpStore:
    return HttpStore(NodeClient(url, limits=QUICK))


def test_nobody_there_is_a_named_error() -> None:
    async def test() -> None:
        async with closing(quick("http://127.0.0.1:1")) as store:
            for ask in (store.get(b"k"), store.lookup([b"k"]), store.delete(b"k"), store.stats()):
                with pytest.raises(StoreError, match="127"):
                    await ask
            with pytest.raises(StoreError):
                await put(store, b"k", b"data")
            with pytest.raises(StoreError):
                await listed(store)

    run(test())


def test_a_node_that_does_not_answer_costs_its_deadline() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.Response()

    async def test() -> None:
        async with fake(silent) as url, closing(quick(url)) as store:
            started_s = asyncio.get_running_loop().time()
            results = await asyncio.gather(
                *(store.get(b"%d" % i) for i in range(6)), return_exceptions=True
            )
            assert [type(result) for result in results] == [UnavailableError] * 6
            assert asyncio.get_running_loop().time() - started_s < 4.5  # it is silent for 5

    run(test())


def frame_of(key: bytes, data: bytes, **fields: object) -> bytes:
    usual = {
        "number": 0, "status": 200, "key": key, "etag": b"e", "object_bytes": len(data),
        "start": 0, "length": len(data), "checksum": xxh3_64_intdigest(data),
    }  # fmt: skip
    return pack(Frame(**{**usual, **fields})) + data  # type: ignore[arg-type]


WRONG = {
    "nothing": b"",
    "no frame": b"x" * 100,
    "another key": frame_of(b"other", b"data"),
    "another number": frame_of(b"key", b"data", number=1),
    "damaged data": frame_of(b"key", b"data")[:-1] + b"x",
    "cut data": frame_of(b"key", b"data")[:-1],
    "no last frame": frame_of(b"key", b"data", last=False),
    "another start": frame_of(b"key", b"data", start=1, object_bytes=5),
    "a hole": frame_of(b"key", b"da", object_bytes=5, last=False)
    + frame_of(b"key", b"ta", start=3, object_bytes=5),
    "too short": frame_of(b"key", b"data", object_bytes=9),
    "too long": frame_of(b"key", b"data", object_bytes=3),
    "two objects": frame_of(b"key", b"da", object_bytes=4, last=False)
    + frame_of(b"key", b"ta", start=2, object_bytes=4, etag=b"f"),
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_wrong_bytes_are_a_counted_miss(body: bytes) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/stats":
            return web.json_response({"objects": 0, "size_bytes": 0, "quota_bytes": 0})
        return web.Response(body=body)

    async def test() -> None:
        async with fake(answer) as url, closing(quick(url)) as store:
            assert await store.get(b"key") is None
            stats = await store.stats()
            assert (stats.misses, stats.corruptions) == (1, 1)

    run(test())


@pytest.mark.parametrize(("status", "lost"), [(404, True), (410, True), (412, True), (503, False)])
def test_frames_that_carry_no_bytes_of_the_object(status: int, lost: bool) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=frame_of(b"key", b"\0\0\0", status=status))

    async def test() -> None:
        async with fake(answer) as url, closing(quick(url)) as store:
            if lost:
                assert await store.get(b"key") is None
            else:
                with pytest.raises(StoreError):
                    await store.get(b"key")

    run(test())


def test_lookup_answers_for_other_keys_are_misses() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=frame_of(b"b", b"", number=0) + frame_of(b"a", b"", number=1))

    async def test() -> None:
        async with fake(answer) as url, closing(quick(url)) as store:
            assert await store.lookup([b"a", b"b"]) == [None, None]

    run(test())


def test_answers_longer_than_asked_for_are_refused_unread() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * (5 << 20))

    async def test() -> None:
        async with fake(answer) as url, closing(quick(url)) as store:
            with pytest.raises(LimitError):
                await store.get(b"key", 0, 10)

    run(test())


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"objects": [{}], "next": null}', b"-"])
def test_json_that_is_not_the_protocols_is_a_named_error(body: bytes) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    async def test() -> None:
        async with fake(answer) as url, closing(quick(url)) as store:
            with pytest.raises(KdnError):
                await listed(store)
            with pytest.raises(KdnError):
                await put(store, b"key", b"data")
            with pytest.raises(KdnError):
                await store.stats()

    run(test())


@pytest.mark.parametrize("status", [302, 400, 418, 500, 503])
def test_refusals_are_named_errors_with_the_nodes_words(status: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = {"code": "some_code", "message": "why"}
        return web.json_response(body, status=status, headers={"Location": "/elsewhere"})

    async def test() -> None:
        async with fake(answer) as url, closing(quick(url)) as store:
            with pytest.raises(StoreError, match="some_code: why"):
                await store.get(b"key")

    run(test())


def test_a_request_cut_off_once_is_sent_again() -> None:
    async def test() -> None:
        seen: list[str] = []

        async def cut_first(request: web.Request) -> web.StreamResponse:
            seen.append(request.method)
            if seen.count(request.method) == 1:
                assert request.transport is not None
                request.transport.abort()
            return web.Response(body=frame_of(b"key", b"data"))

        async def cut(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        async with fake(cut) as url, closing(quick(url)) as store:
            with pytest.raises(StoreError, match="cut off"):
                await store.get(b"key")
        async with fake(cut_first) as url, closing(quick(url)) as store:
            assert await read(store, b"key") == b"data"
        assert seen == ["POST", "POST"]

    run(test())


def test_a_local_cache_over_a_node(tmp_path: Path) -> None:
    """What is put reaches the node, and what others put there is found through it."""

    async def test() -> None:
        async with running(config_for(tmp_path)) as node:
            memory = MemoryStore(20_000, open_policy("cost"))
            tiers = [Tier("ram", memory, 1.0), Tier("node", HttpStore(node.url), 5.0)]
            async with closing(TieredStore(tiers)) as store, closing(HttpStore(node.url)) as other:
                for number in range(30):
                    await put(store, b"%02d" % number, content(b"%d" % number, 3000))
                for number in range(30):
                    assert await read(store, b"%02d" % number) == content(b"%d" % number, 3000)
                assert len(await listed(other)) == 30
                entry = await put(other, b"new", content(b"new", 3000))
                assert await store.lookup([b"new"]) == [entry]
                assert await read(store, b"new") == content(b"new", 3000)

    run(test())
