"""Redis under failure: masters that die under load, slots that move, replicas that are late,
connections that break, and servers that lie."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from kdn.bench import servers
from kdn.bench.servers import RedisClusterServers, RedisServer, SentinelServers, until
from kdn.credentials import Credentials
from kdn.errors import KdnError, NotAllowedError, StoreError
from kdn.store.base import Entry, Store
from kdn.store.redis import open_redis_store
from kdn.store.redis_exchange import WINDOW_BYTES
from kdn.store.streaming import Ask, Collected
from tests.servers import NEEDS_REDIS, emptied, started
from tests.store.contract import closing, content, etag_of, put, read

LIMIT_S = 40.0
SLACK_S = 2.0
"""After a failover: one second, and as much for a busy machine."""


def run(test: Awaitable[None], limit_s: float = LIMIT_S) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await test

    asyncio.run(bounded())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisClusterServers]:
    """One that gives a master up soon."""
    folder = tmp_path_factory.mktemp("quick")
    with ExitStack() as stack:
        yield started(stack, lambda: servers.redis_cluster(folder, node_timeout_ms=1000))


class Load:
    """Writers and readers that go on until told to stop. What was acknowledged is read again and
    again, and must be right."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.kept: dict[bytes, bytes] = {}
        self.wrong: list[bytes] = []
        self.lost: list[bytes] = []
        self.errors: list[str] = []
        self.longest_read_s = 0.0
        self._goes_on = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._write()) for _ in range(4)]
        tasks += [asyncio.create_task(self._read()) for _ in range(4)]
        try:
            yield
        finally:
            self._goes_on = False
            await asyncio.gather(*tasks)

    async def _write(self) -> None:
        while self._goes_on:
            key, data = os.urandom(8), os.urandom(20_000)
            if await self._tried(put(self.store, key, data)):
                self.kept[key] = data
            await asyncio.sleep(0.005)

    async def _read(self) -> None:
        while self._goes_on:
            some = list(self.kept)[-32:]
            began_s = time.monotonic()
            await self._tried(self.check(some))
            self.longest_read_s = max(self.longest_read_s, time.monotonic() - began_s)
            await asyncio.sleep(0.005)

    async def _tried(self, work: Awaitable[object]) -> bool:
        try:
            await work
        except StoreError as error:
            self.errors.append(str(error))
            return False
        return True

    async def check(self, keys: list[bytes]) -> None:
        asks = [Ask(key, 0, 20_000, etag_of(self.kept[key])) for key in keys]
        collected = Collected(len(asks))
        collected.gone = lambda number: self.lost.append(keys[number])  # type: ignore[method-assign]
        await self.store.read_into(asks, collected)
        for key, data in zip(keys, collected.found, strict=True):
            if data and data != self.kept[key]:
                self.wrong.append(key)

    async def check_all(self) -> None:
        await self.check(list(self.kept))
        assert not self.wrong
        assert not self.lost


async def kill_master(cluster: RedisClusterServers) -> float:
    """One with a replica dies, somebody takes over; how long the Cluster took."""
    victim = cluster.masters()[0]
    began_s = time.monotonic()
    await asyncio.to_thread(cluster.kill, victim)
    await asyncio.to_thread(cluster.wait_until_whole)
    took_s = time.monotonic() - began_s
    await asyncio.to_thread(cluster.restart, victim)
    await asyncio.to_thread(cluster.wait_until_whole, 1)
    return took_s


def test_masters_die_under_load_and_nothing_acknowledged_is_lost(
    cluster: RedisClusterServers,
) -> None:
    async def test() -> None:
        async with closing(open_redis_store(cluster.url + "?wait=1", Credentials())) as store:
            load = Load(store)
            failovers_s = []
            async with load.running():
                for _ in range(2):
                    await asyncio.sleep(0.3)
                    failovers_s.append(await kill_master(cluster))
            assert len(load.kept) > 30
            await load.check_all()
            assert load.longest_read_s < max(failovers_s) + SLACK_S
            # While a new master has no replica yet, puts are refused; nothing else is.
            assert all("replicas have it" in error for error in load.errors), load.errors

    run(test())


def test_slots_move_under_load_without_an_error(cluster: RedisClusterServers) -> None:
    async def test() -> None:
        async with closing(open_redis_store(cluster.url, Credentials())) as store:
            load = Load(store)
            async with load.running():
                await asyncio.sleep(0.3)
                new = await asyncio.to_thread(cluster.add_shard)
                await asyncio.to_thread(cluster.reshard, new, 300)
                await asyncio.sleep(0.2)
            assert load.errors == []
            await load.check_all()
            assert new in cluster.masters()
            assert cluster.servers[new].ask("DBSIZE") > 0, "expected keys to have moved"

    run(test())


def test_a_sentinel_names_the_next_master(redis_sentinel: SentinelServers) -> None:
    async def test() -> None:
        url = redis_sentinel.url + "?wait=1"
        async with closing(open_redis_store(url, Credentials())) as store:
            old = redis_sentinel.master()
            data = content("before", 5000)
            await put(store, b"before", data)
            redis_sentinel.servers[old].kill()
            assert await read(store, b"before") == data, "from its replica"
            await asyncio.to_thread(
                until, lambda: redis_sentinel.master() != old, 20.0, lambda: "no failover"
            )
            after = open_redis_store(redis_sentinel.url, Credentials())
            async with closing(after):
                await put(after, b"after", data)
                assert await read(after, b"before") == data
            with pytest.raises(StoreError, match="replicas have it"):
                await put(store, b"alone", data)
            redis_sentinel.servers[old].start()

    run(test())


# acknowledgements


@pytest.fixture(params=["redis", "valkey"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RedisServer, ...]]:
    """A master and its replica."""
    start = servers.redis_server if request.param == "redis" else servers.valkey_server
    with ExitStack() as stack:
        quick = ("--repl-diskless-sync-delay", "0")
        master, replica = (
            started(stack, lambda at=at: start(tmp_path / str(at), *quick)) for at in range(2)
        )
        replica.follow(master)
        yield master, replica


@pytest.mark.parametrize("query", ["?wait=1&wait_s=0.2", "?wait_s=0.2"])
def test_what_no_replica_has_is_not_acknowledged(
    pair: tuple[RedisServer, RedisServer], query: str
) -> None:
    """Neither when it is new, nor when it is found to be there already, nor when it is deleted."""
    master, replica = pair

    async def test() -> None:
        async with closing(open_redis_store(master.url + query, Credentials())) as store:
            await until_acknowledged(store, b"old")
            replica.pause()
            for _ in range(2):
                with pytest.raises(StoreError, match="replicas have it"):
                    await put(store, b"key", b"data")
            with pytest.raises(StoreError, match="replicas have it"):
                await store.delete(b"old")
            replica.resume()
            await until_acknowledged(store, b"key")
            assert b"kdn:{6b6579}" in replica.ask("KEYS", "*")
            replica.kill()
            if "wait=" in query:
                with pytest.raises(StoreError, match="replicas have it"):
                    await put(store, b"alone", b"data")
            else:  # a server without a replica is all there is
                until(lambda: not master.ask("ROLE")[2], 10.0, lambda: "it is still there")
                await put(store, b"alone", b"data")

    run(test())


async def until_acknowledged(store: Store, key: bytes) -> None:
    while True:
        try:
            await put(store, key, b"data")
            return
        except StoreError:
            await asyncio.sleep(0.05)


def test_without_waiting_nobody_waits(pair: tuple[RedisServer, RedisServer]) -> None:
    master, replica = pair

    async def test() -> None:
        url = master.url + "?wait=0&wait_s=20"
        async with closing(open_redis_store(url, Credentials())) as store:
            replica.pause()
            began_s = time.monotonic()
            await put(store, b"key", b"data")
            await put(store, b"key", b"data")
            await store.delete(b"key")
            assert time.monotonic() - began_s < 10.0
            replica.resume()

    run(test())


# connections that break, and servers that lie

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def talking(talk: Talk) -> AsyncIterator[str]:
    """A server that answers as it likes; its address."""

    tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except ConnectionError:
            pass
        finally:
            await closed(writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(answer(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
    while most > 0 and (data := await reader.read(min(most, 16 << 10))):
        writer.write(data)
        await writer.drain()
        most -= len(data)


def test_a_read_goes_on_where_a_connection_broke(redis_server: RedisServer) -> None:
    """Again and again, within strings and between them: every byte comes once, in order."""
    emptied(redis_server)
    data = {b"%d" % number: os.urandom(100_000) for number in range(20)}

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", redis_server.port)
        asking = asyncio.create_task(_relay(reader, back, 1 << 30))
        try:
            await _relay(there, writer, 77_777)
        finally:
            asking.cancel()
            await closed(back)

    async def test() -> None:
        async with closing(open_redis_store(redis_server.url, Credentials())) as store:
            for key, value in data.items():
                await put(store, key, value)
        asks = [Ask(key, 7, 100_000, etag_of(value)) for key, value in data.items()]
        async with talking(cut) as address:
            cut_off = open_redis_store(f"redis://{address}", Credentials())
            async with closing(cut_off):
                collected = Collected(len(asks))
                await cut_off.read_into(asks, collected)
                assert collected.found == [value[7:] for value in data.values()]

    run(test())


LIES = {
    "no RESP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a huge string": b"$99999999999\r\n",
    "a string longer than asked for": b"$65000\r\n" + bytes(65_000) + b"\r\n",
    "a negative length": b"$-7\r\n",
    "a number that is none": b":12x\r\n",
    "a huge list": b"*99999999\r\n",
    "lists within lists": b"*1\r\n" * 100,
    "a line without end": b"+" + bytes(100_000),
    "a string without an end": b"$2\r\nabc\r\n",
    "more answers than questions": b"+OK\r\n" * 100,
    "an error for everything": b"-ERR no\r\n" * 4,
    "another server for everything": b"-MOVED 1 127.0.0.1:1\r\n" * 4,
    "a redirection to nowhere": b"-ASK 99999 :\r\n" * 4,
    "nothing": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_an_error_or_a_miss_in_time(lie: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while question := await reader.read(1 << 16):
            greeting = b"PING" in question or b"ROLE" in question
            writer.write(b"+PONG\r\n" if greeting else LIES[lie])

    async def test() -> None:
        async with talking(talk) as address:
            url = f"redis://{address}?deadline_s=0.1&silence_s=0.1&wait=0&wait_s=0.1"
            async with closing(open_redis_store(url, Credentials())) as store:
                for ask in (
                    store.get(b"key"),
                    store.lookup([b"key"]),
                    put(store, b"key", b"data"),
                    store.delete(b"key"),
                    store.stats(),
                ):
                    try:
                        found = await ask
                    except StoreError:
                        continue
                    told_ok = isinstance(found, Entry) and lie == "more answers than questions"
                    assert found in (None, [None], False) or told_ok

    run(test(), 15.0)


def test_an_echoed_password_is_not_told() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(b"-ERR unknown command 'AUTH', with args beginning with: 'pass-word'\r\n")

    async def test() -> None:
        async with talking(talk) as address:
            url = f"redis://:pass-word@{address}?deadline_s=0.2"
            async with closing(open_redis_store(url, Credentials())) as store:
                with pytest.raises(StoreError, match="unknown command") as told:
                    await store.get(b"key")
                assert "pass-word" not in str(told.value)

    run(test(), 15.0)


def test_nobody_there_is_told_with_the_address() -> None:
    async def test() -> None:
        port = servers.free_port()
        for scheme, rest in (("redis", ""), ("redis+cluster", ""), ("redis+sentinel", "/name")):
            url = f"{scheme}://127.0.0.1:{port}{rest}?deadline_s=0.2"
            async with closing(open_redis_store(url, Credentials())) as store:
                with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
                    await store.get(b"key")
                with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
                    await store.stats()

    run(test(), 15.0)


def test_a_cluster_that_is_none_is_told() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while question := await reader.read(1 << 16):
            writer.write(b"+PONG\r\n" if b"PING" in question else b"-ERR cluster disabled\r\n")

    async def test() -> None:
        async with talking(talk) as address:
            url = f"redis+cluster://{address}?deadline_s=0.2"
            async with closing(open_redis_store(url, Credentials())) as store:
                with pytest.raises(StoreError, match="cluster disabled"):
                    await store.get(b"key")

    run(test(), 15.0)


def test_no_more_is_asked_for_ahead_than_the_window(redis_server: RedisServer) -> None:
    """What a server has to buffer for a slow reader counts against its memory."""
    emptied(redis_server)
    data = os.urandom(1 << 20)

    async def test() -> None:
        async with closing(open_redis_store(redis_server.url, Credentials())) as store:
            keys = [b"%d" % number for number in range(40)]
            for key in keys:
                await put(store, key, data)
            seen: list[int] = []

            class Slow(Collected):
                def taken(self, number: int, start: int, num_bytes: int) -> None:
                    super().taken(number, start, num_bytes)
                    if start + num_bytes == len(data):
                        clients: bytes = redis_server.ask("CLIENT", "LIST")
                        seen.extend(map(int, re.findall(rb"omem=(\d+)", clients)))

            asks = [Ask(key, 0, len(data), etag_of(data)) for key in keys]
            slow = Slow(len(asks))
            await store.read_into(asks, slow)
            assert all(found == data for found in slow.found)
            assert max(seen) <= WINDOW_BYTES + (2 << 20)  # without a window: over 30 MiB

    run(test())


@NEEDS_REDIS
def test_refusals_have_names(tmp_path: Path) -> None:
    async def test(url: str) -> None:
        async with closing(open_redis_store(url, Credentials())) as store:
            with pytest.raises(NotAllowedError, match="NOPERM"):
                await put(store, b"key", b"data")
            assert await read(store, b"key") is None

    with servers.redis_server(tmp_path) as server:
        rules = ("on", ">pass", "~*", "+@read", "+ping", "+role", "+auth")
        server.ask("ACL", "SETUSER", "reader", *rules)
        run(test(server.url.replace("//", "//reader:pass@")))


def test_what_is_closed_says_so(redis_server: RedisServer) -> None:
    async def test() -> None:
        store = open_redis_store(redis_server.url + "?deadline_s=5", Credentials())
        await put(store, b"key", b"data")
        waiting = asyncio.gather(*(store.get(b"key") for _ in range(20)), return_exceptions=True)
        await store.close()
        assert all(one is None or not isinstance(one, BaseException) or isinstance(one, KdnError)
                   for one in await waiting)  # fmt: skip
        await store.close()

    run(test())
