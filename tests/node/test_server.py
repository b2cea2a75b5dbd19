"""A node's life over raw sockets: exposure, TLS, deadlines, bounds, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
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

from kdn.background import faults
from kdn.config import NodeSettings, load_config
from kdn.errors import UnsupportedError
from kdn.node import server
from kdn.node.connection import Connections
from kdn.node.server import check_exposure, frame_bytes_of, listen, tls_context
from kdn.protocol.frames import split
from tests.node.harness import (
    Running,
    checksum,
    closed,
    config_for,
    connect,
    key_of,
    request,
    run,
    running,
    tenant,
    with_node,
)
from tests.node.test_connection import Wire

MIB = 2**20


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


def test_shutdown_finishes_responses_in_flight(tmp_path: Path) -> None:
    """To the last byte, though the reader is slow and small buffers hold little for it."""

    async def read_slowly(peer: socket.socket, size_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        got = bytearray()
        while len(got) < size_bytes and (part := await loop.sock_recv(peer, 65536)):
            got += part
            await asyncio.sleep(0.002)
        return bytes(got)

    async def work() -> None:
        async with running(config_for(tmp_path, shutdown_timeout_s=25.0)) as node:
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
        assert time.monotonic() - begin_s < 20  # the idle connection was not waited for
        assert (await reading).endswith(stream)
        assert await closed(idle[0], 1) == b""
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        peer.close()
        idle[1].close()

    run(work())


def test_shutdown_waits_for_what_a_transport_still_holds(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(config_for(tmp_path, shutdown_timeout_s=20.0)) as node:
            connections = node.listening.connections
            last: Any = object()  # its handler is done, its last bytes are not sent
            connections.add(last, Wire(closing=True))  # type: ignore[arg-type]
            asyncio.get_running_loop().call_later(0.4, connections.remove, last)
            begin_s = time.monotonic()
        assert 0.4 <= time.monotonic() - begin_s < 10

    run(work())


def test_shutdown_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(config_for(tmp_path, shutdown_timeout_s=0.3)) as node:
            await node.put_chunk(1, 30 * MIB)
            _, writer = await asyncio.open_connection("127.0.0.1", node.listening.port, limit=1000)
            writer.write(request(f"/v1/chunks/{key_of(1).hex()}"))
            await asyncio.sleep(0.1)
            begin_s = time.monotonic()
        assert time.monotonic() - begin_s < 15
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


def test_the_reaper_survives_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reaped = asyncio.Event()
    calls = []

    def reap(self: Connections, now_s: float) -> None:
        calls.append(now_s)
        if len(calls) == 1:
            raise KeyError("a mistake")
        reaped.set()

    monkeypatch.setattr(server, "REAP_S", 0.01)
    monkeypatch.setattr(Connections, "reap", reap)

    async def test(node: Running) -> None:
        async with asyncio.timeout(5):
            await reaped.wait()
        status, _, body = await node.ask("GET", "/metrics")
        assert status == 200
        assert b'kdn_faults_total{work="reaping connections"} 1.0' in body

    faults.pop("reaping connections", None)
    with_node(tmp_path, test)


def test_unknown_paths_and_methods(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for path in ("/other", "/v1", "/v1/other/00", "/v1/chunks/00/11", "/v2/chunks"):
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


@pytest.mark.parametrize(
    ("settings", "frame_bytes"),
    [
        ({}, 2**20),
        ({"egress_bits_per_s": 1_000_000}, 2**13),
        ({"egress_bits_per_s": 10_000_000}, 12_500),
        ({"egress_bits_per_s": 1_000_000_000}, 2**16),
        ({"egress_trace": "train.csv"}, 2**13),
        ({"egress_bits_per_s": 1_000_000, "frame_bytes": 100}, 100),
    ],
)
def test_a_slow_way_out_gets_small_frames(settings: dict[str, Any], frame_bytes: int) -> None:
    """At 1 Mbit/s a frame of 64 KiB would be half a second of silence, then all at once."""
    assert frame_bytes_of(NodeSettings(**settings)) == frame_bytes
