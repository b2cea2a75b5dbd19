"""A long link between two servers: of one rate and one delay, counted, and cut at will.

On an event loop in a thread of its own. Bytes towards the reader are shaped, as with
`link_proxy.py`; every byte in either direction is late by the delay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kdn.bench.link_proxy import LinkPace
from kdn.bench.listener import Listener
from kdn.bench.servers import free_port
from kdn.session.loop import LoopThread

START_S = 5.0
PIECE_BYTES = 64 << 10
MAX_PIECES = 64
"""That are under way on one connection, in one direction: 4 MiB."""

Address = tuple[str, int]


class LongLink:
    """Listens at `url` and passes on to a server."""

    def __init__(self, server: Address, bits_per_s: float | None, delay_s: float) -> None:
        self._server, self._delay_s = server, delay_s
        self._pace = LinkPace(bits_per_s)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.down_bytes = 0
        """That have come from the server."""
        self.up_bytes = 0
        self._is_cut = False
        self._talks: set[asyncio.Task[None]] = set()
        self._loop = LoopThread()
        self._loop.run(self._listen(), START_S)

    def cut(self) -> None:
        """All connections, and new ones, until `restore`."""
        self._loop.run(self._cut(), START_S)

    def restore(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._loop.run(self._end(), START_S)
        self._loop.close(START_S)

    async def _listen(self) -> None:
        self._listener = Listener(self._accept, "127.0.0.1", self.port)

    async def _end(self) -> None:
        self._listener.close()

    async def _cut(self) -> None:
        self._is_cut = True
        for task in list(self._talks):
            task.cancel()
        if self._talks:
            await asyncio.wait(self._talks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):
                if not self._is_cut:
                    await self._talk(reader, writer)
        finally:
            self._talks.discard(task)
            writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, asks = await asyncio.open_connection(*self._server)
        ways = [
            asyncio.ensure_future(self._pass(reader, asks, is_down=False)),
            asyncio.ensure_future(self._pass(server, writer, is_down=True)),
        ]
        try:
            await asyncio.gather(*ways)
        finally:
            for way in ways:
                way.cancel()
            asks.transport.abort()

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_down: bool
    ) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_PIECES)
        taking = asyncio.ensure_future(self._take(source, pieces, is_down))
        try:
            while True:
                due_s, piece = await pieces.get()
                await asyncio.sleep(due_s - time.monotonic())
                if not piece:
                    sink.write_eof()
                    return
                sink.write(piece)
                await sink.drain()
                if is_down:
                    self.down_bytes += len(piece)
                else:
                    self.up_bytes += len(piece)
        finally:
            taking.cancel()

    async def _take(
        self, source: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]], shaped: bool
    ) -> None:
        while True:
            piece = await source.read(PIECE_BYTES)
            wait_s = self._pace.wait_s(len(piece)) if shaped and piece else 0.0
            await pieces.put((time.monotonic() + wait_s + self._delay_s, piece))
            if not piece:
                return


@contextmanager
def long_link(server: Address, bits_per_s: float | None, delay_s: float) -> Iterator[LongLink]:
    link = LongLink(server, bits_per_s, delay_s)
    try:
        yield link
    finally:
        link.close()
