"""The client of one node (`docs/protocol.md`): whatever asks a node asks it through this.

It is the one place where a token meets a header and a certificate is judged. All who share a client
share its connections, which are bounded. Every wait has a deadline, no answer may be longer than
what was asked for, and what a node refuses becomes a named error. A request that a closing
connection cut off is sent once more, which changes nothing but the answer to a delete: it may say
that nothing was there.
"""

from __future__ import annotations

import json
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from kdn.checked import checked_url
from kdn.defaults import RESOLVE_S
from kdn.errors import LimitError, StoreError, UnavailableError
from kdn.protocol.limits import MAX_JSON_BYTES, MAX_LISTED, SLOWEST_BYTES_S
from kdn.store.base import NodeAt
from kdn.store.http_answers import Reply, member
from kdn.store.read_connections import ReadConnections, ReadLimits
from kdn.store.streaming import FrameReader
from kdn.store.tls import explain
from kdn.tracing import outgoing

PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class HttpLimits:
    """Seconds, connections and bytes that a node may cost."""

    connections: int = 32
    """For batch reads, and as many for all else."""
    connect_s: float = 3.0
    """Including the wait for one of the connections."""
    silence_s: float = 10.0
    """Longest time without a byte."""
    deadline_s: float = 60.0
    """Of a whole request; one with a long body has longer (`SLOWEST_BYTES_S`)."""
    hedge_s: float = 0.25
    """Of several nodes: after such a silence another one is asked, too (`failover.py`)."""
    resolve_s: float = RESOLVE_S
    """How long the addresses of a name are taken to be the same (`members.py`)."""


MAX_LINE_BYTES = 64 << 10
"""Of an answer that goes on and on."""


class _CutError(UnavailableError):
    """The connection ended before the answer began."""


class _Body(aiohttp.Payload):
    """Bytes that are sent piece by piece, so that other requests get their turns. aiohttp's own
    payloads copy all of them first, or write them at once."""

    _autoclose = True  # there is nothing to close

    def __init__(self, data: bytes) -> None:
        super().__init__(data, content_type="application/octet-stream")
        self._size = len(data)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise NotImplementedError("these are no text")

    async def write(self, writer: Any) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        view = memoryview(self._value)[:content_length]
        for first in range(0, len(view), PIECE_BYTES):
            await writer.write(view[first : first + PIECE_BYTES])


class Asking(ABC):
    """Whoever can be asked what a node is asked: one node, or several that answer alike."""

    url: str

    @abstractmethod
    async def ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        expect: tuple[int, ...] = (200,),
        limit_bytes: int = 0,
        silence_s: float | None = None,
    ) -> Reply:
        """An answer of at most `limit_bytes` (or what JSON may take) with a status that is
        expected; any other is raised as the error that it means. `silence_s`: for a request that
        takes a node longer than most."""

    async def list(self, path: str, kind: str, prefix: str) -> AsyncIterator[Any]:
        """Everything in a list (member `kind` of its pages) that begins with `prefix`."""
        after: str | None = ""
        while after is not None:
            query = {"prefix": prefix, "after": after, "limit": str(MAX_LISTED)}
            page = (await self.ask("GET", path, query=query)).json
            for item in member(page, kind, list):
                yield item
            following = page.get("next")
            if following is not None and not (isinstance(following, str) and following > after):
                raise StoreError(f"expected to list on after {after!r}, found {following!r}")
            after = following

    @abstractmethod
    async def close(self) -> None:
        """For all who share it."""


class NodeClient(Asking):
    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        client: str | None = None,
        limits: HttpLimits | None = None,
        tls: ssl.SSLContext | None = None,
        address: str | None = None,
    ) -> None:
        """`url` is the node's, as http://127.0.0.1:8700; `token` the tenant's; `client` names this
        one for fair sharing; `tls` is needed only for certificates the system does not know.
        `address`: of those that the URL's name has, the only one to use; the name is still what
        the node is told, and what its certificate must be for."""
        self.url = checked_url(url).rstrip("/")
        self.limits = limits or HttpLimits()
        self._tls = tls
        self._address = address
        self._shown = self.url if address is None else f"{self.url} at {address}"
        self._headers = {"Accept-Encoding": "identity"}  # a proxy must not compress what we count
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        if client:
            self._headers["Kdn-Client"] = client
        self._session: aiohttp.ClientSession | None = None
        self._reads: ReadConnections | None = None

    @property
    def where(self) -> NodeAt:
        return NodeAt(self.url, self._address)

    async def ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        expect: tuple[int, ...] = (200,),
        limit_bytes: int = 0,
        silence_s: float | None = None,
    ) -> Reply:
        asked = (method, path, data, headers, query, silence_s)
        limit_bytes = max(limit_bytes, MAX_JSON_BYTES)
        try:
            reply = await self._ask(limit_bytes, *asked)
        except _CutError:
            if method != "POST":  # of other methods, aiohttp takes care itself
                raise
            reply = await self._ask(limit_bytes, *asked)
        if reply.status not in expect:
            raise reply.error(self._shown)
        return reply

    async def _ask(self, limit_bytes: int, *asked: Any) -> Reply:
        async with self._sent(*asked) as answer:
            length = answer.content_length
            if length is None and answer.status not in (204, 304):
                raise UnavailableError(f"{self._shown}: expected Content-Length, found none")
            if (length or 0) > limit_bytes:
                raise LimitError(
                    f"{self._shown}: expected at most {limit_bytes} bytes, found {length}"
                )
            return Reply(answer.status, await answer.read(), answer.headers)

    async def read(self, path: str, question: Any, reader: FrameReader) -> None:
        """The frames that answer a question in JSON, each as it arrives."""
        if self._reads is None:
            limits = self.limits
            self._reads = ReadConnections(
                self.url, self._headers, self._tls,
                ReadLimits(
                    limits.connections, limits.connect_s, limits.silence_s, limits.deadline_s
                ),
                self._address,
            )  # fmt: skip
        try:
            await self._reads.read(path, json.dumps(question).encode(), reader)
        except (OSError, TimeoutError) as error:
            raise UnavailableError(f"{self._shown}: POST failed: {explain(error)}") from error

    @asynccontextmanager
    async def endless(
        self, path: str, query: Mapping[str, str], silence_s: float
    ) -> AsyncIterator[tuple[Reply, AsyncIterator[bytes]]]:
        """An answer that goes on and on, as lines; of any status but 200, the whole answer. It is
        given up when nothing comes for `silence_s`."""
        timeout = aiohttp.ClientTimeout(
            total=None, connect=self.limits.connect_s, sock_read=silence_s
        )
        try:
            async with self._opened().get(
                self.url + path, params=query, allow_redirects=False, timeout=timeout
            ) as answer:
                body = b"" if answer.status == 200 else await answer.content.read(MAX_JSON_BYTES)
                yield Reply(answer.status, body, answer.headers), _lines(answer.content)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{self._shown}: GET failed: {explain(error)}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._reads is not None:
            await self._reads.close()
            self._reads = None

    @asynccontextmanager
    async def _sent(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        silence_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, when its head has come."""
        try:
            async with self._opened().request(
                method,
                self.url + path,
                data=None if data is None else _Body(data),
                headers={**outgoing(), **(headers or {})},
                params=query,
                allow_redirects=False,
                timeout=self._timeout(silence_s, len(data or b"")),
            ) as answer:
                yield answer
        except (aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
            raise _CutError(f"{self._shown}: {method} was cut off: {explain(error)}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{self._shown}: {method} failed: {explain(error)}") from error

    def _timeout(self, silence_s: float | None, num_bytes: int) -> aiohttp.ClientTimeout:
        limits = self.limits
        return aiohttp.ClientTimeout(
            total=limits.deadline_s + num_bytes / SLOWEST_BYTES_S, connect=limits.connect_s,
            sock_read=max(limits.silence_s, silence_s or 0.0),
        )  # fmt: skip

    def _opened(self) -> aiohttp.ClientSession:
        """Made at the first request: a session belongs to a running loop."""
        if self._session is None:
            tls = True if self._tls is None else self._tls
            fixed = None if self._address is None else _Fixed(self._address)
            connector = aiohttp.TCPConnector(
                limit=self.limits.connections, ssl=tls, resolver=fixed
            )  # fmt: skip
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, auto_decompress=False,
                raise_for_status=False,
            )  # fmt: skip
        return self._session


class _Fixed(AbstractResolver):
    """Every name has one address."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        own = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        return [
            ResolveResult(
                hostname=host, host=self._address, port=port, family=own, proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]  # fmt: skip

    async def close(self) -> None:
        pass


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Each as it comes; StoreError if one does not end. What is cut off is left out."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            raise StoreError(f"expected lines of at most {MAX_LINE_BYTES} bytes")
