"""What the processes of one node say to each other: questions and answers over a Unix socket.

    u32 bytes of the JSON | u32 bytes after it | JSON | bytes

Both ends ask and answer; many questions may be on their way at once. A question that nobody waits
for any more is withdrawn. A link that is lost fails all of them, and `lost` is called: its owner
goes on without that worker, and a worker ends. Both ends are the same program and the same user's,
so only what a mistake could do is checked: that a message fits into memory.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any, cast

from kdn.background import watched
from kdn.errors import KdnError, StoreError

Fields = dict[str, Any]
Answer = tuple[Fields, bytes]
Handler = Callable[[Fields], Awaitable[Answer]]

_LENGTHS = struct.Struct("<II")
MAX_JSON_BYTES = 16 * 2**20
ASK_S = 60.0


class Link(asyncio.Protocol):
    """One end. `handlers`: what the other end may ask, by name."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        errors: tuple[type[KdnError], ...] = (),
        lost: Callable[[Link], None] = lambda link: None,
    ):
        """`errors` keep their names on the way; others arrive as StoreError."""
        self._handlers = handlers
        self._errors = {error.__name__: error for error in errors}
        self._lost = lost
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    # of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        received, at = self._received, 0
        while len(received) - at >= _LENGTHS.size:
            text_bytes, rest_bytes = _LENGTHS.unpack_from(received, at)
            begin, middle = at + _LENGTHS.size, at + _LENGTHS.size + text_bytes
            if text_bytes > MAX_JSON_BYTES:
                self.close()
                return
            if len(received) < middle + rest_bytes:
                break
            at = middle + rest_bytes
            self._arrived(json.loads(received[begin:middle]), bytes(received[middle:at]))
        del received[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(StoreError("the other process of this node has gone"))
        for task in self._answering.values():
            task.cancel()
        self._lost(self)

    # asking

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def ask(self, what: str, deadline_s: float = ASK_S, **fields: Any) -> Answer:
        """What the other end answers. StoreError if it does not in time, or fails."""
        number = next(self._numbers)
        asked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        self._send({"ask": what, "number": number, **fields})
        try:
            async with asyncio.timeout(deadline_s):
                return await asked
        except TimeoutError:
            self._send({"withdraw": number})
            raise StoreError(f"no answer to {what} within {deadline_s} s") from None
        except asyncio.CancelledError:
            self._send({"withdraw": number})
            raise
        finally:
            del self._asked[number]

    def tell(self, what: str, **fields: Any) -> None:
        """A question to which nobody waits for an answer."""
        self._send({"ask": what, "number": -1, **fields})

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # answering

    def _arrived(self, fields: Fields, rest: bytes) -> None:
        if "ask" in fields:
            number = fields.pop("number")
            task = asyncio.get_running_loop().create_task(self._answer(number, fields))
            task.add_done_callback(watched("answering another process of this node"))
            if number >= 0:
                self._answering[number] = task
                task.add_done_callback(lambda _: self._answering.pop(number, None))
        elif "withdraw" in fields:
            if fields["withdraw"] in self._answering:
                self._answering[fields["withdraw"]].cancel()
        else:
            asked = self._asked.get(fields.pop("answer"))
            if asked is not None and not asked.done():
                self._settle(asked, fields, rest)

    def _settle(self, asked: asyncio.Future[Answer], fields: Fields, rest: bytes) -> None:
        if "error" in fields:
            kind = self._errors.get(fields["error"], StoreError)
            asked.set_exception(kind(fields["message"]))
        else:
            asked.set_result((fields, rest))

    async def _answer(self, number: int, fields: Fields) -> None:
        try:
            answer, rest = await self._handlers[fields.pop("ask")](fields)
        except KdnError as error:
            answer, rest = {"error": type(error).__name__, "message": str(error)}, b""
        if number >= 0:
            self._send({"answer": number, **answer}, rest)

    def _send(self, fields: Fields, rest: bytes = b"") -> None:
        """To one that has gone: nothing. Whoever waits for its answer is told so."""
        if self._transport is None:
            number = fields.get("number")
            if number in self._asked and not self._asked[number].done():
                self._asked[number].set_exception(StoreError("the other process has gone"))
            return
        text = json.dumps(fields).encode()
        self._transport.writelines([_LENGTHS.pack(len(text), len(rest)), text, rest])
