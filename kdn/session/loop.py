"""An event loop in a thread, for callers that have none."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from kdn.errors import StoreError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LoopThread:
    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._closing = False
        self._lock = threading.Lock()  # guards _closing: nothing is begun once it is set
        self._thread = threading.Thread(target=self._run, name="kdn", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """An exit or interrupt that somebody's code raises in here reaches who waits for it; the
        loop must go on for that, and for all others."""
        while not self._closing and not self._loop.is_closed():
            try:
                self._loop.run_forever()
            except BaseException as error:
                logger.warning("the event loop was interrupted and goes on: %r", error)

    @property
    def is_closed(self) -> bool:
        return self._closing

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Wait for it. An interrupt (Ctrl-C) or a timeout cancels it."""
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it. StoreError is its result if the loop ends, or has ended."""
        with self._lock:
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        ended: Future[T] = Future()
        ended.set_exception(StoreError("kdn's background thread has ended"))
        return ended

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """In the loop's thread, soon; not at all if it has ended."""
        with self._lock:
            if not self._closing:
                self._loop.call_soon_threadsafe(function, *arguments)

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel what is still under way, and end. A thread that takes longer is left alone."""
        with self._lock:
            if self._closing or not self._thread.is_alive():  # as in a forked child
                return
            winding_up = asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop)
            self._closing = True
        try:
            winding_up.result(timeout_s)
        except TimeoutError:
            logger.warning("the event loop did not end within %s s", timeout_s)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._loop.close()

    async def _wind_up(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()
