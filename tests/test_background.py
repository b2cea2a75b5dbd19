"""Work that nobody waits for: it goes on, and its faults are seen."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from itertools import pairwise

import pytest

from kdn import background
from kdn.background import faults, supervise, watched


@pytest.fixture(autouse=True)
def count_anew() -> None:
    faults.clear()


def test_work_that_fails_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    began = []

    async def work() -> None:
        began.append(asyncio.get_running_loop().time())
        if len(began) < 4:
            raise ZeroDivisionError("by a mistake")

    asyncio.run(supervise("counting", work, pause_s=0.01))
    assert len(began) == 4, "until it returns"
    pauses = [after - before for before, after in pairwise(began)]
    assert all(pause >= 0.009 * 2**i for i, pause in enumerate(pauses)), pauses
    assert faults["counting"] == 3
    assert "ZeroDivisionError: by a mistake" in caplog.text
    assert "in work" in caplog.text, "the traceback"


def test_cancelling_ends_it() -> None:
    async def work() -> None:
        await asyncio.sleep(60)

    async def test() -> None:
        task = asyncio.create_task(supervise("waiting", work))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(test())
    assert not faults


def test_what_is_watched_is_counted_unless_expected(caplog: pytest.LogCaptureFixture) -> None:
    for error in (KeyError("which"), OSError("expected"), None):
        one: Future[None] = Future()
        one.add_done_callback(watched("looking", OSError))
        if error is None:
            one.cancel()
        else:
            one.set_exception(error)
    assert faults == {"looking": 1}
    assert "KeyError" in caplog.text
    assert "OSError" not in caplog.text


def test_what_goes_on_and_on_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            background.fault("failing", ValueError())
    assert faults["failing"] == 1000
    assert len(caplog.records) == 8 + len([16, 32, 64, 128, 256, 512])
