"""A node's life over raw sockets: exposure, TLS, deadlines, bounds, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kdn.config import load_config
from kdn.errors import UnsupportedError
from kdn.node.server import check_exposure, listen, tls_context
from kdn.protocol.frames import split
from kdn.store.base import Span
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.node.harness import (
    Running,
    checksum,
    config_for,
    key_of,
    run,
    running,
    tenant,
    with_node,
)
from tests.node.test_connection import Wire

MIB = 2**20


async def connect(node: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", node.listening.port)


async def closed(reader: asyncio.StreamReader, within_s: float) -> bytes:
    """What still came before the node closed the connection."""
    async with asyncio.timeout(within_s):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def request(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("host", "refused"),
    [("127.0.0.1", False), ("127.8.9.1", False), ("::1", False), ("localhost", False),
     ("0.0.0.0", True), ("::", True), ("192.0.2.1", True), ("example.org", True), ("", True)],
)  # fmt: skip
def test_exposure(tmp_path: Path, host: str, refused: bool) -> None:
    if refused:
        with pytest.raises(UnsupportedError, match="without tokens"):
            check_exposure(config_for(tmp_path, host=host))
    else:
        check_exposure(config_for(tmp_path, host=host))
    check_exposure(config_for(tmp_path, host=host, insecure=True))
    check_exposure(config_for(tmp_path, tenant("a", "t"), host=host))


def test_listening_refuses_exposure(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(UnsupportedError, match="without tokens"):
            async with listen(config_for(tmp_path, host="0.0.0.0"), None):  # type: ignore[arg-type]
                pass

    run(work())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_tls(tmp_path: Path, certificate: tuple[str, str]) -> None:
    async def test(node: Running) -> None:
        assert node.url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate[0])
        async with node.session.get(node.url + "/healthz", ssl=context) as answer:
            assert answer.status == 200
        for method, path, body in (
            ("PUT", "/v1/objects/aa", b"x" * 3 * MIB),
            ("POST", "/v1/read", b'{"collection": "objects", "spans": [{"key": "aa"}]}'),
        ):
            sent = {"Kdn-Checksum": checksum(body), "Kdn-Etag": "01"}
            async with node.session.request(
                method, node.url + path, data=BytesIO(body), headers=sent, ssl=context
            ) as answer:
                assert answer.status < 300
                read = await answer.read()
        assert b"".join(data for _, data in split(read)) == b"x" * 3 * MIB
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await node.ask("GET", "/healthz")
        reader, writer = await connect(node)
        writer.write(request("/healthz"))
        assert not (await closed(reader, 5)).startswith(b"HTTP/1.1 200")
        writer.close()

    with_node(tmp_path, test, tls_cert=certificate[0], tls_key=certificate[1])


def test_tls_needs_both_files(tmp_path: Path, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    for settings in ({"tls_cert": cert}, {"tls_key": key}, {"tls_cert": key, "tls_key": key},
                     {"tls_cert": "/no/such", "tls_key": key}):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"(?i)tls"):
            tls_context(config_for(tmp_path, **settings).node)


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
        begin_s = time.monotonic()
        while node.node.num_requests or not begin_s:
            await asyncio.sleep(0.05)
            assert time.monotonic() - begin_s < 10
        await asyncio.sleep(0.3)
        while node.node.num_requests:
            await asyncio.sleep(0.05)
        text = node.node.stats.expose(await node.node.store.stats()).decode()
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
            while gauge._value.get() < 2:
                await asyncio.sleep(0.01)
            begin_s = time.monotonic()
            while gauge._value.get() > 1:
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
        assert 0.9 < max(took_s) < 2.5
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
        assert await closed(more[-1][0], 5) == b""
        for _, writer in held + more:
            writer.close()

    with_node(tmp_path, test, max_requests=2, max_connections=6)


def test_memory_for_bodies_is_shared(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        holder = await connect(node)
        head = request("/v1/names/n", "Content-Length: 900", method="PUT")
        holder[1].write(head)
        while not node.node.num_requests:
            await asyncio.sleep(0.01)
        status, _, body = await node.ask("PUT", "/v1/names/m", b"{}" + b" " * 500)
        assert (status, json.loads(body)["code"]) == (503, "overloaded")
        assert (await node.ask("PUT", "/v1/names/m", b"{}" + b" " * 50))[0] == 201
        waiting = asyncio.create_task(node.ask("PUT", "/v1/names/o", b"{}" + b" " * 500))
        await asyncio.sleep(0.05)
        holder[1].write(b"{}" + b" " * 898)
        assert (await holder[0].readuntil(b"\r\n")).startswith(b"HTTP/1.1 201")
        assert (await waiting)[0] == 201
        holder[1].close()

    settings = {"max_bodies_bytes": 1000, "body_timeout_s": 0.5, "min_body_bytes_per_s": 100}
    with_node(tmp_path, test, **settings)


def test_shutdown_finishes_responses_in_flight(tmp_path: Path) -> None:
    """To the last byte, though the reader is slow and small buffers hold little for it."""

    async def read_slowly(peer: socket.socket, size_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        got = bytearray()
        while len(got) < size_bytes and (part := await loop.sock_recv(peer, 65536)):
            got += part
            await asyncio.sleep(0.005)
        return bytes(got)

    async def work() -> None:
        async with running(config_for(tmp_path)) as node:
            stream = await node.put_chunk(1, 8 * MIB)
            idle = await connect(node)
            peer = socket.socket()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
            peer.connect(("127.0.0.1", node.listening.port))
            peer.sendall(request(f"/v1/chunks/{key_of(1).hex()}"))
            peer.setblocking(False)
            head = await asyncio.get_running_loop().sock_recv(peer, 10)
            assert head == b"HTTP/1.1 2"
            reading = asyncio.create_task(read_slowly(peer, len(stream) + 200))
            port = node.listening.port
            begin_s = time.monotonic()
        assert time.monotonic() - begin_s < 4  # the idle connection was not waited for
        assert (await reading).endswith(stream)
        assert await closed(idle[0], 1) == b""
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        peer.close()
        idle[1].close()

    run(work())


def test_shutdown_waits_for_what_a_transport_still_holds(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(config_for(tmp_path)) as node:
            connections = node.listening.connections
            last: Any = object()  # its handler is done, its last bytes are not sent
            connections.add(last, Wire(closing=True))  # type: ignore[arg-type]
            asyncio.get_running_loop().call_later(0.4, connections.remove, last)
            begin_s = time.monotonic()
        assert 0.4 <= time.monotonic() - begin_s < 3

    run(work())


def test_shutdown_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(config_for(tmp_path, shutdown_timeout_s=0.3)) as node:
            await node.put_chunk(1, 30 * MIB)
            _, writer = await asyncio.open_connection("127.0.0.1", node.listening.port, limit=1000)
            writer.write(request(f"/v1/chunks/{key_of(1).hex()}"))
            await asyncio.sleep(0.1)
            begin_s = time.monotonic()
        assert time.monotonic() - begin_s < 5
        writer.close()

    run(work())


def test_health_while_stopping(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        assert await node.ask("GET", "/healthz") != 503
        node.node.stopping = True
        for path in ("/healthz", "/v1/names"):
            status, _, body = await node.ask("GET", path)
            assert (status, json.loads(body)["code"]) == (503, "shutting_down")

    with_node(tmp_path, test)


def test_unknown_paths_and_methods(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for path in ("/", "/v1", "/v1/other/00", "/v1/chunks/00/11", "/v2/chunks"):
            status, _, body = await node.ask("GET", path)
            assert (status, json.loads(body)["code"]) == (404, "not_found")
        status, headers, body = await node.ask("POST", "/v1/names/n")
        assert (status, json.loads(body)["code"]) == (405, "method_not_allowed")
        assert set(headers["Allow"].split(",")) == {"GET", "PUT", "DELETE"}

    with_node(tmp_path, test)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        config = config_for(tmp_path, port=node.listening.port)
        with pytest.raises(UnsupportedError, match="cannot listen"):
            async with listen(config, node.node):
                pass

    with_node(tmp_path, test)


def test_the_process_works_without_configuration(tmp_path: Path) -> None:
    """`kdn node`: listens on loopback, serves, logs JSON lines, keeps its data over a restart."""
    environment = {**os.environ, "KDN_CACHE": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])

    def once(test: Any) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "kdn.cli.main", "node", "--port", "0"]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )
        assert process.stderr is not None
        try:
            first = json.loads(process.stderr.readline())
            assert first["event"] == "listening"
            assert first["url"].startswith("http://127.0.0.1:")
            run(test(first["url"]))
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            process.stderr.close()
            assert process.wait(10) == 0
        return [first, *map(json.loads, rest.splitlines())]

    async def write(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{url}/v1/names/n", data=b"{}") as answer:
                assert answer.status == 201
            sent = {"Kdn-Checksum": checksum(b"1"), "Kdn-Etag": "01"}
            async with session.put(f"{url}/v1/objects/00", data=b"1", headers=sent) as answer:
                assert answer.status == 201, await answer.text()

    async def read(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            for path in ("/v1/names/n", "/v1/objects/00"):
                async with session.get(url + path) as answer:
                    assert answer.status == 200

    lines = once(write)
    put = next(line for line in lines if line.get("path") == "/v1/names/n")
    assert (put["event"], put["status"], put["tenant"]) == ("request", 201, "public")
    assert [line["event"] for line in lines[-2:]] == ["stopping", "stopped"]
    once(read)


def test_the_default_settings_are_safe() -> None:
    check_exposure(load_config(environ={}))
