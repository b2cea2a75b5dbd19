"""Prompts by reference, for vLLM's OpenAI server: `--middleware
kdn.engines.vllm.middleware.KdnMiddleware`.

A request that names what was learned is replaced by one with those texts, token for token
(`referring.py`); all others pass as they are. vLLM puts this around its own middleware, also around
the one that checks API keys. So nothing is read or looked up before vLLM itself asks for the body:
whoever it turns away finds out nothing. Names, credentials and the model are those of the connector
in this server's engine.

A refusal takes the place of whatever vLLM answers to a request whose body never came. Headers that
vLLM's middleware adds to its answers stay.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kdn.engines.vllm.opened_references import OpenedReferences
from kdn.engines.vllm.references import Refusal

logger = logging.getLogger("vllm.kdn")

MAX_BODY_BYTES = 16 << 20
"""Of a request with names: a long conversation."""
BODY_S = 300.0
"""For a body to arrive, of which only what is within those bounds is waited for here."""
MARK = b'"kdn"'
"""A body without it is none of ours."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Open = Callable[[Any], OpenedReferences]


class KdnMiddleware:
    def __init__(self, app: App, open_for: Open = OpenedReferences) -> None:
        """`open_for`: what is asked for prompts, given the state of vLLM's application."""
        self._app, self._open_for = app, open_for
        self._opened: OpenedReferences | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._close()
        elif scope["type"] == "http" and _has_json(scope):
            await _Exchange(self, scope, receive, send).run(self._app)
        else:
            await self._app(scope, receive, send)

    async def rewritten(self, scope: Scope, body: bytes) -> bytes | None:
        """The body that vLLM is to see; None: the one that came."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            raise Refusal(400, "expected a request in JSON", "body") from None
        if not isinstance(request, dict) or request.get("kdn") is None:
            return None
        if self._opened is None:
            self._opened = self._open_for(scope["app"].state)
        referring = await self._opened.get()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        told = await referring.rewritten(path, request)
        return json.dumps(told, separators=(",", ":")).encode()

    async def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()


class _Exchange:
    """One request and its answer."""

    def __init__(
        self, middleware: KdnMiddleware, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._middleware, self._scope = middleware, scope
        self._receive, self._send = receive, send
        self._waiting: deque[Message] = deque()
        """What was read here, and vLLM is still to see."""
        self._is_read = False
        self._last = b""
        """Of a body that is too long: the end of what vLLM has seen of it."""
        self._refusal: Refusal | None = None
        self._has_begun = False
        """vLLM has answered something."""
        self._is_refused = False

    async def run(self, app: App) -> None:
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:
            if self._refusal is None or self._has_begun:
                raise
        if self._refusal is not None and not (self._has_begun or self._is_refused):
            await self._answer(self._refusal, [])

    async def receive(self) -> Message:
        try:
            if not self._is_read:
                self._is_read = True
                await self._read()
            if self._waiting:
                return self._waiting.popleft()
            message = await self._receive()
            if self._last:
                self._watch(message)
            return message
        except Refusal as refusal:
            self._refusal = refusal
        except Exception:  # ours: no request may see more of it
            logger.exception("a prompt by reference")
            self._refusal = Refusal(500, "kdn failed: its log says why")
        self._waiting.clear()  # whoever reads on must not find what was refused
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._is_refused:
            return  # the rest of what vLLM says to nothing
        if self._refusal is not None and not self._has_begun:
            await self._answer(self._refusal, list(message.get("headers", ())))
            return
        self._has_begun = True
        await self._send(message)

    async def _read(self) -> None:
        """All of the body, and hand on what it becomes."""
        body, is_whole = bytearray(), False
        try:
            async with asyncio.timeout(BODY_S):
                while not is_whole and len(body) <= MAX_BODY_BYTES:
                    message = await self._receive()
                    self._waiting.append(message)
                    if message["type"] != "http.request":
                        return
                    body += message.get("body", b"")
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            raise Refusal(408, f"the request did not arrive in {BODY_S:g} s", "body") from None
        if MARK not in body:
            self._last = b"" if is_whole else bytes(body[-len(MARK) :])
        elif len(body) > MAX_BODY_BYTES:
            raise _too_long()
        else:
            told = await self._middleware.rewritten(self._scope, bytes(body))
            if told is not None:
                self._waiting.clear()
                self._waiting.append({"type": "http.request", "body": told, "more_body": False})

    def _watch(self, message: Message) -> None:
        """A name that vLLM would pass over in silence is worse than an error."""
        seen = self._last + message.get("body", b"")
        if MARK in seen:
            raise _too_long()
        self._last = seen[-len(MARK) :] if message.get("more_body", False) else b""

    async def _answer(self, refusal: Refusal, headers: list[tuple[bytes, bytes]]) -> None:
        self._is_refused = True
        body = json.dumps(
            {"error": {"message": refusal.message, "type": _kind(refusal.status),
                       "param": refusal.param, "code": refusal.status}}
        ).encode()  # fmt: skip
        own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        kept = [one for one in headers if one[0].lower() not in dict(own)]
        await self._send(
            {"type": "http.response.start", "status": refusal.status, "headers": [*kept, *own]}
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _has_json(scope: Scope) -> bool:
    kinds = (value for name, value in scope.get("headers", ()) if name.lower() == b"content-type")
    return scope.get("method") == "POST" and any(b"json" in value.lower() for value in kinds)


def _too_long() -> Refusal:
    return Refusal(413, f'a request with "kdn" may have {MAX_BODY_BYTES} bytes', "body")


def _kind(status: int) -> str:
    if status == 404:
        return "NotFoundError"
    return "BadRequestError" if status < 500 else "InternalServerError"
