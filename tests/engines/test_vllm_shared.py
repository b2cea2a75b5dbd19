"""The session of a vLLM process: shared, closed in order; what fails in it is seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kdn.background import faults
from kdn.cache.keys import cut
from kdn.engines.vllm import shared as shared_module
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.shared import SharedSession
from kdn.errors import StoreError
from kdn.session.delivered import COMPUTED
from kdn.session.session import Session
from tests.engines.vllm_working import SPACE, SPEC, TOKENS, shared_session, values

CHUNK = cut(TOKENS, SPACE)[0]
CACHE = values(256)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedSession]:
    host = str(tmp_path / "host")
    with shared_session(tmp_path / "data", host_bytes=1 << 30, host_folder=host) as shared:
        yield shared


def until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


async def answer() -> int:
    return 7


def test_it_is_shared_and_closed(tmp_path: Path) -> None:
    settings = Settings.parse({"url": str(tmp_path), "codec": "exact", "host_bytes": 0}).session
    first = SharedSession.acquire(settings, SPEC, torch.float32)
    assert SharedSession.acquire(settings, SPEC, torch.float32) is first
    first.release()
    assert first.submit(answer).result(10) == 7
    first.release()
    with pytest.raises(StoreError, match="has ended"):
        first.submit(answer).result(1)
    assert not first.has_room()
    first.publish(CHUNK, CACHE, None, 0.0)  # nowhere, and vLLM goes on
    # The folder is free again.
    SharedSession.acquire(settings, SPEC, torch.float32).release()


def test_one_that_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = asyncio.Event()

    async def endless(self: Session) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            closed.set()

    monkeypatch.setattr(Session, "_open", endless)
    monkeypatch.setattr(shared_module, "OPEN_S", 0.1)
    with pytest.raises(StoreError, match="did not open in"), shared_session(tmp_path):
        raise AssertionError("not to be reached")
    assert closed.is_set()
    assert SharedSession._every == {}


def test_what_nobody_waits_for_ends_and_what_was_computed_is_published(tmp_path: Path) -> None:
    async def endless() -> None:
        await asyncio.sleep(3600)

    with shared_session(tmp_path) as shared:
        under_way = shared.submit(endless)
        shared.publish(CHUNK, CACHE, None, 0.0)
        publisher = shared.session.publisher
    assert under_way.cancelled()
    assert (publisher.counts.published, publisher.counts.dropped) == (1, 0)


def test_a_chunk_that_cannot_be_kept_is_told(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **named: object) -> bool:
        raise RuntimeError("a mistake while keeping")

    host, before = shared.session.host, faults["keeping a decoded chunk"]
    assert host is not None
    with monkeypatch.context() as patch:
        patch.setattr(host, "put", broken)
        shared.session.keep(CHUNK, CACHE, COMPUTED)
        until(lambda: faults["keeping a decoded chunk"] > before)
    assert 'raise RuntimeError("a mistake while keeping")' in caplog.text
    shared.session.keep(CHUNK, CACHE, COMPUTED)
    until(lambda: host.has(CHUNK, 0.0))


def test_a_mistake_while_publishing_is_told(
    shared: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **named: object) -> None:
        raise RuntimeError("a mistake")

    before = faults["publishing"]
    with monkeypatch.context() as patch:
        patch.setattr(shared.session, "publish", broken)
        shared.publish(CHUNK, CACHE, None, 0.0)
        until(lambda: faults["publishing"] > before)
    shared.publish(CHUNK, CACHE, None, 0.0)
    until(lambda: shared.session.publisher.counts.published == 1)


def test_an_exit_in_one_task_leaves_the_others(shared: SharedSession) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        shared.submit(leave).result(10)
    assert shared.submit(answer).result(10) == 7
    shared.publish(CHUNK, CACHE, None, 0.0)
    until(lambda: shared.session.publisher.counts.published == 1)
