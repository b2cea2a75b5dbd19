"""Loads into vLLM's memory that a fetcher brings from a node: on one rank, and for several."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kdn.delivery import client, quick
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.shared import SharedSession
from kdn.errors import UnsupportedError
from kdn.session.loop import LoopThread
from kdn.session.session import FETCH_CONNECTIONS, FETCHER_CORES, connections_here
from tests.engines.vllm_ranks import ended, fits, ranks_of
from tests.engines.vllm_working import load, make_worker, order, publish, shared_session
from tests.node.harness import config_for, running


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are small here, and the machine may be busy."""
    monkeypatch.setattr(quick, "MIN_BYTES", 1)
    monkeypatch.setattr(client, "QUICK_LEAST_S", 8.0)


@contextmanager
def node(folder: Path) -> Iterator[str]:
    loop, serving = LoopThread(), running(config_for(folder))
    try:
        yield loop.run(serving.__aenter__(), 30.0).url
    finally:
        loop.run(serving.__aexit__(None, None, None), 30.0)
        loop.close(5.0)


@contextmanager
def session_with_fetcher(folder: Path) -> Iterator[SharedSession]:
    """It has learnt that link and decoder are fast, as it does in its first loads."""
    with node(folder) as url, shared_session(url, fetch_connections=2) as shared:
        publish(shared)
        session = shared.session

        async def ready() -> None:
            session.estimator.started(0.0)
            for at_ms in range(100):
                session.estimator.add(1 << 20, 0.001 * at_ms)
            session.estimator.idle(0.1)
            await session.start_fetcher()
            assert session.fetcher is not None
            while not session.fetcher.is_ready():
                await asyncio.sleep(0.01)

        shared.submit(ready).result(30.0)
        yield shared


def num_orders(shared: SharedSession) -> int:
    assert shared.session.fetcher is not None
    return shared.session.fetcher._count


def test_a_load_by_the_fetcher_and_one_without_it(tmp_path: Path) -> None:
    with session_with_fetcher(tmp_path) as shared:
        cache, fetcher = publish(shared), shared.session.fetcher
        for is_alive in (True, False):
            worker, paged = make_worker(shared)
            assert load(worker, 0, 576) == (set(), 576)
            found = paged.read(0, 576, range(30))
            assert (found.keys == cache.keys[:, :576]).all()
            assert worker.counts["fetched_bytes"] > 0
            assert num_orders(shared) in ((1,) if is_alive else (1, 2))
            if is_alive:
                assert fetcher is not None
                assert fetcher.pid is not None
                os.kill(fetcher.pid, signal.SIGKILL)


def test_ranks_share_what_a_fetcher_brings(tmp_path: Path) -> None:
    with session_with_fetcher(tmp_path) as shared, ranks_of(shared, tmp_path / "host") as ranks:
        cache = publish(shared)
        for one in ranks:
            one.begin(order(0, 576))
        assert ended(ranks)[0] == set()
        assert all(fits(one, cache, 576) for one in ranks)
        assert ranks[1].worker.counts["fetched_bytes"] == 0
        assert num_orders(shared) == 1


def test_cores_that_decode_have_none_unless_it_is_asked_for(tmp_path: Path) -> None:
    with node(tmp_path) as url, shared_session(url) as shared:
        assert shared.session.fetcher is None
    assert Settings.parse({"url": "http://a"}).session.fetch_connections is None
    assert connections_here(FETCHER_CORES) == FETCH_CONNECTIONS
    assert not connections_here(FETCHER_CORES - 1)
    own = Settings.parse({"url": "http://a", "fetch_connections": 6})
    assert own.session.fetch_connections == 6
    with pytest.raises(UnsupportedError, match="fetch_connections"):
        Settings.parse({"url": "http://a", "fetch_connections": -1})
