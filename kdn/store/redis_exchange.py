"""One connection to a Redis server: jobs go out ahead of their answers, within a window."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from kdn.store.redis_wire import SCRATCH_BYTES, Command, CutError, Job, ReplyReader, pack

WINDOW_BYTES = 8 << 20
"""Of answers asked for and not yet received. TCP has no more than this on its way, so asking for
more ahead gains nothing, and the server would have to buffer it, in memory that counts against its
bound. (32 MiB from one server on loopback arrive 2.3 times as fast as if asked for at once.)"""
FIRST_COMMANDS = 2
"""Sent at once: so the server begins while the others are packed."""
ASKING: Command = (b"ASKING",)


class RedisConnection(asyncio.BufferedProtocol):
    """One exchange at a time: `ask`, then again while it `is_idle`."""

    def __init__(self, on_lost: Callable[[RedisConnection], None]) -> None:
        self.closed = asyncio.Event()
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = ReplyReader()
        self._reader.on_done = self._on_done
        self._unsent: deque[Job] = deque()
        self._asking = False
        self._left = 0  # jobs without all answers
        self._window_bytes = 0
        self._answer: asyncio.Future[None] | None = None
        self._moved_s = 0.0  # when something last arrived or was sent
        self._unsent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and self._answer is None and self._reader.is_idle

    async def ask(self, jobs: Sequence[Job], silence_s: float, *, asking: bool = False) -> None:
        """All answers. Whatever is raised, the connection is of no use any more, and jobs that
        have not all their answers (`is_answered`) may have been done."""
        assert self._answer is None
        if self._transport is None or self._transport.is_closing():
            raise CutError("the connection was closed")
        if not jobs:
            return
        self._answer = self._loop.create_future()
        self._unsent.extend(jobs)
        self._left, self._asking, self._window_bytes = len(jobs), asking, 0
        self._moved_s = self._loop.time()
        self._watch(silence_s)
        try:
            self._send_more()
            await self._answer
        except BaseException:
            self.abort()
            raise
        finally:
            assert self._timer is not None
            self._timer.cancel()
            self._answer = None

    def _send_more(self) -> None:
        """As many as the window has room for."""
        assert self._transport is not None
        out: list[bytes] = []
        is_first = not self._window_bytes
        while self._unsent:
            size_bytes = self._unsent[0].travelling_bytes
            if self._window_bytes and self._window_bytes + size_bytes > WINDOW_BYTES:
                break
            job = self._unsent.popleft()
            job.in_window_bytes = size_bytes
            self._window_bytes += size_bytes
            commands = list(job.commands())
            if self._asking:  # a server that is taking a slot over answers only who asks so
                commands = [one for command in commands for one in (ASKING, command)]
            self._reader.expect(job, [command is not ASKING for command in commands])
            out += map(pack, commands)
            if is_first and len(out) >= FIRST_COMMANDS:
                self._transport.write(b"".join(out))
                is_first, out = False, []
        if out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _on_done(self, job: Job) -> None:
        self._left -= 1
        self._window_bytes -= job.in_window_bytes
        if self._unsent:
            self._send_more()
        if not self._left and self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _watch(self, silence_s: float) -> None:
        """A long command on a slow link goes out for a while before anything comes back."""
        assert self._transport is not None
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._moved_s = unsent_bytes, self._loop.time()
        quiet_s = self._loop.time() - self._moved_s
        if quiet_s >= silence_s:
            self._fail(CutError(f"no answer for {silence_s:g} s"))
            return
        wait_s = min(silence_s - quiet_s, silence_s / 4)
        self._timer = self._loop.call_later(wait_s, self._watch, silence_s)

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        try:
            return self._reader.room()
        except Exception as error:  # a mistake of the receiver's: who waits learns of it
            self._fail(error)
            return memoryview(bytearray(SCRATCH_BYTES))

    def buffer_updated(self, num_bytes: int) -> None:
        self._moved_s = self._loop.time()
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._reader.filled(num_bytes)
        except Exception as error:
            self._fail(error)

    def eof_received(self) -> None:
        """Nothing is sent after it: the transport closes."""

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self._on_lost(self)
        self._fail(CutError(f"the connection was lost: {error!r}" if error else "it was closed"))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()
