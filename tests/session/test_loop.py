"""An event loop in a thread: it serves many callers, and outlives what they do to it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kdn.errors import StoreError
from kdn.session.loop import LoopThread


async def answer() -> int:
    return 7


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "kdn"]


def test_it_outlives_an_exit_in_its_thread() -> None:
    """Raised by a model's code, say: it reaches its caller, and the next caller is served."""

    async def leave() -> None:
        raise SystemExit(3)

    loop = LoopThread()
    with pytest.raises(SystemExit):
        loop.run(asyncio.wait_for(leave(), 5.0))
    assert loop.run(answer()) == 7
    loop.close()
    assert no_thread_is_left()


def test_what_is_under_way_at_the_end_is_cancelled() -> None:
    loop, ended = LoopThread(), threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    future = loop.submit(wait())
    loop.run(asyncio.sleep(0.01))
    loop.close()
    assert future.cancelled()
    assert ended.is_set()
    assert no_thread_is_left()


def test_nothing_is_begun_afterwards() -> None:
    loop = LoopThread()
    loop.close()
    loop.close()
    loop.call(pytest.fail, "it has ended")
    with pytest.raises(StoreError, match="has ended"):
        loop.run(answer())


def test_a_wait_has_an_end() -> None:
    loop = LoopThread()
    with pytest.raises(TimeoutError):
        loop.run(asyncio.sleep(60), 0.05)
    assert loop.run(answer()) == 7
    loop.close()
