"""How the disk store waits: operations that always end, threads for what blocks, keys held."""

from __future__ import annotations

import asyncio
from asyncio import Event, Future, Task, shield
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from kdn.background import watched
from kdn.errors import KdnError, StoreError

T = TypeVar("T")

MAX_OPERATIONS = 4096
"""Operations in progress or waiting for a thread; one more is refused. A node lets in fewer
requests, so that none of its tenants can use them up."""


class Tasks:
    """Runs operations to their end, whether or not their callers wait so long.

    A caller that is cancelled or whose deadline passes leaves its operation running: whoever
    changes files and what is known of them must not stop half-way.
    """

    def __init__(self, threads: int, deadline_s: float) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kdn-disk")
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="kdn-disk-read")
        self._deadline_s = deadline_s
        self._tasks: set[Task[Any]] = set()
        self._closed = False

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed or len(self._tasks) >= MAX_OPERATIONS:
            work.close()
            raise StoreError("the store is closed" if self._closed else "the store is overloaded")
        task = self.start(work)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await shield(task)
        except TimeoutError:
            raise StoreError(f"the disk did not answer within {self._deadline_s} s") from None

    @property
    def has_room(self) -> bool:
        """For work that need not be."""
        return not self._closed and len(self._tasks) < MAX_OPERATIONS // 2

    def start(self, work: Coroutine[Any, Any, T]) -> Task[T]:
        """In the background; `drain` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Its caller may have gone: then nobody else is left to hear of a mistake.
        task.add_done_callback(watched("an operation of the disk", KdnError, OSError))
        return task

    def in_thread(self, work: Callable[..., T], *args: object) -> Future[T]:
        """One blocking call of an operation. Bounded by the number of operations."""
        return asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def in_reader(self, work: Callable[..., T], *args: object) -> Future[T]:
        """The same for what changes nothing: it never waits behind writes, which wait for the disk
        ten times as long."""
        return asyncio.get_running_loop().run_in_executor(self._readers, work, *args)

    async def drain(self) -> bool:
        """Refuse new operations and wait for those in progress; False if it was done before."""
        if self._closed:
            return False
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._deadline_s)
        return True

    def shut_down(self) -> None:
        """Let the threads go; does not wait for one that the disk does not answer."""
        for pool in (self._pool, self._readers):
            pool.shutdown(wait=not self._tasks)


class Holds:
    """Only the holder of a key changes its files."""

    def __init__(self) -> None:
        self._held: dict[bytes, Event] = {}

    @asynccontextmanager
    async def hold(self, key: bytes) -> AsyncIterator[None]:
        while self.is_held(key):
            await self.change(key)
        with self.hold_free(key):
            yield

    def is_held(self, key: bytes) -> bool:
        return key in self._held

    async def change(self, key: bytes) -> None:
        """Return when the key is released, or its holder stirs."""
        await self._held[key].wait()

    def stir(self, key: bytes) -> None:
        """Let those who wait for a held key look what has become of it."""
        self._held[key].set()
        self._held[key] = Event()

    @contextmanager
    def hold_free(self, key: bytes) -> Iterator[None]:
        """Hold a key that nobody holds, at once."""
        assert key not in self._held, "a key with a record must be free"
        self._held[key] = Event()
        try:
            yield
        finally:
            self._held.pop(key).set()
