"""Where a node listens: its sockets, and connections taken from them as fast as they come.

libuv's own servers take one connection in each round of the event loop. Under load a round serves
hundreds of requests: of 1,000 clients that came at once the last waited for seconds, though those
before them were answered within 0.2 s. So connections are taken here, many at a time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial

log = logging.getLogger(__name__)

BACKLOG = 1024
AT_ONCE = 256
"""Connections taken before others may run: some milliseconds."""
REST_S = 0.5
"""While the system has no file descriptor left for another connection."""
HANDSHAKE_S = 10.0
"""For TLS to be agreed on: until then a connection is not even a stranger's."""


def bind(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Listening sockets of all addresses of a host; `shared`: others may be bound beside them.
    OSError if that cannot be."""
    if not 0 <= port < 2**16:  # the system would take its lowest 16 bits
        raise OSError(errno.EINVAL, f"expected a port from 0 to {2**16 - 1}")
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            one = socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=shared)
            one.setblocking(False)
            sockets.append(one)
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


def _close_given_up(peer: socket.socket, welcoming: asyncio.Task[None]) -> None:
    """A task that is cancelled before it began closes nothing itself."""
    if welcoming.cancelled():
        peer.close()


class Acceptor:
    """Takes connections from listening sockets, which it closes in the end."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ):
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._factory = factory
        self._tls = tls
        self._welcoming: set[asyncio.Task[None]] = set()
        self._closed = False
        for one in sockets:
            self._loop.add_reader(one, self._accept, one)

    def close(self) -> None:
        """No more connections; those that are being agreed on are given up."""
        self._closed = True
        for one in self._sockets:
            self._loop.remove_reader(one)
            one.close()
        for task in self._welcoming:
            task.cancel()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                peer, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # by its other end, before it was its turn
                continue
            except OSError as error:
                log.error("no more connections for now", extra={"error": str(error)})
                self._loop.remove_reader(listener)
                self._loop.call_later(REST_S, self._go_on, listener)
                return
            peer.setblocking(False)
            task = self._loop.create_task(self._welcome(peer))
            self._welcoming.add(task)
            task.add_done_callback(self._welcoming.discard)
            task.add_done_callback(partial(_close_given_up, peer))

    def _go_on(self, listener: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listener, self._accept, listener)

    async def _welcome(self, peer: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory, peer, ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
            )  # fmt: skip
        except (OSError, TimeoutError):  # ssl.SSLError is one: who speaks no TLS is not let in
            peer.close()
