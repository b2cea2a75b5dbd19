"""Request bodies: each has a size limit, a least rate, and a share of the memory for all of them.

Uploads and questions (JSON: lookups, reads, manifests) have a budget each, so that a question never
waits for an upload. Memory is held from the announcement on: what `Content-Length` says is what the
body takes, and whoever announces and does not send is cut within `body_window_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from io import BytesIO

from aiohttp import web

from kdn.config import NodeSettings
from kdn.node.answers import Refusal, bad_request
from kdn.node.budget import Budget
from kdn.node.shares import Shares

PARSED = 4
"""Memory of a question for each byte of it: its body, and what the handler keeps of it."""


class Pace:
    """The least rate of a body: in every window at least `window_s * min_bytes_per_s` must come, or
    the rest. A window begins where the one before was filled, so silence is cut within one."""

    def __init__(self, window_s: float, min_bytes_per_s: float, now_s: float):
        self._window_s = window_s
        self._step_bytes = max(1.0, window_s * min_bytes_per_s)
        self._missing_bytes = self._step_bytes
        self.deadline_s = now_s + window_s

    def arrived(self, num_bytes: int, now_s: float) -> bool:
        """Count what came; True if that moved the deadline."""
        self._missing_bytes -= num_bytes
        if self._missing_bytes > 0:
            return False
        self._missing_bytes = self._step_bytes
        self.deadline_s = now_s + self._window_s
        return True


class BodyReader:
    """Reads whole bodies. `caps`: every tenant, and 0 (see `Shares`)."""

    def __init__(self, settings: NodeSettings, caps: Mapping[str, int]):
        self._settings = settings
        wait_s = settings.body_window_s
        self._uploads = Budget(Shares(settings.max_bodies_bytes, caps), wait_s)
        self._questions = Budget(Shares(settings.max_questions_bytes, caps), wait_s)

    def held_bytes(self) -> tuple[int, int]:
        """Of uploads, and of questions."""
        return self._uploads.held_bytes, self._questions.held_bytes

    def upload(
        self, request: web.Request, tenant: str, max_bytes: int
    ) -> AbstractAsyncContextManager[bytes]:
        """The body, held as long as the budget counts it."""
        return self._body(request, tenant, max_bytes, self._uploads, 1)

    def question(
        self, request: web.Request, tenant: str, max_bytes: int
    ) -> AbstractAsyncContextManager[bytes]:
        """The same for JSON; hold it as long as what was parsed of it is held."""
        return self._body(request, tenant, max_bytes, self._questions, PARSED)

    @asynccontextmanager
    async def _body(
        self, request: web.Request, tenant: str, max_bytes: int, budget: Budget, cost: int
    ) -> AsyncIterator[bytes]:
        size_bytes = checked_length(request, min(max_bytes, budget.most_bytes(tenant) // cost))
        async with budget.share(tenant, cost * size_bytes):
            await invite(request)
            try:
                data = await self._receive(request, size_bytes)
            except TimeoutError:
                raise Refusal(
                    408, "timeout", "the body came too slowly", {"Connection": "close"}
                ) from None
            yield data

    async def _receive(self, request: web.Request, size_bytes: int) -> bytes:
        """Into one buffer that grows as bytes arrive and becomes the result without a copy."""
        loop, settings = asyncio.get_running_loop(), self._settings
        end_s = loop.time() + settings.body_timeout_s
        pace = Pace(settings.body_window_s, settings.min_body_bytes_per_s, loop.time())
        buffer = BytesIO()
        async with asyncio.timeout_at(min(pace.deadline_s, end_s)) as timeout:
            while part := await request.content.readany():
                buffer.write(part)
                if buffer.tell() > size_bytes:
                    break
                if pace.arrived(len(part), loop.time()):
                    timeout.reschedule(min(pace.deadline_s, end_s))
        if buffer.tell() != size_bytes:
            raise bad_request(f"expected a body of {size_bytes} bytes, found {buffer.tell()}")
        return buffer.getvalue()


def checked_length(request: web.Request, max_bytes: int) -> int:
    """The declared size, before a byte of it is read."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise bad_request("Content-Encoding is not supported")
    size_bytes = request.content_length
    if size_bytes is None:
        raise Refusal(411, "length_required", "Content-Length is needed")
    if size_bytes > max_bytes:
        raise Refusal(413, "too_large", f"expected at most {max_bytes} bytes, found {size_bytes}")
    return size_bytes


async def expect_later(request: web.Request) -> None:
    """Instead of answering `Expect: 100-continue` before anybody has looked at the request."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="")


async def invite(request: web.Request) -> None:
    """Now that the body is wanted, answer a client that waits to be asked for it."""
    if "Expect" in request.headers and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
