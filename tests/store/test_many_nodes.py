"""Several nodes as one store: spread, and nothing fails while one of them lives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kdn.checked import checked_urls
from kdn.errors import ChecksumError, NotAllowedError, UnavailableError, UnsupportedError
from kdn.store.base import Store
from kdn.store.failover import WELL_S
from kdn.store.http import HttpStore
from kdn.store.many_nodes import ManyNodes, ManyNodesStore, node_store, open_nodes
from kdn.store.member import LONGEST_HEDGE_S, PROBE_S
from kdn.store.members import MAX_HEDGES
from kdn.store.node_client import NodeClient
from kdn.store.rendezvous import rank, seed_of
from kdn.store.streaming import Ask
from tests.node.harness import config_for, key_of, run, running, settled, tenant
from tests.store import contract, test_http
from tests.store.clusters import QUICK, Cluster, cluster
from tests.store.contract import content, etag_of, put
from tests.store.test_streaming import Kept

SIZE = 100_000
NUMBER = 24
BUSY_S = 1.0
"""What a busy machine may add."""


class TestManyNodes(test_http.TestHttp):
    @asynccontextmanager
    async def open(self, capacity_bytes: int) -> AsyncIterator[Store]:
        async with cluster(self.folder, 3) as nodes, nodes.store() as store:
            yield store


def with_cluster(
    folder: Path, test: Callable[[Cluster, ManyNodesStore], Awaitable[None]], number: int = 3
) -> None:
    """With objects key_of(0), ... in it, and a client that has asked for them once."""

    async def work() -> None:
        async with cluster(folder, number) as nodes, nodes.store() as store:
            for i in range(NUMBER):
                await put(store, key_of(i), data_of(i))
            await test(nodes, store)

    run(work())


def data_of(number: int) -> bytes:
    return content(f"object {number}", SIZE)


def asks() -> list[Ask]:
    return [Ask(key_of(i), 10 * i, SIZE - i, etag_of(data_of(i))) for i in range(NUMBER)]


async def read_all(store: Store, between_s: float = 0.0) -> Kept:
    """All bytes, right, each handed over once."""
    found = Kept(NUMBER, 1 << 15)
    await store.read_into(asks(), found)
    assert not found.lost
    for ask, data in zip(asks(), found.found, strict=True):
        assert data == data_of(int.from_bytes(ask.key))[ask.start : ask.end]
    return found


async def look_up_all(store: Store) -> None:
    found = await store.lookup([key_of(i) for i in range(NUMBER + 2)], head_bytes=50)
    for i, entry in enumerate(found[:NUMBER]):
        assert entry is not None
        assert (entry.key, entry.head) == (key_of(i), data_of(i)[:50])
    assert found[NUMBER:] == [None, None]


def owner(nodes: Cluster, key: bytes) -> int:
    """The place of the node that a key belongs to."""
    ranks = [rank(key, seed_of(gate.url)) for gate in nodes.gates]
    return ranks.index(max(ranks))


async def timed(work: Awaitable[object]) -> float:
    began_s = time.monotonic()
    await work
    return time.monotonic() - began_s


def test_each_node_is_asked_for_its_own_keys_in_one_request(tmp_path: Path) -> None:
    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        own = [owner(nodes, key_of(i)) for i in range(NUMBER)]
        for place, node in enumerate(nodes.nodes):
            counts = await settled(node)
            assert counts["PUT", "/v1/{collection}/{key}"] == own.count(place) > 0
        await look_up_all(store)
        await read_all(store)
        for node in nodes.nodes:
            counts = await settled(node)
            assert (counts["POST", "/v1/lookup"], counts["POST", "/v1/read"]) == (1, 1)

    with_cluster(tmp_path, test)


def test_who_reads_by_himself_is_told_whom_to_ask_for_what(tmp_path: Path) -> None:
    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        keys = [key_of(i) for i in range(NUMBER)]
        own = [owner(nodes, key) for key in keys]
        told = {node.url: list(places) for node, places in await store.nodes_of(keys)}
        for place, gate in enumerate(nodes.gates):
            assert told[gate.url] == [i for i in range(NUMBER) if own[i] == place]
        nodes.gates[0].shut()
        await look_up_all(store)  # it is known to be down now
        told = {node.url: list(places) for node, places in await store.nodes_of(keys)}
        assert nodes.gates[0].url not in told
        assert sorted(place for places in told.values() for place in places) == list(range(NUMBER))

    with_cluster(tmp_path, test)


def test_when_a_node_dies_the_others_do_its_work_in_the_same_call(tmp_path: Path) -> None:
    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        nodes.gates[0].shut()
        await look_up_all(store)
        nodes.gates[1].shut()
        await read_all(store)
        for i in range(NUMBER):
            entry = await put(store, key_of(100 + i), data_of(i))
            assert entry.etag == etag_of(data_of(i))
            span = await store.get(key_of(100 + i), 3, 9)
            assert span is not None
            assert bytes(span.data) == data_of(i)[3:9]
        assert await store.delete(key_of(100))
        assert len([entry async for entry in store.list(key_of(0)[:8])]) == 2 * NUMBER - 1

    with_cluster(tmp_path, test)


@pytest.mark.parametrize("sent_bytes", [0, 40, 5_000, SIZE + 1000])
def test_what_a_cut_read_did_not_bring_comes_from_another_byte_by_byte(
    tmp_path: Path, sent_bytes: int
) -> None:
    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        await read_all(store)
        for gate in nodes.gates[:2]:
            gate.cut_after_bytes = sent_bytes
        found = await read_all(store)
        assert sum(map(len, found.found)) == sum(ask.end - ask.start for ask in asks())
        assert all(gate.cut_after_bytes is None for gate in nodes.gates), "both were cut"

    with_cluster(tmp_path, test)


@pytest.mark.parametrize("what", [look_up_all, read_all])
def test_a_node_that_hangs_costs_one_silence_and_then_nothing(
    tmp_path: Path, what: Callable[[Store], Awaitable[object]]
) -> None:
    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        await what(store)
        nodes.gates[2].hang()
        asked = nodes.gates[2].questions
        first_s = await timed(what(store))
        assert QUICK.hedge_s <= first_s < LONGEST_HEDGE_S + BUSY_S  # if the machine was slow before
        for _ in range(10):
            await what(store)
        assert nodes.gates[2].questions == asked + 1, "it is not asked again until it is well"
        nodes.gates[2].hang(False)
        asked = (await settled(nodes.nodes[2])).get(("POST", "/v1/lookup"), 0)
        while (await settled(nodes.nodes[2])).get(("POST", "/v1/lookup"), 0) < asked + 2:
            await look_up_all(store)
            await asyncio.sleep(0.05)

    with_cluster(tmp_path, test)


def test_a_node_that_hangs_during_an_upload(tmp_path: Path) -> None:
    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        nodes.gates[2].hang()
        async with asyncio.timeout(WELL_S + PROBE_S + 2.0 + 4 * BUSY_S):
            await asyncio.gather(*(put(store, key_of(50 + i), data_of(i)) for i in range(NUMBER)))
        for i in range(NUMBER):
            assert await contract.read(store, key_of(50 + i)) == data_of(i)

    with_cluster(tmp_path, test)


def test_a_slow_node_is_waited_for_or_overtaken(tmp_path: Path) -> None:
    """Its answers take longer than a usual silence: some are asked for twice, all come."""

    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        await read_all(store)
        nodes.gates[1].delay_s = 1.5 * QUICK.hedge_s
        own = [key_of(i) for i in range(NUMBER) if owner(nodes, key_of(i)) == 1]
        alone_s = len(own) * SIZE / (1 << 16) * nodes.gates[1].delay_s
        assert await timed(read_all(store)) < alone_s, "others brought some of it"
        asked = sum(gate.questions for gate in nodes.gates)
        await asyncio.gather(*(look_up_all(store) for _ in range(30)))
        again = sum(gate.questions for gate in nodes.gates) - asked - 90
        assert again <= 3 * (MAX_HEDGES + 9), "few are asked for twice, however slow it is"

    with_cluster(tmp_path, test)


def test_a_refusal_is_an_answer_and_is_not_asked_for_elsewhere(tmp_path: Path) -> None:
    async def work() -> None:
        config = config_for(tmp_path, tenant("a", "secret"))
        async with running(config) as one, running(config_for(tmp_path / "2")) as other:
            store = node_store(open_nodes(f"{one.url},{other.url}", token="wrong", limits=QUICK))
            mine = [
                key_of(i)
                for i in range(20)
                if rank(key_of(i), seed_of(one.url)) > rank(key_of(i), seed_of(other.url))
            ]
            with pytest.raises(NotAllowedError):
                await store.lookup(mine)
            assert not await settled(other)
            await store.close()

    run(work())


def test_when_all_are_down_it_fails_by_name_and_goes_on_when_one_is_back(tmp_path: Path) -> None:
    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        for gate in nodes.gates:
            gate.shut()
        for _ in range(3):
            with pytest.raises(UnavailableError):
                await look_up_all(store)
            with pytest.raises(UnavailableError):
                await put(store, b"new", b"data")
        await nodes.gates[1].open()
        await look_up_all(store)
        await put(store, b"new", b"data")

    with_cluster(tmp_path, test)


def test_a_store_behind_one_node_that_fails(tmp_path: Path) -> None:
    """A frame says that the node's own store failed: another node may reach it."""

    async def work() -> None:
        away = HttpStore(NodeClient("http://127.0.0.1:1", limits=QUICK))
        async with (
            cluster(tmp_path, 2) as nodes,
            running(config_for(tmp_path), away) as bad,
            nodes.store(f"{nodes.urls},{bad.url}") as store,
        ):
            for i in range(NUMBER):
                await put(store, key_of(i), data_of(i))
            await look_up_all(store)
            await read_all(store)
            await look_up_all(store)

    run(work())


def test_a_put_whose_answer_was_lost_is_told_as_ours(tmp_path: Path) -> None:
    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        for i in range(NUMBER):
            for gate in nodes.gates:
                gate.cut_after_bytes = 0
            data, old = content(f"new {i}", 100), etag_of(data_of(i))
            entry = await put(store, key_of(i), data, replacing=old)
            assert entry.etag == etag_of(data)
            for gate in nodes.gates:
                gate.cut_after_bytes = None

    with_cluster(tmp_path, test, number=2)


def test_delete_reaches_every_node(tmp_path: Path) -> None:
    """Each may have the object in its RAM."""

    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        assert await store.delete(key_of(1))
        assert not await store.delete(key_of(1))
        for node in nodes.nodes:
            assert (await settled(node))["DELETE", "/v1/{collection}/{key}"] == 2

    with_cluster(tmp_path, test)


# what a place is written as


def test_urls() -> None:
    assert checked_urls("http://a:1") == ["http://a:1"]
    assert checked_urls("http://a:1/, http://b:2,http://a:1") == ["http://a:1", "http://b:2"]
    assert checked_urls("https://a/one,two") == ["https://a/one,two"]
    for wrong in ("http://a,", "http://a:1,http://", "http://a:x,http://b", "http://a,http://u@b"):
        with pytest.raises(UnsupportedError):
            checked_urls(wrong)


def test_one_address_needs_no_more_than_a_client() -> None:
    assert isinstance(open_nodes("http://127.0.0.1:1"), NodeClient)
    assert isinstance(open_nodes("http://[::1]:1"), NodeClient)
    assert isinstance(node_store(open_nodes("http://127.0.0.1:1")), HttpStore)
    assert isinstance(open_nodes("http://localhost:1"), ManyNodes)
    assert isinstance(open_nodes("http://127.0.0.1:1,http://127.0.0.1:2"), ManyNodes)


# names with several addresses

HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


class NameServer:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self.is_away = False
        monkeypatch.setattr("kdn.store.members.addresses_of", self.resolve)

    async def resolve(self, url: str) -> list[str]:
        if self.is_away:
            raise OSError("nobody answers")
        return list(self.addresses)


async def served(nodes: Cluster, place: int) -> int:
    return sum((await settled(nodes.nodes[place])).values())


def test_addresses_come_and_go_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NameServer(monkeypatch)
    server.addresses = HOSTS[:1]
    monkeypatch.setattr("kdn.store.members.LEAVE_S", 0.05)

    async def work(nodes: Cluster, store: ManyNodesStore) -> None:
        for i in range(NUMBER):
            await put(store, key_of(i), data_of(i))
        await look_up_all(store)
        assert [await served(nodes, place) > 0 for place in range(3)] == [True, False, False]
        server.addresses = HOSTS
        while not await served(nodes, 2):  # it is enough to go on
            await look_up_all(store)
        await read_all(store)
        assert await served(nodes, 1)
        server.is_away = True
        await asyncio.sleep(1.5 * QUICK.resolve_s)
        await read_all(store)
        assert len(await store._members.every()) == 3, "what was known stays"
        server.is_away, server.addresses = False, HOSTS[:2]
        while nodes.gates[2].num_connections:  # they are closed when nobody needs them any more
            await look_up_all(store)
        before = await served(nodes, 2)
        await read_all(store)
        assert await served(nodes, 2) == before
        server.addresses = HOSTS[1:2]
        nodes.gates[0].shut()
        nodes.gates[2].shut()
        while [one.name for one in await store._members.every()] != [nodes.gates[1].url]:
            await look_up_all(store)
        await read_all(store)

    async def with_name() -> None:
        async with (  # a single address is reached by its name, so the system has to know it
            cluster(tmp_path, 3, hosts=HOSTS) as nodes,
            nodes.store(f"http://localhost:{nodes.gates[0].port}") as store,
        ):
            await work(nodes, store)

    run(with_name())


def test_a_name_is_told_to_the_node_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NameServer(monkeypatch)
    server.addresses = HOSTS[:2]
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async def work() -> None:
        one = await asyncio.start_server(serve, HOSTS[0])
        port = one.sockets[0].getsockname()[1]
        other = await asyncio.start_server(serve, HOSTS[1], port)
        limits = replace(QUICK, connect_s=0.5)
        store = node_store(open_nodes(f"http://kdn.invalid:{port}", limits=limits))
        with pytest.raises(UnavailableError, match=r"kdn\.invalid:\d+ at 127\.0\.0\."):
            await store.lookup([b"key"])
        with pytest.raises(UnavailableError):
            await store.read_into([Ask(b"key", 0, 5, b"etag")], Kept(1))
        await store.close()
        one.close()
        other.close()
        assert len(heads) >= 4
        assert all(b"\r\nHost: kdn.invalid:%d\r\n" % port in head for head in heads)

    run(work())


def test_a_wrong_checksum_is_refused_and_no_other_node_is_asked(tmp_path: Path) -> None:
    async def test(nodes: Cluster, store: ManyNodesStore) -> None:
        before = sum(gate.requests for gate in nodes.gates)
        with pytest.raises(ChecksumError):
            await store.put(b"k", b"data", etag=b"e", checksum=xxh3_64_intdigest(b"other"))
        assert sum(gate.requests for gate in nodes.gates) == before + 1
        assert await store.lookup([b"k"]) == [None]

    with_cluster(tmp_path, test)
