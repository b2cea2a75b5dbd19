"""Work that nobody waits for. It must not end by itself, nor fail unseen.

A loop that runs as long as its owner is wrapped in `supervise`; a piece of work that is begun and
left alone has `watched` as its callback. What neither of them expected is logged with its traceback
and counted in `faults`, by the name of the work, since the process began. One that goes on and on
is logged ever more rarely, so that a log does not fill a disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
ALL_LOGGED = 8

faults: Counter[str] = Counter()
"""By the name of the work. Only ever grows."""


def fault(name: str, error: BaseException) -> None:
    """Something failed that was not expected to: a mistake, ours or that of a library."""
    faults[name] += 1
    number = faults[name]
    if number <= ALL_LOGGED or number.bit_count() == 1:  # then every power of two
        logger.error("%s failed (%d times by now): %r", name, number, error, exc_info=error)


async def supervise(
    name: str, work: Callable[[], Awaitable[None]], *, pause_s: float = FIRST_PAUSE_S
) -> None:
    """Run `work` until it returns or is cancelled. If it fails, begin it again after a pause, which
    grows as long as it fails at once."""
    loop, wait_s = asyncio.get_running_loop(), pause_s
    while True:
        began_s = loop.time()
        try:
            return await work()
        except Exception as error:
            fault(name, error)
        if loop.time() - began_s > LONGEST_PAUSE_S:
            wait_s = pause_s
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_PAUSE_S)


def watched(
    name: str, *expected: type[BaseException]
) -> Callable[[asyncio.Future[Any] | Future[Any]], None]:
    """For `add_done_callback` of a task or a future. `expected` errors are no faults."""

    def done(one: asyncio.Future[Any] | Future[Any]) -> None:
        if one.cancelled():
            return
        error = one.exception()
        if error is not None and not isinstance(error, expected):
            fault(name, error)

    return done


async def outwait(work: asyncio.Future[Any]) -> None:
    """Wait until it is done, however often the caller is cancelled meanwhile; the cancellation is
    raised afterwards. For work in a thread, which cannot be stopped."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
