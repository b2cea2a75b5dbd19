"""One connection: aiohttp's, with bounds on how many there are and on how long one may linger.

A connection is a stranger's until its first request with a valid token, then that tenant's. Tenants
share three quarters of all places (`shares.py`); so there are always some for newcomers, who push
out the oldest stranger once all places are taken.

A peer that stops reading while its connection closes would keep the socket for ever, so closing has
a deadline, too. What the HTTP layer refuses is answered in JSON like everything else.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, cast

from aiohttp import web

from kdn.depot.tenants import Tenant
from kdn.node import short_way
from kdn.node.answers import Refusal, answer, refusal_of_http
from kdn.node.ledger import OPEN, LedgerShares
from kdn.node.shares import Shares
from kdn.node.state import Node

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 8190
MAX_HEADERS = 64
_WHOLE = re.compile(
    rb"(?:GET|HEAD|DELETE) [\x21-\x7e]+ HTTP/1\.1\r\n"
    rb"(?:(?!Content-Length|Transfer-Encoding|Upgrade|Expect|Connection: *Upgrade)"
    rb"[A-Za-z0-9-]+:[\x20-\x7e]*\r\n)*\r\n",
    re.IGNORECASE,
)
"""One head of a request without a body: whoever has read it is between two requests again."""


class Connections:
    """All open connections of a node; a factory for the event loop's server."""

    def __init__(self, node: Node, server: web.Server):
        self.node = node
        self._server = server
        self._open: dict[Connection, asyncio.Transport] = {}
        self._strangers: dict[Connection, None] = {}  # the oldest first
        self._owners: dict[Connection, str] = {}
        total = node.settings.max_connections
        caps = {tenant.name: tenant.settings.max_connections for tenant in node.tenants}
        self._ledger = node.ledger
        self._shares = Shares(total - total // 4, caps)
        if self._ledger is not None:
            self._shares = LedgerShares(self._ledger, "connections", total - total // 4, caps)
        self._closing_since_s: dict[Connection, float] = {}
        self.all_closed = asyncio.Event()
        self.all_closed.set()

    def __call__(self) -> Connection:
        settings = self.node.settings
        return Connection(
            self,
            self._server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=settings.idle_timeout_s,
            lingering_time=1.0,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
            access_log=None,
        )

    def add(self, connection: Connection, transport: asyncio.Transport) -> bool:
        """False if there are too many already, all of them tenants'."""
        if self._num_open() >= self.node.settings.max_connections:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            self._open[oldest].abort()
            self.remove(oldest)
        self._open[connection] = transport
        if self._ledger is not None:
            self._ledger.add(OPEN, 1)
        self._strangers[connection] = None
        self._show()
        self.all_closed.clear()
        return True

    def _show(self) -> None:
        if not self.node.behind_workers:
            self.node.stats.connections.set(len(self._open))

    def _num_open(self) -> int:
        """Of all workers, where there are several."""
        return len(self._open) if self._ledger is None else self._ledger.total(OPEN)

    def claim(self, connection: Connection, tenant: Tenant) -> bool:
        """Whether a connection with a request of this tenant may stay."""
        if connection not in self._strangers:
            return connection in self._owners
        if not self._shares.take(tenant.name, 1):
            return False
        del self._strangers[connection]
        self._owners[connection] = tenant.name
        return True

    def remove(self, connection: Connection) -> None:
        if self._open.pop(connection, None) and self._ledger is not None:
            self._ledger.add(OPEN, -1)
        self._strangers.pop(connection, None)
        owner = self._owners.pop(connection, None)
        if owner is not None:
            self._shares.give_back(owner, 1)
        self._closing_since_s.pop(connection, None)
        self._show()
        if not self._open:
            self.all_closed.set()

    def reap(self, now_s: float) -> None:
        """Cut connections that have been closing for too long. Called every few seconds."""
        for connection, transport in list(self._open.items()):
            if transport.is_closing():
                since_s = self._closing_since_s.setdefault(connection, now_s)
                if now_s - since_s >= self.node.settings.write_timeout_s:
                    transport.abort()

    def abort_all(self) -> None:
        for transport in list(self._open.values()):
            transport.abort()


class Connection(web.RequestHandler):
    def __init__(self, connections: Connections, server: web.Server, **options: Any):
        super().__init__(server, **options)
        self._connections = connections
        self._node = connections.node
        self._between_requests = True  # aiohttp's parser holds no part of one, and goes on
        self._answered = 0  # of those that the parser has found
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        stream = cast(asyncio.Transport, transport)  # uvloop's is one without saying so
        if not self._connections.add(self, stream):
            stream.abort()

    def data_received(self, data: bytes) -> None:
        """On the short way if nothing of another request is under way here."""
        if self._between_requests and not self._close and not self._force_close:
            if self._answered == self._request_count and short_way.answer(self._node, self, data):
                self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
                return
            self._between_requests = _WHOLE.fullmatch(data) is not None
        super().data_received(data)

    @property
    def remote(self) -> str | None:
        """The peer's address, as requests tell it."""
        name = self.peername
        return str(name[0]) if isinstance(name, tuple) else name

    def send(self, *parts: bytes | memoryview) -> None:
        """Hand over an answer, for the reader to take in its time."""
        assert self.transport is not None
        self.transport.writelines(parts)
        if self.writing_paused and self._cut is None:
            self._cut = self._loop.call_later(self._node.settings.write_timeout_s, self._cut_off)

    def resume_writing(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None
        super().resume_writing()

    def _cut_off(self) -> None:
        """The reader did not take what was sent on the short way."""
        self._cut = None
        self._node.stats.cut_readers.inc()
        if self.transport is not None:
            self.transport.abort()

    def _process_keepalive(self) -> None:
        """aiohttp forgets a connection whose time is over before its task has begun to wait."""
        super()._process_keepalive()
        if self._keepalive_handle is None and self._keepalive and not self._force_close:
            close_s = self._loop.time() + self._keepalive_timeout
            self._keepalive_handle = self._loop.call_at(close_s, self._process_keepalive)

    def claim(self, tenant: Tenant) -> bool:
        return self._connections.claim(self, tenant)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._cut is not None:
            self._cut.cancel()
        self._connections.remove(self)
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Small answers have a deadline, too, for a peer that asks and asks and never reads."""
        if isinstance(resp, web.HTTPException):
            resp = answer(refusal_of_http(resp))
        try:
            async with asyncio.timeout(self._connections.node.settings.write_timeout_s):
                resp, reset = await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self._connections.node.stats.cut_readers.inc()
            if request.transport is not None:
                request.transport.abort()
            return resp, True
        self._answered += 1
        self._between_requests &= bool(resp.keep_alive)
        return resp, reset

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What could not even be parsed as HTTP, or what escaped everything else."""
        if status >= 500 and not isinstance(exc, ConnectionError):  # readers may leave
            log.error("fault", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionResetError("a response has begun already")
        code = "bad_request" if status < 500 else "internal"
        said = "this is not HTTP/1.1 as this node understands it" if status < 500 else "a fault"
        self._node.traffic.refused(None, code)
        response = answer(Refusal(status, code, said))
        response.force_close()
        return response
