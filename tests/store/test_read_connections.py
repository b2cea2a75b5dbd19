"""Batch reads straight from a socket: what a node answers, whatever that is, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from xxhash import xxh3_64_intdigest

from kdn.errors import FormatError, KdnError, LimitError, NotAllowedError, StoreError
from kdn.protocol.frames import Frame, pack
from kdn.store.http import HttpStore
from kdn.store.node_client import HttpLimits, NodeClient
from kdn.store.read_connections import MAX_HEAD_BYTES
from kdn.store.streaming import Ask, Collected
from tests.store.contract import closing

DATA = bytes(range(256)) * 40
ASKS = [Ask(b"one", 0, len(DATA), b"e"), Ask(b"two", 5, 9, b"e")]
LIMITS = HttpLimits(connections=2, connect_s=0.5, silence_s=0.2, deadline_s=2.0)

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def frame(number: int, start: int, data: bytes) -> bytes:
    ask = ASKS[number]
    head = Frame(
        number, 200, ask.key, ask.etag, object_bytes=len(DATA), start=start, length=len(data),
        checksum=xxh3_64_intdigest(data),
    )  # fmt: skip
    return pack(head) + data


BODY = frame(0, 0, DATA) + frame(1, 5, DATA[5:9])


def answer(body: bytes = BODY, status: str = "200 OK", **headers: str) -> bytes:
    fields = {
        "Content-Length": str(len(body)),
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Node:
    """Answers every request as the script says."""

    def __init__(self, *script: bytes | None) -> None:
        """One for each request, the last for all others; None: the connection is closed."""
        self.script = list(script)
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                if reply is None:
                    return
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()

    @asynccontextmanager
    async def store(self, **options: Any) -> AsyncIterator[HttpStore]:
        server = await asyncio.start_server(self.serve, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        client = NodeClient(f"http://127.0.0.1:{port}/base", limits=LIMITS, **options)
        async with closing(HttpStore(client, collection="chunks")) as store:
            yield store
        server.close()


async def read(store: HttpStore) -> list[bytes]:
    found = Collected(len(ASKS))
    await store.read_into(ASKS, found)
    return found.found


def run(test: Awaitable[None]) -> None:
    asyncio.run(test)  # type: ignore[arg-type]


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_one_connection_serves_reads_that_follow_each_other(runner: Any) -> None:
    async def test() -> None:
        node = Node(answer())
        async with node.store(token="secret-token", client="me") as store:
            for _ in range(3):
                assert await read(store) == [DATA, DATA[5:9]]
            assert node.connections == 1
            together = await asyncio.gather(*(read(store) for _ in range(6)))
            assert together == [[DATA, DATA[5:9]]] * 6
            assert node.connections == 2, "as many as the limits say"
        [head, _] = node.requests[0].split(b"\r\n\r\n")
        assert head.startswith(b"POST /base/v1/read HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nAuthorization: Bearer secret-token\r\n" in head
        assert b"\r\nKdn-Client: me\r\n" in head

    runner(test())


WRONG = {
    "not HTTP": b"KDNF" + b"x" * 300 + b"\r\n\r\n",
    "an old HTTP": answer().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "no status": b"HTTP/1.1 maybe\r\n\r\n",
    "to be continued": b"HTTP/1.1 100 Continue\r\n\r\n" + answer(),
    "no length": b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
    "chunks": answer(Transfer_Encoding="chunked"),
    "a negative length": answer(Content_Length="-1"),
    "two lengths": answer().replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n", 1),
    "no header": answer().replace(b"\r\n\r\n", b"\r\nnothing\r\n\r\n", 1),
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * (MAX_HEAD_BYTES // 6 + 1),
    "a long refusal": answer(b"x", "503 Busy", Content_Length=str(1 << 40)),
    "no frames": answer(b""),
    "too few frames": answer(frame(0, 0, DATA)),
    "too many frames": answer(BODY + frame(1, 5, DATA[5:9])),
    "more than its length": answer() + b"more",
    "another ask": answer(frame(1, 5, DATA[5:9])),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_named_errors_and_end_the_connection(name: str) -> None:
    async def test() -> None:
        node = Node(WRONG[name], answer())
        async with node.store() as store:
            if name == "more than its length":  # then all was there
                await asyncio.gather(read(store), return_exceptions=True)
                await asyncio.sleep(0.05)
            else:
                with pytest.raises((StoreError, FormatError, LimitError)):
                    await read(store)
            assert await read(store) == [DATA, DATA[5:9]]
            assert node.connections == 2

    run(test())


def test_a_refusal_is_the_error_it_means_and_keeps_the_connection() -> None:
    refusal = answer(b'{"code": "forbidden", "message": "not you"}', "403 Forbidden")

    async def test() -> None:
        node = Node(refusal, answer())
        async with node.store() as store:
            with pytest.raises(NotAllowedError, match="not you"):
                await read(store)
            assert await read(store) == [DATA, DATA[5:9]]
            assert node.connections == 1

    run(test())


@pytest.mark.parametrize("sent", [1, 50, len(answer()) - 3])
def test_an_answer_that_is_cut_or_goes_silent(sent: int) -> None:
    async def test() -> None:
        node = Node(answer()[:sent], answer())
        async with node.store() as store:
            with pytest.raises(StoreError, match="no byte"):
                await read(store)
            assert await read(store) == [DATA, DATA[5:9]]

    run(test())


def test_a_connection_that_was_closed_while_nobody_used_it() -> None:
    async def test() -> None:
        node = Node(answer(), None, answer())
        async with node.store() as store:
            for _ in range(2):
                assert await read(store) == [DATA, DATA[5:9]]
            assert (node.connections, len(node.requests)) == (2, 3)

    run(test())


def test_a_node_that_only_closes_is_not_asked_for_ever() -> None:
    async def test() -> None:
        node = Node(None)
        async with node.store() as store:
            with pytest.raises(StoreError):
                await read(store)
            assert node.connections == 1

    run(test())


def test_it_says_that_it_closes() -> None:
    async def test() -> None:
        node = Node(answer(Connection="close"))
        async with node.store() as store:
            await read(store)
            await read(store)
            assert node.connections == 2

    run(test())


def test_a_read_that_is_cancelled_leaves_no_connection() -> None:
    async def test() -> None:
        node = Node(answer()[:500], answer())
        async with node.store() as store, asyncio.timeout(20):
            task = asyncio.create_task(read(store))
            while not node.connections:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            while not node.closed:
                await asyncio.sleep(0.01)
            assert (node.connections, node.closed) == (1, 1)
            assert await read(store) == [DATA, DATA[5:9]]

    run(test())


def test_closing_ends_what_is_under_way() -> None:
    async def test() -> None:
        node = Node(answer()[:500])
        async with node.store() as store:
            task = asyncio.create_task(read(store))
            await asyncio.sleep(0.05)
            await store.close()
            with pytest.raises(StoreError):
                await task

    run(test())


def test_a_mistake_of_the_receivers_is_raised() -> None:
    class Wrong(Collected):
        def taken(self, number: int, start: int, num_bytes: int) -> None:
            raise RuntimeError("a mistake")

    async def test() -> None:
        node = Node(answer())
        async with node.store() as store:
            with pytest.raises(RuntimeError, match="a mistake"):
                await store.read_into(ASKS, Wrong(2))

    run(test())


@pytest.mark.parametrize("token", ["a\r\nKdn-Client: other", "a\0b", "\u00e4"])
def test_nothing_can_begin_another_header(token: str) -> None:
    async def test() -> None:
        node = Node(answer())
        async with node.store(token=token) as store:
            with pytest.raises(KdnError):
                await read(store)
        assert not node.requests

    run(test())
