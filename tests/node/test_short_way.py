"""A plain GET is answered on the short way exactly as on the ordinary one."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kdn import tracing
from kdn.node import short_way
from kdn.node.short_way import recognise
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.node.harness import (
    Running,
    checksum,
    chunk_stream,
    closed,
    config_for,
    connect,
    key_of,
    read_answer,
    request,
    requests_of,
    run,
    running,
    settled,
    tenant,
    with_node,
)
from tests.traces import recorded

CASES = 1500
PATH = f"/v1/chunks/{key_of(1).hex()}"
LAST = re.compile(rb"HTTP/1.0|close|Upgrade|Expect|Length: 0")
"""Of a request or an answer after which the node closes the connection, or may do so."""
DATE = re.compile(rb"\r\nDate: [^\r]*")


def case(rng: random.Random, etag: str) -> bytes:
    """Mostly a plain GET, with something odd about it more often than not."""
    number = rng.choice([1, 1, 1, 2, 3, 9])
    path = rng.choice([f"/v1/chunks/{key_of(number).hex()}"] * 60 + [
        "/v1/objects/00", "/v1/objects/0", f"{PATH}?a=b", f"{PATH}/", f"{PATH.upper()}",
        "/v1/profiles/00", "/v1/chunks", "/v1/names", "/healthz", f"/v1//chunks/{'aa' * 49}",
    ])  # fmt: skip
    start, end = rng.randrange(0, 130_000), rng.randrange(0, 130_000)
    ranges = [
        f"bytes={start}-{end}", f"bytes={start}-{start + 65535}", f"bytes={start}-",
        f"bytes=-{end}", "bytes=0-0", "bytes=0-,5-", "bytes=-", "bytes=5-4", "lines=0-1",
        "bytes=-0", "bytes=999999-", " bytes=0-9 ", "bytes=0-99999999999999999999", "",
    ]  # fmt: skip
    odd = [
        f'If-Range: "{etag}"', 'If-Range: "00"', f"If-Range: {etag}", f'If-None-Match: "{etag}"',
        "Kdn-Client: c1", "Kdn-Client: no client", "Connection: keep-alive", "Connection: close",
        "Accept: */*", "Accept-Encoding: gzip", "X-Other: 1", "Expect: 100-continue",
        "Range: bytes=1-2", "Content-Length: 0", "User-Agent: w\xff".encode().decode("latin1"),
        "Authorization: Bearer read", "Authorization: Bearer wrong", "authorization: bearer a",
        "Upgrade: websocket", "If-Match: *", "Host: y", "User-Agent: v",
        "user-agent: w", "Cache-Control: no-cache",
    ]  # fmt: skip
    lines = ["Host: x", *rng.sample(odd, rng.choice([0, 0, 0, 0, 1, 2, 3]))]
    if rng.random() < 0.9:
        lines.append(f"Range: {rng.choice(ranges[:4] * 6 + ranges)}")
    if rng.random() < 0.95:
        lines.append("Authorization: Bearer a")
    rng.shuffle(lines)
    method = rng.choice(["GET"] * 9 + ["HEAD"])
    version = rng.choice(["HTTP/1.1"] * 19 + ["HTTP/1.0"])
    return "\r\n".join([f"{method} {path} {version}", *lines, "", ""]).encode("latin1")


async def exchange(port: int, cases: list[bytes]) -> list[bytes]:
    """What comes back for each, on one connection as long as the node keeps it."""
    answers: list[bytes] = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**21)
    for data in cases:
        writer.write(data)
        answer = await read_answer(reader, data.startswith(b"HEAD"))
        answers.append(DATE.sub(b"", answer))
        if LAST.search(data) or LAST.search(answer[:600]):
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**21)
    writer.close()
    return answers


def test_both_ways_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = [tenant("ann", "a"), tenant("bob", "read", "read_tokens")]
    taken = []
    answer = short_way.answer

    def counted(*args: Any) -> bool:
        taken.append(answer(*args))
        return taken[-1]

    async def work() -> None:
        rng = random.Random(1)
        async with (
            running(config_for(tmp_path / "short", *tenants)) as short,
            running(config_for(tmp_path / "ordinary", *tenants)) as ordinary,
        ):
            for node in (short, ordinary):
                await node.put_chunk(1, 120_000, "a", Kdn_Saved_Seconds="0.25")
                await node.put_chunk(2, 3_000, "a", Kdn_Parent=key_of(1).hex())
                await node.put_chunk(3, 300_000, "a")
                etag = (await node.ask("HEAD", PATH, token="a"))[1]["ETag"].strip('"')
            cases = [case(rng, etag) for _ in range(CASES)]
            monkeypatch.setattr(short_way, "answer", counted)
            one = await exchange(short.listening.port, cases)
            monkeypatch.setattr(short_way, "answer", lambda *_: False)
            two = await exchange(ordinary.listening.port, cases)
            for data, *both in zip(cases, one, two, strict=True):
                first, second = (re.sub(rb"Kdn-Sequence: \d+", b"", found) for found in both)
                assert first == second, (data, first[:600], second[:600])
            assert await settled(short) == await settled(ordinary)
            counts = [dict(counted_bytes(node)) for node in (short, ordinary)]
            assert counts[0] == counts[1]

    run(work())
    assert sum(taken) > CASES / 10  # what should be compared was


def counted_bytes(node: Running) -> list[tuple[str, float]]:
    shown = node.node.stats
    sent = [
        (one.name + str(one.labels), one.value)
        for family in shown._sent_bytes.collect()
        for one in family.samples
    ]
    return [("hits", shown.hits.value), ("misses", shown.misses.value), *sent]


def test_what_is_recognised() -> None:
    plain = request(PATH, "Range: bytes=0-9", "Authorization: Bearer x", "kdn-client: me")
    asked = recognise(plain)
    assert asked is not None
    assert (asked.collection, asked.key) == ("chunks", key_of(1))
    assert asked.headers == {
        "host": "x", "range": "bytes=0-9", "authorization": "Bearer x", "kdn-client": "me"
    }  # fmt: skip
    for other in (
        plain + b"x", plain * 2, plain[:-1], plain.replace(b"\r\n", b"\n"), b"\r\n" + plain,
        plain.replace(b"GET", b"get"), plain.replace(b"Host", b"Hos t"),
        plain.replace(b"Host: x", b"Host : x"), plain.replace(b"Host: x", b"Host: \x80"),
        plain.replace(b"Range: ", b"Range: bytes=0-1\r\n "), plain.replace(b"chunks", b"chunk"),
        request(PATH, "Range: a", "Range: b"), request(PATH, "Accept: a", "Accept: b"),
        request(PATH, "Transfer-Encoding: chunked"),
        request(PATH, "Content-Length: 4"), request(PATH, "Expect: 100-continue"),
        request(PATH, "X: " + "y" * 5000), request("/v1/profiles/0011"),
    ):  # fmt: skip
        assert recognise(other) is None, other


def test_a_head_in_a_body_is_no_request(tmp_path: Path) -> None:
    """A body that arrives apart from its head, and looks like a plain GET."""

    async def test(node: Running) -> None:
        await node.put_chunk(1, 5000)
        hidden = request(PATH, "Range: bytes=0-9")
        for head in (
            request("/v1/lookup", f"Content-Length: {len(hidden)}", method="POST"),
            request("/v1/names", f"Content-Length: {len(hidden)}"),
            request("/v1/lookup", "Transfer-Encoding: chunked", method="POST"),
            request(PATH, "Range: bytes=0-9")[:-2],
        ):
            reader, writer = await connect(node)
            writer.write(head)
            await asyncio.sleep(0.05)
            writer.write(hidden)
            answer = await read_answer(reader, False)
            await asyncio.sleep(0.05)
            assert b"206" not in answer, head
            writer.close()

    with_node(tmp_path, test)


def test_a_reader_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1, 65536)
        loop = asyncio.get_running_loop()
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(("127.0.0.1", node.listening.port))
            peer.setblocking(False)
            with suppress(ConnectionError):
                for _ in range(200):  # more than all buffers hold
                    await loop.sock_sendall(peer, request(PATH, "Range: bytes=0-65535"))
                    await asyncio.sleep(0.01)
                    if node.node.stats.cut_readers.value:
                        break
            async with asyncio.timeout(10):
                while len(node.listening.connections._open) > 1:  # one is the harness's own
                    await asyncio.sleep(0.01)
            assert node.node.stats.cut_readers.value == 1

    with_node(tmp_path, test, write_timeout_s=0.3)


def test_a_deleted_object_is_gone(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1, 5000)
        reader, writer = await connect(node)
        for _ in range(2):
            writer.write(request(PATH, "Range: bytes=0-99"))
            assert (await read_answer(reader, False)).endswith(stream[:100])
        assert (await node.ask("DELETE", PATH))[0] == 204
        writer.write(request(PATH, "Range: bytes=0-99"))
        assert (await read_answer(reader, False)).startswith(b"HTTP/1.1 404")
        other = chunk_stream(key_of(1), 5000, seed=9)
        await node.ask("PUT", PATH, other, Kdn_Checksum=checksum(other))
        writer.write(request(PATH, "Range: bytes=300-399"))
        assert (await read_answer(reader, False)).endswith(other[300:400])
        writer.close()

    with_node(tmp_path, test)


def test_limits_hold_on_the_short_way(tmp_path: Path) -> None:
    """A rate of requests, and a connection that has been idle for too long."""

    async def test(node: Running) -> None:
        await node.put_chunk(1, 5000, "a")
        reader, writer = await connect(node)
        statuses = []
        for _ in range(8):
            writer.write(request(PATH, "Range: bytes=0-99", "Authorization: Bearer a"))
            statuses.append((await read_answer(reader, False))[9:12])
        assert statuses == [b"206"] * 4 + [b"429"] * 4  # one was the put
        assert await closed(reader, 3) == b""  # though it was never used on the ordinary way
        assert requests_of(node)["GET", "/v1/{collection}/{key}"] == 8
        writer.close()

    with_node(tmp_path, test, tenant("ann", "a", requests_per_s=5), idle_timeout_s=0.4)


def test_a_store_that_has_nothing_at_hand(tmp_path: Path) -> None:
    class Distant(MemoryStore):
        def get_now(self, key: bytes, start: int, end: int, etag: bytes) -> None:
            return None

    async def test(node: Running) -> None:
        stream = await node.put_chunk(1, 5000)
        assert (await node.ask("GET", PATH, Range="bytes=1-9"))[2] == stream[1:10]

    with_node(tmp_path, test, store=lambda: Distant(2**20, open_policy("lru")))


@pytest.mark.parametrize("is_traced", [False, True])
def test_what_nobody_else_traces_is_drawn_on_the_short_way_too(
    is_traced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_share", 0.0)
    parent = [f"traceparent: 00-{'a' * 32}-{'b' * 16}-01"] if is_traced else []

    async def test(node: Running) -> None:
        await node.put_chunk(1, 5000)
        reader, writer = await connect(node)
        writer.write(request(PATH, "Range: bytes=0-99"))  # from the disk into memory
        await read_answer(reader, False)
        with recorded() as spans:
            writer.write(request(PATH, "Range: bytes=0-99", "X-Kdn-Request: r1", *parent))
            assert (await read_answer(reader, False)).startswith(b"HTTP/1.1 206")
            found = [(one.name, (one.attributes or {})["kdn.request"]) for one in spans.spans]
        assert found == ([("GET /v1/{collection}/{key}", "r1")] if is_traced else [])
        writer.close()

    with_node(tmp_path, test)
