"""Web servers that serve an export badly: each way has an error by name, or is a miss, and ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import uvloop

from kdn.errors import FormatError, KdnError, LimitError, NotAllowedError, RefusedError, StoreError
from kdn.store.base import Entry, Hints
from kdn.store.node_client import HttpLimits
from kdn.store.static import StaticStore
from kdn.store.static_client import StaticClient, is_export
from kdn.store.static_layout import (
    MAX_PAGE_BYTES,
    chunk_path,
    index_path,
    pack_page,
    pack_pointer,
    parse_page,
)
from kdn.store.streaming import Ask, Collected

DATA = bytes(range(256)) * 40
ETAG = b"e" * 16
LIMITS = HttpLimits(connections=2, connect_s=0.5, silence_s=0.3, deadline_s=2.0)
ROOT = b'{"format":"kdn export","version":1}'


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def ask(number: int, start: int = 0, end: int = len(DATA)) -> Ask:
    return Ask(key(number), start, end, ETAG)


ASKS = [ask(1), ask(2, 5, 9), ask(3, 100, 4000)]
WANTED = [DATA[one.start : one.end] for one in ASKS]


def answer(status: str, body: bytes, **headers: str) -> bytes:
    fields = {"Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{k}: {v}" for k, v in fields.items() if v)]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Web:
    """Serves ranges of DATA for every chunk, unless a script says otherwise, and files by path."""

    def __init__(self, *script: bytes | None, files: dict[str, bytes] | None = None) -> None:
        """Of `script`, each is the answer to the next request of a chunk; b"": a right one, None:
        the connection is closed."""
        self.script = list(script)
        self.files = {"kdn-export.json": ROOT, **(files or {})}
        self.headers: dict[str, str] = {}
        self.requests: list[str] = []
        self.connections = 0
        self.per_connection = 10**9

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for number in range(1, self.per_connection + 1):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1].removeprefix("/x/")
                self.requests.append(path)
                reply = self.reply(path, head)
                if reply is None:
                    break
                if number == self.per_connection:
                    reply = reply.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def reply(self, path: str, head: str) -> bytes | None:
        if not path.startswith("chunks/"):
            body = self.files.get(path)
            return answer("404 No", b"x") if body is None else answer("200 OK", body)
        scripted = self.script.pop(0) if self.script else b""
        if scripted != b"":
            return scripted
        found = re.search(r"Range: bytes=(\d+)-(\d+)\r\n", head)
        assert found
        start, last = int(found[1]), int(found[2])
        return ranged(start, last + 1)

    @asynccontextmanager
    async def store(self) -> AsyncIterator[StaticStore]:
        server = await asyncio.start_server(self.serve, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        store = StaticStore(StaticClient(f"http://127.0.0.1:{port}/x/", limits=LIMITS))
        try:
            yield store
        finally:
            await store.close()
            server.close()

    def read(self, asks: Sequence[Ask] = ASKS) -> Collected:
        async def work() -> Collected:
            async with self.store() as store:
                got = Collected(len(asks))
                await store.read_into(asks, got)
                return got

        return uvloop.run(work())

    def look_up(self, *numbers: int) -> list[int]:
        async def work() -> list[int]:
            async with self.store() as store:
                found = await store.lookup([key(number) for number in numbers], head_bytes=9)
                return [int.from_bytes(one.key) for one in found if one]

        return uvloop.run(work())


def ranged(start: int, end: int, size: int = len(DATA), **headers: str) -> bytes:
    told = {"Content_Range": f"bytes {start}-{end - 1}/{size}", **headers}
    return answer("206 Partial", DATA[start:end], **told)


def test_many_ranges_take_one_connection_and_go_where_they_belong() -> None:
    web = Web()
    assert web.read().found == WANTED
    assert web.connections == 1
    assert web.requests == [chunk_path(one.key, one.etag) for one in ASKS]


@pytest.mark.parametrize("per_connection", [1, 2])
def test_a_server_that_ends_connections_is_asked_again(per_connection: int) -> None:
    web = Web()
    web.per_connection = per_connection
    asks = [ask(n, n, n + 9) for n in range(7)]
    assert web.read(asks).found == [DATA[n : n + 9] for n in range(7)]
    assert web.connections == -(-7 // per_connection)


def test_a_cut_between_answers_is_asked_again_and_within_one_is_an_error() -> None:
    assert Web(b"", None).read().found == WANTED
    with pytest.raises(StoreError, match="no answer"):
        Web(None).read()

    cut = Web(ranged(0, len(DATA))[:-7])
    cut.per_connection = 1
    with pytest.raises(StoreError, match="cut off"):
        cut.read()


def test_a_missing_file_is_gone_and_the_others_come() -> None:
    for missing in (
        answer("404 No", b"<html>" * 100),
        answer("410 Gone", b""),
        answer("416 No", b"", Content_Range=f"bytes */{len(DATA)}"),
        answer(
            "404 No", b"5\r\nhello\r\n0\r\n\r\n", Content_Length="", Transfer_Encoding="chunked"
        ),
        answer("404 No", b"", Content_Length="999999999"),
    ):
        assert Web(b"", missing).read().found == [WANTED[0], b"", WANTED[2]]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (answer("200 OK", DATA), "serves no ranges"),
        (answer("302 Found", b"", Location="http://elsewhere/"), "elsewhere"),
        (ranged(5, 9, Content_Encoding="gzip"), "gzip"),
        (ranged(6, 10), "expected bytes 5 to 9"),
        (ranged(5, 8), "expected bytes 5 to 9"),
        (ranged(5, 9).replace(b"Content-Length: 4", b"Content-Length: 5"), "expected bytes 5 to 9"),
        (ranged(5, 9, Content_Range="bytes 5-8"), "expected a range"),
        (ranged(5, 9, Content_Length="", Transfer_Encoding="chunked"), "Content-Length"),
        (ranged(5, 9, Content_Range=""), "expected a range"),
        (answer("503 Busy", b""), "found 503"),
        (b"HTTP/1.0 200 OK\r\n\r\n", "HTTP/1.1"),
        (b"SSH-2.0-nobody\r\n\r\n", "HTTP/1.1"),
        (b"x" * 20_000, "at most 16384"),
    ],
)
def test_a_wrong_answer_is_an_error_by_name(bad: bytes, why: str) -> None:
    with pytest.raises((StoreError, LimitError), match=why):
        Web(b"", bad).read()


def test_a_refusal_is_told_before_it_is_known_to_be_an_export_and_a_miss_after() -> None:
    forbidden = answer("403 Forbidden", b"")

    class Bucket(Web):
        def reply(self, path: str, head: str) -> bytes | None:
            return super().reply(path, head) if path in self.files else forbidden

    assert Bucket().look_up(1) == []
    closed = Bucket()
    closed.files.clear()
    with pytest.raises(NotAllowedError):
        closed.look_up(1)
    with pytest.raises(NotAllowedError):
        Web(forbidden).read([ask(1)])
    page = pack_page([Entry(key(1), ETAG, 9, head=b"h")], {})

    async def work() -> None:
        async with Web(forbidden, files={index_path(key(1)): page}).store() as store:
            assert await store.lookup([key(1)]) != [None]
            got = Collected(1)
            await store.read_into([ask(1)], got)
            assert got.found == [b""]

    uvloop.run(work())


def test_a_server_that_says_nothing_or_never_ends_is_given_up() -> None:
    class Silent(Web):
        def reply(self, path: str, head: str) -> bytes | None:
            return ranged(0, len(DATA))[:200]

    with pytest.raises(StoreError, match="no byte for"):
        Silent().read([ask(1)])

    class Endless(Web):
        def reply(self, path: str, head: str) -> bytes | None:
            return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * (MAX_PAGE_BYTES + 9)

    assert Endless().look_up(1) == []


# the index


def entry(number: int, parent: int | None = None) -> Entry:
    hints = Hints(None if parent is None else key(parent), 1.0)
    return Entry(key(number), ETAG, 100, hints, b"head of it")


def test_a_page_is_read_back_as_it_was_written_whole_or_in_part() -> None:
    entries = [entry(1), entry(2, 1), entry(3, 2)]
    body = pack_page(entries, {key(3): [key(4), key(5)]})
    page = parse_page(key(1), body, complete=True)
    assert list(page.entries.values()) == entries
    assert page.onward == {key(3): (key(4), key(5))}
    assert page.parsed_bytes == len(body)
    for size in range(len(body)):
        part = parse_page(key(1), body[:size], complete=False)
        assert list(part.entries.values()) == entries[: len(part.entries)]
        if size == 0 or part.parsed_bytes < size:
            with pytest.raises(FormatError):
                parse_page(key(1), body[:size], complete=True)
    for at in range(0, len(body), 7):
        spoilt = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        with pytest.raises(FormatError):
            parse_page(key(1), spoilt, complete=True)
    assert parse_page(key(2), pack_pointer(key(2), key(1)), complete=True).instead == key(1)


def test_an_index_of_something_else_is_a_miss_and_pages_that_lead_in_circles_end() -> None:
    other = {index_path(key(1)): pack_page([entry(2)], {})}
    assert Web(files=other).look_up(1) == []
    circle = {
        index_path(key(1)): pack_pointer(key(1), key(2)),
        index_path(key(2)): pack_pointer(key(2), key(1)),
    }
    assert Web(files=circle).look_up(1, 2, 3, 4, 5, 6) == []
    onward = {
        index_path(key(1)): pack_page([entry(1)], {key(1): [key(2)]}),
        index_path(key(2)): pack_page([entry(2)], {key(2): [key(1)]}),
    }
    assert Web(files=onward).look_up(1, 2) == [1, 2]


def test_too_many_next_chunks_to_list_are_found_by_their_own_key() -> None:
    files = {
        index_path(key(1)): pack_page([entry(1)], {key(1): [key(n) for n in range(5000)]}),
        index_path(key(7)): pack_page([entry(7, 1), entry(8, 7)], {}),
    }
    web = Web(files=files)
    assert web.look_up(1, 7, 8, 9, 10) == [1, 7, 8]
    assert len(web.requests) == 3


def test_what_is_no_export_is_refused_by_name() -> None:
    for told in (b"{}", b"not json", b'{"format":"kdn export","version":2}', b"[]"):
        with pytest.raises(KdnError, match="expected"):
            Web(files={"kdn-export.json": told}).look_up(1)
    web = Web()
    del web.files["kdn-export.json"]
    with pytest.raises(RefusedError, match="no export here"):
        web.look_up(1)


def test_a_url_with_a_path_is_an_export() -> None:
    assert is_export("https://host/some/path")
    assert is_export("https://host/kdn-export.json")
    assert not is_export("https://host:8470")
    assert not is_export("https://host/")
    client = StaticClient("https://host/kdn-export.json")
    assert client.url == "https://host"
