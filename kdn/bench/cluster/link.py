"""A TCP proxy that counts bytes, and that can be cut or held: the long link of a region.

Cut, it ends all connections and takes no new ones. Held, it keeps them and passes nothing on, as a
link does on which packets are lost: what was sent meanwhile arrives when it is let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kdn.bench.listener import Listener

PIECE_BYTES = 64 << 10
CONNECT_S = 5.0


class Link:
    """Made by `to`."""

    def __init__(self, host: str, port: int, delay_s: float) -> None:
        self._target = (host, port)
        self._delay_s = delay_s
        self._listener: Listener | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.down_bytes = 0
        """From the target."""
        self.up_bytes = 0
        self.connections = 0
        """Accepted since the beginning."""

    @classmethod
    @asynccontextmanager
    async def to(
        cls, host: str, port: int, *, delay_s: float = 0.0, listen: str = "127.0.0.1"
    ) -> AsyncIterator[Link]:
        """`delay_s`: added to every piece that comes from the target."""
        link = cls(host, port, delay_s)
        link._listener = Listener(link._connected, listen)
        try:
            yield link
        finally:
            link._listener.close()
            link._flowing.set()
            link.cut()

    @property
    def port(self) -> int:
        assert self._listener is not None
        return self._listener.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        self._is_cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    def hold(self) -> None:
        self._flowing.clear()

    def mend(self) -> None:
        """Neither cut nor held any more."""
        self._is_cut = False
        self._flowing.set()

    async def _connected(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self.connections += 1
        ends = [back]
        self._writers.add(back)
        try:
            if self._is_cut:
                return
            async with asyncio.timeout(CONNECT_S):
                far, out = await asyncio.open_connection(*self._target)
            ends.append(out)
            self._writers.add(out)
            await asyncio.gather(self._carry(near, out, False), self._carry(far, back, True))
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass
        except RuntimeError:  # uvloop's word for a transport that is gone
            pass
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_down: bool
    ) -> None:
        while piece := await source.read(PIECE_BYTES):
            await self._flowing.wait()
            if is_down and self._delay_s:
                await asyncio.sleep(self._delay_s)
            if is_down:
                self.down_bytes += len(piece)
            else:
                self.up_bytes += len(piece)
            sink.write(piece)
            await sink.drain()
        with suppress(OSError):
            sink.write_eof()
