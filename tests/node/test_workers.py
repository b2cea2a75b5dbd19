"""A node of several processes keeps every promise that one of a single process keeps."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdn.config import ClientSettings, Config, NodeSettings
from kdn.errors import UnsupportedError
from kdn.node import workers
from kdn.node.tenants import token_hash
from kdn.node.workers import check_workers
from kdn.protocol.frames import split
from tests.node.harness import closed, config_for, read_answer, request, run
from tests.node.processes import ROOT, Client, processes

KEY = "aa"
URL = f"/v1/objects/{KEY}"
SETTINGS = {"shutdown_timeout_s": 5.0}


def tenants(**settings: str) -> str:
    """Of a configuration file: a name, and its further lines."""
    return "".join(
        f'\n[tenants.{name}]\noperate_tokens = ["{token_hash(name)}"]\n{lines}\n'
        for name, lines in settings.items()
    )


async def statuses(clients: list[Client], path: str, **headers: str) -> list[int]:
    answers = await asyncio.gather(*(one.ask("GET", path, **headers) for one in clients))
    return [status for status, _ in answers]


@pytest.mark.parametrize(
    "settings",
    [
        NodeSettings(workers=2, upstream="http://127.0.0.1:1"),
        NodeSettings(workers=2, store="redis://127.0.0.1:1"),
        NodeSettings(workers=0),
        NodeSettings(workers=257),
    ],
)
def test_workers_that_cannot_be_are_refused_before_anything_begins(settings: NodeSettings) -> None:
    with pytest.raises(UnsupportedError, match=r"^workers: "):
        check_workers(Config(settings, ClientSettings(), (), {}))


def test_everything_is_answered_by_every_worker(tmp_path: Path) -> None:
    async def work() -> None:
        data = os.urandom(200_000)
        async with processes(tmp_path, SETTINGS, workers=3) as node:
            clients = await node.connect(12)
            assert await clients[0].put(KEY, data, "01") == 201
            assert await clients[1].put(KEY, data[:9], "02") == 200  # it was taken
            manifest = b'{"models":{}}'
            assert (await clients[2].ask("PUT", "/v1/names/n", manifest))[0] == 201
            for one in clients:
                assert await one.ask("GET", URL) == (200, data)
                assert await one.ask("GET", URL, Range="bytes=5-99") == (206, data[5:100])
                assert (await one.ask("HEAD", URL))[0] == 200
                assert (await one.ask("GET", "/v1/objects/bb"))[0] == 404
                asked = json.dumps({"collection": "objects", "keys": [KEY, "bb"]}).encode()
                _, frames = await one.ask("POST", "/v1/lookup", asked)
                assert [frame.status for frame, _ in split(frames)] == [200, 404]
                spans = {"collection": "objects", "spans": [{"key": KEY, "start": 7}]}
                _, frames = await one.ask("POST", "/v1/read", json.dumps(spans).encode())
                assert b"".join(part for _, part in split(frames)) == data[7:]
                assert await one.ask("GET", "/v1/names/n") == (200, manifest)
                listed = json.loads((await one.ask("GET", "/v1/objects"))[1])
                assert [entry["key"] for entry in listed["objects"]] == [KEY]
                assert json.loads((await one.ask("GET", "/v1/stats"))[1])["objects"] == 1
                assert (await one.ask("GET", "/healthz"))[0] == 200
                estimate = json.loads((await one.ask("POST", "/v1/estimate", asked))[1])
                assert (estimate["known"], estimate["size_bytes"]) == (1, len(data))
                assert estimate["seconds"] > 0  # what was sent here tells how fast that is
            _, shown = await clients[3].ask("GET", "/metrics")
            assert b'route="/v1/{collection}/{key}",status="206"} 12.0' in shown
            assert b"kdn_connections 12.0" in shown
            assert b"kdn_store_objects 1.0" in shown

    run(work())


@pytest.mark.parametrize(("disk_bytes", "memory_bytes"), [(2**30, 2**26), (2**30, 0), (0, 2**26)])
def test_what_is_deleted_or_replaced_no_worker_has(
    tmp_path: Path, disk_bytes: int, memory_bytes: int
) -> None:
    """Though every worker has it in memory, and many read it meanwhile."""

    async def read_on(client: Client, known: set[bytes]) -> None:
        while True:
            status, body = await client.ask("GET", URL)
            assert status == 404 or body in known

    async def work() -> None:
        settings = {**SETTINGS, "disk_bytes": disk_bytes, "memory_bytes": memory_bytes}
        versions = [os.urandom(50_000) for _ in range(20)]
        async with processes(tmp_path, settings) as node:
            clients, readers = await node.connect(12), await node.connect(4)
            reading = [asyncio.create_task(read_on(one, set(versions))) for one in readers]
            for number in range(0, len(versions), 2):
                first, second = versions[number : number + 2]
                etag = f"{number // 4:02x}"  # of other bytes, too: a delete was between
                assert await clients[0].put(KEY, first, etag) == 201
                for _ in range(3):
                    answers = await asyncio.gather(*(one.ask("GET", URL) for one in clients))
                    assert answers == [(200, first)] * 12
                assert await clients[1].put(KEY, second, "ff", If_Match=f'"{etag}"') == 200
                answers = await asyncio.gather(*(one.ask("GET", URL) for one in clients))
                assert answers == [(200, second)] * 12
                assert (await clients[2].ask("DELETE", URL))[0] == 204
                assert await statuses(clients, URL) == [404] * 12
            assert not any(task.done() for task in reading)  # none saw anything else
            for task in reading:
                task.cancel()

    run(work())


def test_limits_of_tenants_hold_across_workers(tmp_path: Path) -> None:
    async def work() -> None:
        told = tenants(
            ann="requests_per_s = 6", bob="max_connections = 4", eve="quota_bytes = 100000", dan=""
        )
        async with processes(tmp_path, SETTINGS, told) as node:
            found = await statuses(await node.connect(20), "/v1/names", Authorization="Bearer ann")
            assert found.count(200) in (6, 7)  # one more may have come in meanwhile
            assert set(found) == {200, 429}
            found = []
            for one in await node.connect(10):
                found += await statuses([one], "/v1/names", Authorization="Bearer bob")
            assert found == [200] * 4 + [503] * 6
            clients = await node.connect(6)
            token = {"Authorization": "Bearer eve"}
            found = []
            for number, one in enumerate(clients):  # what is on its way counts twice for a moment
                found.append(await one.put(f"{number:02x}", b"x" * 30_000, "01", **token))
            assert found == [201] * 3 + [507] * 3
            # What is another's is not there, whoever asks.
            clients = await node.connect(6)
            assert (
                await statuses(clients, "/v1/objects/00", Authorization="Bearer dan") == [404] * 6
            )
            assert await statuses(clients, "/v1/objects/00", Authorization="Bearer x") == [401] * 6

    run(work())


@pytest.mark.alone
def test_the_way_out_is_shared_fairly_across_workers(tmp_path: Path) -> None:
    """Ann has eight connections and Bob one, wherever those happen to be; each gets a half."""
    seconds, bits_per_s = 2.5, 12_000_000

    async def read_on(client: Client, name: str, counts: dict[str, int]) -> None:
        while True:
            client.writer.write(request(URL, f"Authorization: Bearer {name}"))
            await client.reader.readuntil(b"\r\n\r\n")
            left = 300_000
            while left:
                left -= len(part := await client.reader.read(min(left, 65536)))
                counts[name] += len(part)

    async def work() -> None:
        settings = {**SETTINGS, "egress_bits_per_s": bits_per_s}
        async with processes(tmp_path, settings, tenants(ann="", bob="")) as node:
            counts = {"ann": 0, "bob": 0}
            for name in counts:
                [one] = await node.connect()
                token = {"Authorization": f"Bearer {name}"}
                assert await one.put(KEY, os.urandom(300_000), "01", **token) == 201
            clients = await node.connect(9)
            begin_s = time.monotonic()
            reading = [
                asyncio.create_task(read_on(one, "bob" if number == 4 else "ann", counts))
                for number, one in enumerate(clients)
            ]
            await asyncio.sleep(seconds)
            took_s = time.monotonic() - begin_s
            for task in reading:
                task.cancel()
            total = sum(counts.values())
            assert 0.6 < total * 8 / took_s / bits_per_s < 1.15
            assert 0.4 < counts["bob"] / total < 0.6

    run(work())


def test_a_worker_that_dies_is_begun_again_and_takes_nothing_with_it(tmp_path: Path) -> None:
    async def work() -> None:
        data = os.urandom(100_000)
        settings = {**SETTINGS, "max_connections": 40}
        async with processes(tmp_path, settings, tenants(ann="max_connections = 12")) as node:
            token = {"Authorization": "Bearer ann"}
            clients = await node.connect(10)
            assert await clients[0].put(KEY, data, "01", **token) == 201
            assert await statuses(clients, URL, **token) == [200] * 10
            _, *workers = node.children()
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
                while pid in node.children():
                    await asyncio.sleep(0.01)
            # What they held of the tenant's places is free again.
            for one in await node.connect(10):
                assert await one.ask("GET", URL, **token) == (200, data)
            children = node.children()
            assert len(children) == 3
            assert not set(workers) & set(children)
            # With the process that began them, all end.
            node.process.kill()
            node.process.wait()
            async with asyncio.timeout(10):
                while any(Path(f"/proc/{pid}").exists() for pid in children):
                    await asyncio.sleep(0.05)

    run(work())


def test_if_the_owner_dies_all_end_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    async def write_on(client: Client, first: int, stored: list[int]) -> None:
        for number in range(first, 10_000, 4):
            if await client.put(f"{number:04x}", number.to_bytes(2000, "big"), "01") == 201:
                stored.append(number)

    async def work() -> None:
        stored: list[int] = []
        async with processes(tmp_path, SETTINGS) as node:
            clients = await node.connect(4)
            writing = [
                asyncio.create_task(write_on(one, first, stored))
                for first, one in enumerate(clients)
            ]
            while len(stored) < 16:
                await asyncio.sleep(0.01)
            owner, *workers = node.children()
            os.kill(owner, signal.SIGKILL)
            await asyncio.gather(*writing, return_exceptions=True)
            assert await node.ended(10) == 1
            assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
        async with processes(tmp_path, SETTINGS) as node:
            [one] = await node.connect()
            for number in stored:
                status, body = await one.ask("GET", f"/v1/objects/{number:04x}")
                assert (status, body) == (200, number.to_bytes(2000, "big"))

    run(work(), deadline_s=60)


def test_what_is_in_flight_is_finished(tmp_path: Path) -> None:
    async def work() -> None:
        data = os.urandom(3_000_000)
        settings = {**SETTINGS, "egress_bits_per_s": 24_000_000}  # a second for all of it
        async with processes(tmp_path, settings) as node:
            [one] = await node.connect()
            assert await one.put(KEY, data, "01") == 201
            one.writer.write(request(URL))
            head = await one.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            node.process.send_signal(signal.SIGTERM)
            assert await one.reader.readexactly(len(data)) == data
            assert await node.ended(10) == 0
        assert "fault" not in (tmp_path / "log").read_text()

    run(work())


def test_a_body_that_is_waited_for_is_asked_for(tmp_path: Path) -> None:
    """`Expect: 100-continue` goes through to the owner, whose refusal comes before the body."""

    async def work() -> None:
        settings = {**SETTINGS, "body_window_s": 0.5}
        async with processes(tmp_path, settings, tenants(ann="quota_bytes = 10000")) as node:
            for size_bytes, answered in ((5000, b"HTTP/1.1 100"), (50_000, b"HTTP/1.1 507")):
                [one] = await node.connect()
                lines = ["Authorization: Bearer ann", "Expect: 100-continue", "Kdn-Etag: 01"]
                lines += [f"Content-Length: {size_bytes}", "Kdn-Checksum: 0000000000000000"]
                one.writer.write(request(URL, *lines, method="PUT"))
                assert (await one.reader.readuntil(b"\r\n\r\n")).startswith(answered)
                if answered.endswith(b"100"):
                    one.writer.write(b"x" * size_bytes)
                    assert (await read_answer(one.reader)).startswith(b"HTTP/1.1 422")
            # One that does not come is not waited for.
            [one] = await node.connect()
            lines = ["Authorization: Bearer ann", "Content-Length: 9000", "Kdn-Etag: 01"]
            lines.append("Kdn-Checksum: 0000000000000000")
            one.writer.write(request(URL, *lines, method="PUT") + b"x")
            assert (await read_answer(one.reader)).startswith(b"HTTP/1.1 408")
            assert await closed(one.reader, 5) == b""
            with pytest.raises(AssertionError, match="cannot listen"):  # the port is not shared
                async with processes(tmp_path / "other", SETTINGS, port=node.port):
                    pass

    run(work())


def test_a_follower_of_names_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async def work() -> None:
        async with processes(tmp_path, {"shutdown_timeout_s": 20.0}) as node:
            [one] = await node.connect()
            one.writer.write(request("/v1/names/changes?after=1"))
            head = await one.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            node.process.send_signal(signal.SIGTERM)
            assert await node.ended(8) == 0

    run(work())


def test_what_has_no_workers_says_so_at_once(tmp_path: Path) -> None:
    for other in ({"store": "redis://127.0.0.1"}, {"upstream": "http://127.0.0.1:1"}):
        with pytest.raises(UnsupportedError, match="workers"):
            check_workers(config_for(tmp_path, workers=2, **other))


def test_without_a_folder_to_meet_in_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "away"))
    with pytest.raises(UnsupportedError, match="TMPDIR"):
        workers.run(config_for(tmp_path, workers=2))


NEVER_OPENS = """
import asyncio, sys
from contextlib import asynccontextmanager
from pathlib import Path
from kdn.node import workers
from tests.node.harness import config_for

@asynccontextmanager
async def never(config):
    print("opening", flush=True)
    await asyncio.sleep(3600)
    yield

workers.open_node = never
workers.run(config_for(Path(sys.argv[1]), workers=2))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_can_be_stopped_while_the_owner_opens(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", NEVER_OPENS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"opening\n"
            process.send_signal(how)
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_nothing_is_left_behind_of_one_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))

    async def work() -> None:
        async with processes(tmp_path, SETTINGS) as node:
            children = node.children()
            assert len(list((tmp_path / "t").glob("kdn-node-*/*"))) == 2
            node.process.kill()
            await node.ended(10)
            async with asyncio.timeout(20):
                while any(Path(f"/proc/{pid}").exists() for pid in children):
                    await asyncio.sleep(0.05)
        assert not list((tmp_path / "t").iterdir())

    run(work(), deadline_s=60)
