"""Deliveries that a fetcher brings, and what becomes of them when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kdn.delivery import client as client_module
from kdn.delivery import fetcher as fetcher_module
from kdn.delivery import quick as quick_module
from kdn.delivery.client import deliver
from kdn.delivery.estimate import Estimator
from kdn.delivery.plan import Link
from kdn.store.base import NodeAt
from tests.delivery.fetching import TOKEN, Setup, fetching, relay
from tests.delivery.world import World, make_world
from tests.node.harness import run

SLOW = Link(rate=1e4, low_rate=1e3, latency_s=0.01)
Test = Callable[[Setup], Awaitable[None]]


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(12)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are small here, and the machine may be busy."""
    monkeypatch.setattr(quick_module, "MIN_BYTES", 1)
    monkeypatch.setattr(client_module, "QUICK_LEAST_S", 8.0)


def checked(world: World, folder: Path, test: Test) -> None:
    async def work() -> None:
        async with fetching(world, folder) as setup:
            await test(setup)
            await asyncio.sleep(0)

    run(work())


def test_all_comes_by_the_fetcher(world: World, tmp_path: Path) -> None:
    async def test(setup: Setup) -> None:
        for _ in range(3):  # the second time over connections and into memory that are there
            result = await setup.deliver()
            assert result.levels == world.all_levels
            assert (setup.store.asked, result.troubles, result.failures) == ([], (), 0)
            size = sum(len(stream) for stream in world.streams)
            assert 0.9 * size < result.fetched_bytes <= size
            assert [bytes(one.data) for one in result.arrived] == world.streams
        assert len(os.listdir(f"/proc/{setup.fetcher.pid}/task")) == 3 + 3

    checked(world, tmp_path, test)


def test_only_the_levels_that_are_enough_come(world: World, tmp_path: Path) -> None:
    async def test(setup: Setup) -> None:
        result = await setup.deliver(enough_kld=world.expected_kld[1])
        assert set(result.levels) <= {1, 2, 3}
        assert result.kld <= world.expected_kld[1]
        assert setup.store.asked == []

    checked(world, tmp_path, test)


def test_the_token_is_nowhere_to_be_seen(world: World, tmp_path: Path) -> None:
    async def test(setup: Setup) -> None:
        for name in ("cmdline", "environ"):
            assert TOKEN.encode() not in Path(f"/proc/{setup.fetcher.pid}/{name}").read_bytes()

    checked(world, tmp_path, test)


def test_what_arrives_damaged_is_fetched_again(world: World, tmp_path: Path) -> None:
    """Two bytes of each answer are others: levels that do not verify never reach a decoder."""

    async def change(data: bytes, count: int) -> bytes:
        if count >= 20_000 and len(data) > 200:
            data = data[:100] + bytes([data[100] ^ 1, data[101] ^ 128]) + data[102:]
        return data

    async def test(setup: Setup) -> None:
        async with setup.between(relay(setup.store._node.url, change)):
            result = await setup.deliver()
        assert result.levels == world.all_levels
        assert setup.store.asked
        assert "fetcher" in result.troubles[0]

    checked(world, tmp_path, test)


def test_what_was_verified_before_a_cut_is_kept(world: World, tmp_path: Path) -> None:
    sent = 0

    async def change(data: bytes, count: int) -> bytes:
        nonlocal sent
        sent += len(data)
        return data if count < 60_000 else b""

    async def test(setup: Setup) -> None:
        async with setup.between(relay(setup.store._node.url, change)):
            result = await setup.deliver()
        assert result.levels == world.all_levels
        again = sum(ask.end - ask.start for ask in setup.store.asked)
        missing = sum(map(len, world.streams)) - sent
        assert 0 < again < sum(map(len, world.streams))
        # of what came, no more than a level of the last stream of each request is asked for again
        assert again - missing < 6 * max(map(len, world.streams))

    checked(world, tmp_path, test)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 500 No\r\n\r\n", b"x"])
def test_who_does_not_answer_is_not_waited_for(
    world: World, tmp_path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "QUICK_LEAST_S", 0.25)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()
        writer.close()

    async def test(setup: Setup) -> None:
        async with setup.between(handle):
            result = await setup.deliver()
        assert result.levels == world.all_levels
        assert result.done_s < 10.0
        assert (await setup.deliver()).failures == 0  # it is of use again

    checked(world, tmp_path, test)


def test_a_node_that_is_not_there(world: World, tmp_path: Path) -> None:
    async def test(setup: Setup) -> None:
        setup.store.fetch_from = NodeAt("http://127.0.0.1:9")
        result = await setup.deliver()
        assert result.levels == world.all_levels
        assert any("fetcher" in one for one in result.troubles)

    checked(world, tmp_path, test)


def test_streams_that_are_gone_are_left_to_the_model(world: World, tmp_path: Path) -> None:
    async def test(setup: Setup) -> None:
        async def forgetful(data: bytes, count: int) -> bytes:
            if not count:
                for chunk in world.chunks[-2:]:
                    await setup.store.delete(chunk.key)
            return data

        async with setup.between(relay(setup.store._node.url, forgetful)):
            result = await setup.deliver()
        assert result.levels[:-2] == world.all_levels[:-2]
        gone = [number for number in (10, 11) if not result.levels[number]]
        assert list(result.recompute) == gone

    checked(world, tmp_path, test)


def test_a_killed_fetcher_is_done_without_and_started_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "REST_S", 0.01)

    async def test(setup: Setup) -> None:
        first, fetcher = setup.fetcher.pid, setup.fetcher
        assert first is not None

        async def murderous(data: bytes, count: int) -> bytes:
            if count > 30_000 and fetcher.pid == first:
                os.kill(first, signal.SIGKILL)
            return data

        fetcher._rest_s = 0.01
        async with setup.between(relay(setup.store._node.url, murderous)):
            result = await setup.deliver()
        assert result.levels == world.all_levels
        assert any("died" in one for one in result.troubles)
        assert not fetcher._fetches  # its memory is free
        await setup.ready()
        assert fetcher.pid not in (None, first)
        asked = len(setup.store.asked)
        assert (await setup.deliver()).levels == world.all_levels
        assert len(setup.store.asked) == asked

    checked(world, tmp_path, test)


def test_memory_is_not_used_again_while_a_fetcher_that_hangs_may_write_to_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "LAG_S", 0.5)
    monkeypatch.setattr(client_module, "QUICK_LEAST_S", 0.25)

    async def test(setup: Setup) -> None:
        fetcher, pid = setup.fetcher, setup.fetcher.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        result = await setup.deliver()
        assert result.levels == world.all_levels
        [hanging] = fetcher._fetches.values()
        start, end = hanging.region.start, hanging.region.start + len(hanging.region.array)
        other = fetcher.take(4096)
        assert other is not None
        assert not start <= other.start < end
        async with asyncio.timeout(10.0):
            while fetcher._fetches:  # it is killed
                await asyncio.sleep(0.02)
        assert not hanging.may_write

    checked(world, tmp_path, test)


def test_a_slow_link_is_not_the_fetchers(world: World, tmp_path: Path) -> None:
    async def test(setup: Setup) -> None:
        result = await deliver(
            world.request(enough_kld=world.expected_kld[-1], deadline_s=1.0), [setup.store],
            estimator=Estimator(SLOW), fetcher=setup.fetcher,
        )  # fmt: skip
        world.check(result)
        assert setup.store.asked
        assert not setup.fetcher._count

    checked(world, tmp_path, test)
