"""Regions as processes: killed with things unsent, and on hosts of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kdn.bench.cluster.processes import NodeProcess
from kdn.places.names import NodeNames
from kdn.store.http import HttpStore
from kdn.store.node_client import NodeClient
from tests.node.harness import key_of, run
from tests.region.regions import centre_and_link, store_at

SMALL = {"memory_bytes": 2**22, "disk_bytes": 2**26, "max_stale_s": 1.0}


def drawn(number: int, size_bytes: int = 20_000) -> bytes:
    return np.random.default_rng(number).bytes(size_bytes)


async def put(store: HttpStore, number: int) -> None:
    data = drawn(number)
    await store.put(key_of(number), data, etag=b"e", checksum=xxh3_64_intdigest(data))


async def read(store: HttpStore, number: int) -> bytes | None:
    span = await store.get(key_of(number))
    return None if span is None else bytes(span.data)


def test_what_was_acknowledged_survives_a_kill_and_is_sent(tmp_path: Path) -> None:
    async def work() -> None:
        async with centre_and_link(tmp_path / "centre") as (centre, link):
            link.cut()
            node = NodeProcess(tmp_path / "region", {**SMALL, "upstream": link.url})
            await node.start()
            store = HttpStore(node.url)
            try:
                for number in range(20):
                    await put(store, number)
                node.kill()
                await node.start()
                for number in range(20):
                    assert await read(store, number) == drawn(number)
                link.mend()
                async with store_at(centre) as there:
                    while None in await there.lookup([key_of(number) for number in range(20)]):
                        pass
                    for number in range(20):
                        assert await read(there, number) == drawn(number)
            finally:
                await store.close()
                node.kill()

    run(work())


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, timeout=10)


@contextmanager
def host(number: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A host beside this one, over a link of its own: its address, and what starts a process there.
    This host has the address before it."""
    name = f"kdn{os.getpid() % 10_000}x{number}"
    net = f"10.{77 + number}.{os.getpid() % 250}"
    with ExitStack() as stack:
        try:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        _ip("addr", "add", f"{net}.1/24", "dev", name)
        _ip("link", "set", name, "up")
        within = ("netns", "exec", name, "ip")
        _ip(*within, "addr", "add", f"{net}.2/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip(*within, "link", "set", device, "up")
        yield f"{net}.2", ("ip", "netns", "exec", name)


def test_learned_on_one_host_and_asked_on_another(tmp_path: Path) -> None:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root, and iproute2's ip")

    async def work(hosts: list[tuple[str, tuple[str, ...]]]) -> None:
        centre = NodeProcess(tmp_path / "centre", {**SMALL, "insecure": "true"}, host="0.0.0.0")
        nodes = [centre]
        for number, (address, launcher) in enumerate(hosts):
            upstream = f"http://{address[:-1]}1:{centre.port}"
            settings = {**SMALL, "insecure": "true", "upstream": upstream}
            folder = tmp_path / f"region{number}"
            nodes.append(NodeProcess(folder, settings, host=address, launcher=launcher))
        clients = [NodeClient(node.url) for node in nodes[1:]]
        stores = [HttpStore(client) for client in clients]
        names = [NodeNames(client) for client in clients]
        try:
            for node in nodes:
                await node.start()
            for number in range(6):
                await put(stores[0], number)
            keys = [key_of(number).hex() for number in range(6)]
            assert await names[0].put("doc", {"keys": keys}, None)
            found = await names[1].get("doc", latest=True)
            assert found is not None
            assert found.manifest["keys"] == keys
            for number in range(6):
                while (data := await read(stores[1], number)) is None:
                    pass
                assert data == drawn(number)
        finally:
            for client in clients:
                await client.close()
            for node in nodes:
                node.kill()

    with host(1) as one, host(2) as two:
        run(work([one, two]))
