"""Response bodies: out through the fair scheduler, frame by frame, and cut if nobody takes them.

A frame is handed to the transport in its turn and drained outside of it, so a reader that does not
drain holds no place. aiohttp writes the head; the body goes to the transport directly, several
parts in one system call and none of them copied. One timer per response watches whatever it waits
for, be it the reader or the store: so a deadline costs nothing per frame.
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http import StreamWriter

from kdn.node.rates import LEAST_BYTES, delivery_rate
from kdn.node.state import Node
from kdn.node.status.traffic import Delivery
from kdn.store.base import Entry

Data = bytes | memoryview
MIN_WATCH_S = 0.01
FIRST_FRAME_BYTES = 2**16 + 2**12
"""The first bytes (64 KiB and what goes before them) leave early, so that a reader has work while
the next ones are gathered; each frame is twice as large as the one before, up to what the node
sends at once."""


class Sender:
    """Writes one response's body. Use as a context manager after the response is prepared."""

    def __init__(self, node: Node, request: web.Request, flow: tuple[str, str], asked_bytes: int):
        """`asked_bytes`: of the whole body."""
        self._node = node
        self._request = request
        self._tenant, self._client = flow
        self._frame_bytes = min(FIRST_FRAME_BYTES, node.frame_bytes)
        self._pending: list[Data] = []
        self._pending_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._draining_since_s: float | None = None
        self._reading_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._delivery = Delivery(*flow, asked_bytes)

    def __enter__(self) -> Sender:
        writer = self._request.writer
        assert isinstance(writer, StreamWriter)
        writer.send_headers()
        self._node.rates.sending += 1
        self._node.traffic.begin(self._delivery)
        self._watch()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._timer is not None
        self._timer.cancel()
        rates = self._node.rates
        rates.sending -= 1
        self._node.traffic.end(self._delivery)
        if self._delivery.sent_bytes >= LEAST_BYTES:
            rate = delivery_rate(self._request.transport)
            rates.note((self._tenant, self._client), self._delivery.sent_bytes, rate)

    async def read(self, entry: Entry, start: int, end: int) -> Data | None:
        """Exactly these bytes of exactly this object, or None. A store that takes too long cuts
        the response."""
        self._reading_since_s = self._loop.time()
        span = await self._node.depot.store.get(entry.key, start, end, etag=entry.etag)
        self._reading_since_s = None
        return None if span is None or len(span.data) != end - start else span.data

    async def add(self, *parts: Data) -> None:
        """Send these as the next bytes; small ones wait for more, or for `flush`."""
        num_bytes = sum(map(len, parts))
        if self._pending_bytes + num_bytes <= self._frame_bytes:
            self._pending += parts
            self._pending_bytes += num_bytes
            return
        for part in parts:
            await self._add_cut(part)

    async def _add_cut(self, data: Data) -> None:
        """`data` beyond what a frame has room for goes into the next ones."""
        while len(data) > (room := self._frame_bytes - self._pending_bytes):
            view = memoryview(data)
            self._pending.append(view[:room])
            self._pending_bytes += room
            await self.flush()
            data = view[room:]
        self._pending.append(data)
        self._pending_bytes += len(data)

    async def flush(self) -> None:
        """One frame goes out. ConnectionError if the reader has gone or was cut."""
        parts, num_bytes = self._pending, self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        self._frame_bytes = min(2 * self._frame_bytes, self._node.frame_bytes)
        turn = self._node.egress.turn(self._tenant, self._client, num_bytes)
        async with turn:
            transport = self._request.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the reader has gone")
            transport.writelines(parts)
        self._delivery.sent_bytes += num_bytes
        self._node.stats.sent(self._tenant, num_bytes, turn.waited_s)
        if self._request.protocol.writing_paused:
            self._draining_since_s = self._loop.time()
            await self._request.writer.drain()
            self._draining_since_s = None

    def _watch(self) -> None:
        """Look again when what is waited for now would be late."""
        now_s = self._loop.time()
        settings = self._node.settings
        drain_s = _left_s(self._draining_since_s, settings.write_timeout_s, now_s)
        read_s = _left_s(self._reading_since_s, settings.store_timeout_s, now_s)
        if drain_s <= 0:
            self._node.stats.cut_readers.inc()
            self._abort()
        elif read_s <= 0 and self._task is not None:
            self._abort()
            self._task.cancel()
        wait_s = max(min(drain_s, read_s), MIN_WATCH_S)
        self._timer = self._loop.call_later(wait_s, self._watch)

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


def _left_s(since_s: float | None, timeout_s: float, now_s: float) -> float:
    return timeout_s if since_s is None else since_s + timeout_s - now_s
