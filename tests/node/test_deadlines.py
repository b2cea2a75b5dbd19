"""Deadlines and bounds over raw sockets: slow heads, bodies, readers, stores; too many."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kdn.store.base import Span
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.node.harness import (
    Running,
    checksum,
    closed,
    connect,
    key_of,
    request,
    tenant,
    with_node,
)

MIB = 2**20


def test_a_slow_head_and_an_idle_connection_are_closed(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        silent = await connect(node)
        slow = await connect(node)
        slow[1].write(b"GET /healthz HT")
        idle = await connect(node)
        idle[1].write(request("/healthz"))
        for reader, writer in (silent, slow):
            assert await closed(reader, 5) == b""
            writer.close()
        assert (await closed(idle[0], 5)).startswith(b"HTTP/1.1 200")
        idle[1].close()

    with_node(tmp_path, test, idle_timeout_s=0.3)


def test_a_slow_body_is_refused(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        reader, writer = await connect(node)
        writer.write(request("/v1/read", "Content-Length: 100", method="POST") + b'{"spans"')
        answer = await closed(reader, 5)
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "timeout"
        writer.close()

    with_node(tmp_path, test, body_timeout_s=0.3)


def test_continue_is_said_only_to_a_wanted_body(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        body = json.dumps({"keys": [key_of(1).hex()]}).encode()
        sent = (f"Content-Length: {len(body)}", "Expect: 100-continue")
        reader, writer = await connect(node)
        writer.write(request("/v1/lookup", *sent, method="POST"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        for more, status in (("Content-Length: 99999999999", b"413"), ("Expect: tea", b"417")):
            headers = (more, "Expect: 100-continue") if "Length" in more else (sent[0], more)
            reader, writer = await connect(node)
            writer.write(request("/v1/lookup", *headers, method="POST"))
            answer = await closed(reader, 5)
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"]
            writer.close()

    with_node(tmp_path, test)


def test_a_reader_that_does_not_drain_is_cut(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1, 8 * MIB)
        spans = {"spans": [{"key": key_of(1).hex()}] * 20}
        body = json.dumps(spans).encode()
        readers = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", node.listening.port, limit=1000
            )
            writer.write(request("/v1/read", f"Content-Length: {len(body)}", method="POST") + body)
            readers.append((reader, writer))
        async with asyncio.timeout(20):
            while node.node.stats.cut_readers.value < 5 or node.node.num_requests:
                await asyncio.sleep(0.05)
        text = node.node.stats.expose(await node.node.depot.store.stats()).decode()
        assert "kdn_cut_readers_total 5.0" in text
        for reader, writer in readers:
            got = await closed(reader, 5)
            assert len(got) < 20 * 8 * MIB
            writer.close()
        assert (await node.ask("GET", f"/v1/chunks/{key_of(1).hex()}"))[0] == 200

    with_node(tmp_path, test, write_timeout_s=0.5)


def test_a_peer_that_asks_to_close_and_never_reads_is_cut(tmp_path: Path) -> None:
    """All of it fits into buffers, so the handler is done; the connection must not stay."""

    async def test(node: Running) -> None:
        await node.put_chunk(1, 7 * MIB)
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(("127.0.0.1", node.listening.port))
            head = request(f"/v1/chunks/{key_of(1).hex()}", "Connection: close")
            peer.sendall(head)
            gauge = node.node.stats.connections
            while gauge.value < 2:
                await asyncio.sleep(0.01)
            begin_s = time.monotonic()
            while gauge.value > 1:
                await asyncio.sleep(0.05)
            assert time.monotonic() - begin_s < 8

    with_node(tmp_path, test, write_timeout_s=0.5)


def test_an_egress_limit_is_kept_and_shared(tmp_path: Path) -> None:
    """1 MB at 8 Mbit/s takes a second; two clients get half each."""

    async def test(node: Running) -> None:
        await node.put_chunk(1, 500_000)
        url = f"/v1/chunks/{key_of(1).hex()}"
        begin_s = time.monotonic()

        async def ask(client: str) -> float:
            assert (await node.ask("GET", url, Kdn_Client=client))[0] == 200
            return time.monotonic() - begin_s

        took_s = await asyncio.gather(ask("one"), ask("two"))
        assert 0.9 < max(took_s) < 8
        assert min(took_s) > 0.75 * max(took_s)

    with_node(tmp_path, test, egress_bits_per_s=8_000_000)


def test_a_slow_but_steady_reader_is_served(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1, 12 * MIB)
        reader, writer = await asyncio.open_connection("127.0.0.1", node.listening.port, limit=MIB)
        writer.write(request(f"/v1/chunks/{key_of(1).hex()}", "Connection: close"))
        await reader.readuntil(b"\r\n\r\n")
        got = bytearray()
        while part := await reader.read(MIB):
            got += part
            await asyncio.sleep(0.1)
        assert bytes(got) == stream
        writer.close()

    with_node(tmp_path, test, write_timeout_s=1.0)


class StuckStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__(2**28, open_policy("lru"))
        self.gets = 0

    async def get(self, *key: Any, **more: Any) -> Span | None:
        self.gets += 1
        if self.gets > 1:
            await asyncio.sleep(1000)
        return await super().get(*key, **more)


def test_a_store_that_hangs_has_a_deadline(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1, 3 * MIB)
        with pytest.raises(aiohttp.ClientPayloadError):
            await node.ask("GET", f"/v1/chunks/{key_of(1).hex()}")
        status, _, body = await node.ask("GET", f"/v1/chunks/{key_of(1).hex()}")
        assert (status, json.loads(body)["code"]) == (503, "store_error")
        assert node.node.num_requests == 0

    with_node(tmp_path, test, store=StuckStore, store_timeout_s=0.3)


def test_too_many_requests_and_connections(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        held = [await connect(node) for _ in range(2)]
        for _, writer in held:
            writer.write(request("/v1/read", "Content-Length: 100", method="POST"))
        while node.node.num_requests < 2:
            await asyncio.sleep(0.01)
        status, headers, body = await node.ask("GET", "/v1/names")
        assert (status, json.loads(body)["code"]) == (503, "overloaded")
        assert headers["Retry-After"]
        more = [await connect(node) for _ in range(4)]  # one place is the session's
        assert await closed(more[0][0], 5) == b""  # the oldest that has said nothing yet
        assert (await node.ask("GET", "/healthz"))[0] == 200
        for _, writer in held + more:
            writer.close()

    with_node(tmp_path, test, max_requests=2, max_connections=6)


def announce(key: str, size_bytes: int, *headers: str) -> bytes:
    """The head of a PUT to `objects` whose body is that many "x"."""
    told = (f"Content-Length: {size_bytes}", f"Kdn-Checksum: {checksum(b'x' * size_bytes)}")
    return request(f"/v1/objects/{key}", *told, "Kdn-Etag: 01", *headers, method="PUT")


async def put(node: Running, key: str, size_bytes: int, token: str | None = None) -> int:
    body = b"x" * size_bytes
    told = {"Kdn_Checksum": checksum(body), "Kdn_Etag": "01"}
    return (await node.ask("PUT", f"/v1/objects/{key}", body, token, **told))[0]


def test_memory_for_bodies_is_shared(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        holder = await connect(node)
        holder[1].write(announce("00", 900))
        while not node.node.num_requests:
            await asyncio.sleep(0.01)
        refused = asyncio.create_task(put(node, "01", 500))
        for _ in range(15):  # just fast enough
            holder[1].write(b"x")
            await asyncio.sleep(0.1)
        assert await refused == 503
        assert await put(node, "01", 50) == 201
        waiting = asyncio.create_task(put(node, "02", 500))
        await asyncio.sleep(0.05)
        holder[1].write(b"x" * 890)
        assert (await holder[0].readuntil(b"\r\n")).startswith(b"HTTP/1.1 201")
        assert await waiting == 201
        holder[1].close()

    settings = {"max_bodies_bytes": 1000, "body_window_s": 1.0, "min_body_bytes_per_s": 0}
    with_node(tmp_path, test, **settings)


def test_silent_bodies_are_cut_whatever_size_they_announced(tmp_path: Path) -> None:
    """Two sockets announce all the memory there is. Questions do not notice, and soon the sockets
    are gone."""

    async def test(node: Running) -> None:
        peers = [await connect(node) for _ in range(2)]
        for number, (_, writer) in enumerate(peers):
            writer.write(announce(f"0{number}", 64 * MIB) + b"x" * 200_000)
        while node.node.num_requests < 2:
            await asyncio.sleep(0.01)
        body = json.dumps({"keys": [key_of(1).hex()]}).encode()
        assert (await node.ask("POST", "/v1/lookup", body))[0] == 200
        assert (await node.ask("PUT", "/v1/names/n", b"{}"))[0] == 201
        assert node.node.num_requests == 2  # so nobody waited for the sockets to go
        for reader, writer in peers:
            assert (await closed(reader, 8)).startswith(b"HTTP/1.1 408")
            writer.close()
        assert await put(node, "02", 1000) == 201

    with_node(tmp_path, test, max_bodies_bytes=128 * MIB, body_window_s=1.0)


def test_a_slow_body_that_keeps_the_pace_is_taken(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        reader, writer = await connect(node)
        writer.write(announce("00", 12_000))
        for _ in range(12):
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.15)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 201")
        writer.close()

    with_node(tmp_path, test, body_window_s=0.8, min_body_bytes_per_s=2000)


def test_one_tenants_uploads_leave_room_for_anothers(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        peers = [await connect(node) for _ in range(20)]
        for number, (_, writer) in enumerate(peers):
            writer.write(announce(f"{number:02x}", MIB, "Authorization: Bearer a"))
        while node.node.num_requests < 20:
            await asyncio.sleep(0.01)
        begin_s = time.monotonic()
        assert await put(node, "aa", MIB, "b") == 201
        assert time.monotonic() - begin_s < 4  # silent bodies are waited for longer
        for _, writer in peers:
            writer.close()

    tenants = (tenant("ann", "a"), tenant("bob", "b"))
    with_node(tmp_path, test, *tenants, max_bodies_bytes=8 * MIB, body_window_s=5.0)


def test_one_tenants_requests_leave_room_for_anothers(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        peers = [await connect(node) for _ in range(10)]
        for number, (_, writer) in enumerate(peers):
            writer.write(announce(f"{number:02x}", 100, "Authorization: Bearer a"))
        readings = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in peers]
        answers = [await one for one in islice(asyncio.as_completed(readings), 4)]
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
        assert sum(reading.done() for reading in readings) == 4  # six are waited for
        assert (await node.ask("GET", "/v1/names", token="a"))[0] == 503
        assert (await node.ask("GET", "/v1/names", token="b"))[0] == 200
        for reading, (_, writer) in zip(readings, peers, strict=True):
            reading.cancel()
            writer.close()

    with_node(tmp_path, test, tenant("ann", "a"), tenant("bob", "b"), max_requests=8)


def test_a_tenant_may_have_a_cap_on_requests(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        _, writer = await connect(node)
        writer.write(announce("00", 100, "Authorization: Bearer a"))
        while not node.node.num_requests:
            await asyncio.sleep(0.01)
        assert (await node.ask("GET", "/v1/names", token="a"))[0] == 503
        writer.close()

    with_node(tmp_path, test, tenant("ann", "a", max_requests=1))


def test_a_tenant_may_have_a_cap_on_connections(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        ask = request("/v1/names", "Authorization: Bearer a")
        first, second = [await connect(node) for _ in range(2)]
        first[1].write(ask)
        assert (await first[0].readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        second[1].write(ask)
        assert (await closed(second[0], 5)).startswith(b"HTTP/1.1 503")
        first[1].write(ask)  # a connection that is counted already goes on
        assert b"HTTP/1.1 200" in await first[0].readuntil(b"HTTP/1.1 200")
        assert (await node.ask("GET", "/v1/names", token="b"))[0] == 200
        for _, writer in (first, second):
            writer.close()

    with_node(tmp_path, test, tenant("ann", "a", max_connections=1), tenant("bob", "b"))


def test_a_body_is_held_once(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        size_bytes = 32 * MIB
        reader, writer = await connect(node)
        writer.write(announce("00", size_bytes))
        part = b"x" * MIB
        tracemalloc.start()
        try:
            for _ in range(size_bytes // MIB):
                writer.write(part)
                await writer.drain()
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 201")
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 1.5 * size_bytes
        writer.close()

    with_node(tmp_path, test)
