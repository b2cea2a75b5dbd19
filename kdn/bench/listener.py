"""Accepts TCP connections until it is closed, at any moment.

asyncio's own server fails an assertion in Python 3.11 when it is closed while it accepts a
connection, and leaves that socket open. Links that are cut on purpose meet that moment often.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Made on the event loop that it works on. `serve` ends its connection before it returns."""

    def __init__(self, serve: Serve, host: str, port: int = 0) -> None:
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._socket = socket.create_server((host, port))
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Nobody listens any more. Connections stay."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # whoever wanted it is gone again
            return
        task = self._loop.create_task(self._begin(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: connection.close())  # also if it never began

    async def _begin(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=connection)
        except OSError:
            return
        await self._serve(reader, writer)
