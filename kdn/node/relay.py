"""A worker hands requests on to its owner, as they came, and the answer back.

The worker has checked whose a request is, whether it may ask that and how often; it counts and logs
it. The owner checks the token again, and everything about what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web

from kdn.config import NodeSettings
from kdn.node.answers import RETRY_AFTER, Refusal
from kdn.node.bodies import invite
from kdn.node.state import NODE, TENANT
from kdn.tracing import REQUEST_HEADER, TRACE_HEADER, outgoing

MAX_ANSWER_BYTES = 32 * 2**20
"""What is handed back in one piece; longer answers, and those without an end, pass bit by bit."""
CONNECT_S = 5.0
_OWN = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
_OWN |= {REQUEST_HEADER.lower(), TRACE_HEADER.lower()}
"""Fields of the connection they came on, which is not the one they go on with; and whom the request
is a part of, which the worker tells in its own words."""
_MADE = {"date", "server", "connection", "keep-alive", "transfer-encoding"}
"""Fields of answers that each process makes itself."""


class Relay:
    """The way to the owner, whose HTTP is at a Unix socket."""

    def __init__(self, path: Path, settings: NodeSettings):
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(
                str(path), limit=max(1, settings.max_connections // settings.workers)
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=settings.body_window_s, sock_connect=CONNECT_S,
                sock_read=settings.body_timeout_s + 2 * settings.store_timeout_s,
            ),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )  # fmt: skip

    async def close(self) -> None:
        await self._session.close()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        """A handler of any route."""
        headers = [item for item in request.headers.items() if item[0].lower() not in _OWN]
        headers += outgoing().items()
        has_body = request.body_exists
        try:
            async with self._session.request(
                request.method, f"http://owner{request.raw_path}", headers=headers,
                data=_body(request) if has_body else None, allow_redirects=False,
                expect100=has_body and "Expect" in request.headers,
            ) as answer:  # fmt: skip
                return await self._hand_back(request, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the client has gone") from error
            raise Refusal(
                503, "overloaded", "this node's owner does not answer", RETRY_AFTER
            ) from error

    async def _hand_back(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        node = request.app[NODE]
        headers = [item for item in answer.headers.items() if item[0].lower() not in _MADE]
        size_bytes = answer.content_length
        response: web.StreamResponse
        if size_bytes is not None and size_bytes <= MAX_ANSWER_BYTES:
            async with node.answers.share(request[TENANT].name, size_bytes):
                body = await answer.read()
            response = web.Response(status=answer.status, headers=headers, body=body)
        else:
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                async with asyncio.timeout(node.settings.write_timeout_s):
                    await response.write(part)
                if node.stopping and size_bytes is None:
                    break  # it has no end: the owner would go on after this worker
        unread = request.body_exists and not request.content.is_eof()
        if unread or answer.headers.get("Connection", "").lower() == "close":
            response.force_close()
        return response


async def _body(request: web.Request) -> AsyncIterator[bytes]:
    """As it comes. Whoever waits to be asked for it is asked once the owner wants it."""
    await invite(request)
    while part := await request.content.readany():
        yield part
