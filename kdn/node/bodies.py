"""Request bodies: each has a size limit and a deadline, and all together a bound on memory."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from kdn.node.answers import RETRY_AFTER, Refusal, bad_request

MAX_WAITING = 1024


class Budget:
    """A number of bytes that requests share; first come, first served."""

    def __init__(self, total_bytes: int, wait_s: float):
        self._free_bytes = total_bytes
        self._wait_s = wait_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def share(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold `size_bytes` of it; 503 if none come free in time."""
        await self._take(size_bytes)
        try:
            yield
        finally:
            self._free_bytes += size_bytes
            self._wake()

    async def _take(self, size_bytes: int) -> None:
        if not self._waiting and size_bytes <= self._free_bytes:
            self._free_bytes -= size_bytes
            return
        if len(self._waiting) >= MAX_WAITING:
            raise _overloaded()
        place = (size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._wait_s):
                await place[1]
        except BaseException as error:
            if place in self._waiting:
                self._waiting.remove(place)
            elif place[1].done() and not place[1].cancelled():
                self._free_bytes += size_bytes
            self._wake()
            if isinstance(error, TimeoutError):
                raise _overloaded() from None
            raise

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free_bytes:
            size_bytes, granted = self._waiting.popleft()
            if not granted.done():
                self._free_bytes -= size_bytes
                granted.set_result(None)


def _overloaded() -> Refusal:
    return Refusal(503, "overloaded", "too many bodies are being received", RETRY_AFTER)


class BodyReader:
    """Reads whole bodies. `min_bytes_per_s` gives a large body more time than a small one."""

    def __init__(self, budget_bytes: int, timeout_s: float, min_bytes_per_s: int):
        self._budget = Budget(budget_bytes, timeout_s)
        self._budget_bytes = budget_bytes
        self._timeout_s = timeout_s
        self._min_bytes_per_s = max(1, min_bytes_per_s)

    @asynccontextmanager
    async def body(self, request: web.Request, max_bytes: int) -> AsyncIterator[bytes]:
        """The body, held as long as the budget counts it."""
        size_bytes = checked_length(request, min(max_bytes, self._budget_bytes))
        async with self._budget.share(size_bytes):
            await _invite(request)
            try:
                async with asyncio.timeout(self._timeout_s + size_bytes / self._min_bytes_per_s):
                    data = await _read_exactly(request, size_bytes)
            except TimeoutError:
                raise Refusal(
                    408, "timeout", "the body came too slowly", {"Connection": "close"}
                ) from None
            yield data

    async def json_object(self, request: web.Request, max_bytes: int) -> dict[str, Any]:
        async with self.body(request, max_bytes) as data:
            return parse_object(data)


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


async def _invite(request: web.Request) -> None:
    """Now that the body is wanted, answer a client that waits to be asked for it."""
    if "Expect" in request.headers and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _read_exactly(request: web.Request, size_bytes: int) -> bytes:
    parts = []
    received = 0
    while part := await request.content.readany():
        received += len(part)
        if received > size_bytes:
            break
        parts.append(part)
    if received != size_bytes:
        raise bad_request(f"expected a body of {size_bytes} bytes, found {received}")
    return b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object, strictly: no NaN, no repeated members, not too deep."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise bad_request("expected a JSON object")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a member comes twice")
    return value
