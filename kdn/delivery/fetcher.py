"""The engine's side of its fetcher (`fetcher_process.py`).

It starts the process, gives it orders and hears what has come. When the process dies, its orders
end, and another one is started later. Nobody depends on it: what it does not bring, a delivery
fetches itself. Memory that the process may still write to belongs to nobody else: an order keeps
its region until the process says that the order has ended, or until the process is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path

from kdn.background import watched
from kdn.delivery.arena import Arena, Region
from kdn.delivery.fetch_messages import Hello, News, Order, Span, Stop, pack, parse_news
from kdn.store.base import NodeAt

logger = logging.getLogger(__name__)

READY_S = 30.0
"""For a process to start."""
REST_S, LONGEST_REST_S = 1.0, 60.0
"""Before another is started in place of one that died, longer each time."""
LAG_S = 2.0
"""After an order's deadline, or after it was stopped: a fetcher that has not said by then that the
order has ended hangs, and is ended itself."""
TIDY_S = 5.0
CLOSE_S = 2.0
MAX_LINE_BYTES = 16 << 20


@dataclass(eq=False)
class Fetching:
    """An order under way. `verified` is by the number of a span, and good at any time; so is
    what `is_over` says: nothing more will come."""

    number: int
    region: Region
    verified: dict[int, int] = field(default_factory=dict)
    fetched_bytes: int = 0
    is_over: bool = False
    may_write: bool = True
    """The fetcher may still write to spans that are not whole."""
    trouble: str = ""
    on_news: Callable[[], None] = lambda: None
    _timer: asyncio.TimerHandle | None = None


class Fetcher:
    """Its methods belong to one event loop."""

    def __init__(self, hello: Hello, clock: Callable[[], float] = time.monotonic) -> None:
        """OSError where there is no memory to share."""
        self._arena = Arena(hello.arena_bytes)
        self._hello, self._clock = hello, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._life: asyncio.Task[None] | None = None
        self._fetches: dict[int, Fetching] = {}
        self._count = 0
        self._rest_s, self._rested_s = REST_S, 0.0
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def is_ready(self) -> bool:
        """If it is not, one is started, unless one died just now."""
        if self._writer is not None:
            return True
        if self._life is None and not self._is_closed and self._clock() >= self._rested_s:
            # It lives longer than the request that needs it first.
            self._life = asyncio.create_task(self._live(), context=Context())
            self._life.add_done_callback(watched("the fetcher", OSError, ValueError))
        return False

    def take(self, num_bytes: int) -> Region | None:
        """Memory for an order."""
        return self._arena.take(num_bytes)

    def fetch(
        self,
        region: Region,
        spans: Sequence[Span],
        shares: Sequence[tuple[NodeAt, Sequence[int]]],
        limit_s: float,
        on_news: Callable[[], None],
    ) -> Fetching:
        """Begin with it. `spans` lie in the region, by where they are in the arena."""
        assert self._writer is not None
        self._count += 1
        fetch = Fetching(self._count, region, on_news=on_news)
        self._fetches[fetch.number] = fetch
        # Python's clock is the system's, and the same in all processes.
        order = Order(fetch.number, time.monotonic() + limit_s, spans, shares)
        self._writer.write(pack(order))
        self._expect_end(fetch, limit_s + LAG_S)
        return fetch

    def stop(self, fetch: Fetching) -> None:
        """What is not there yet is not wanted any more."""
        fetch.is_over, fetch.on_news = True, _nothing
        if fetch.number in self._fetches and self._writer is not None:
            self._writer.write(pack(Stop(fetch.number)))
            self._expect_end(fetch, LAG_S)

    def _expect_end(self, fetch: Fetching, limit_s: float) -> None:
        if fetch._timer is not None:
            fetch._timer.cancel()
        fetch._timer = asyncio.get_running_loop().call_later(limit_s, self._hangs, fetch)

    def _hangs(self, fetch: Fetching) -> None:
        if fetch.number in self._fetches and self._process is not None:
            logger.warning("the fetcher hangs, and is ended")
            self._process.kill()

    # its life

    async def _live(self) -> None:
        """From its start to its end."""
        own, control = socket.socketpair()
        own.setblocking(False)
        writer: asyncio.StreamWriter | None = None
        try:
            with control:
                self._process = await asyncio.to_thread(self._start, control)
            reader, writer = await asyncio.open_connection(sock=own, limit=MAX_LINE_BYTES)
            writer.write(pack(self._hello))
            async with asyncio.timeout(READY_S):
                is_there = bool(await reader.readline())
            if is_there:
                self._writer, self._rest_s = writer, REST_S
                while line := await reader.readline():
                    self._note(parse_news(line))
        except (OSError, ValueError, TypeError) as error:  # a timeout, too
            logger.warning("the fetcher fails: %r", error)
        finally:
            self._writer = None
            if writer is not None:
                writer.close()
            own.close()
            await self._bury()

    def _start(self, control: socket.socket) -> subprocess.Popen[bytes]:
        """By the interpreter and the code of this process. Its arguments say nothing of value."""
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        files = (control.fileno(), self._arena.file)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "kdn.delivery.fetcher_process", *map(str, files)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=files,
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            },
        )  # fmt: skip

    async def _bury(self) -> None:
        """When it has ended, so have all its orders, and their memory is the engine's again."""
        if (process := self._process) is not None:
            process.kill()
            await asyncio.shield(asyncio.to_thread(process.wait))
        for fetch in list(self._fetches.values()):
            self._end(fetch, "the fetcher has died")
        self._process = self._life = None
        self._rested_s = self._clock() + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)

    def _note(self, news: News) -> None:
        fetch = self._fetches.get(news.number)
        if fetch is None:
            return
        fetch.fetched_bytes = news.fetched_bytes
        fetch.verified.update(dict(news.verified))
        if news.ended:
            self._end(fetch, news.trouble)
        else:
            fetch.on_news()

    def _end(self, fetch: Fetching, trouble: str) -> None:
        del self._fetches[fetch.number]
        fetch.is_over, fetch.may_write, fetch.trouble = True, False, trouble
        if fetch._timer is not None:
            fetch._timer.cancel()
        fetch.on_news()
        if not self._is_closed:
            asyncio.get_running_loop().call_later(TIDY_S, self._arena.tidy)

    async def close(self) -> None:
        """It ends when its socket does; at the latest it is killed."""
        self._is_closed = True
        if self._writer is not None:
            self._writer.close()
        if (life := self._life) is not None:
            await asyncio.wait([life], timeout=CLOSE_S)
            life.cancel()
            await asyncio.wait([life])
        self._arena.close()


def _nothing() -> None:
    pass
