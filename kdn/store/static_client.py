"""The client of one web server that serves an export: small files whole, large ones by ranges.

Every wait has a deadline, and no answer may be longer than what was asked for. No token is sent: an
export's server is not a node, and need not be somebody who is told a tenant's token.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from kdn.checked import checked_url, shown
from kdn.errors import KdnError, LimitError, RefusedError, StoreError, UnsupportedError
from kdn.store.http_answers import Reply, member
from kdn.store.node_client import HttpLimits
from kdn.store.read_connections import ReadLimits
from kdn.store.static_layout import FORMAT, MAX_ROOT_BYTES, ROOT_FILE, VERSION, chunk_path
from kdn.store.static_ranges import (
    MISSING,
    RangeConnections,
    check_coding,
    check_status,
    content_range,
)
from kdn.store.streaming import Ask, Receiver
from kdn.store.tls import explain

READ_STEP_BYTES = 1 << 20
_PATH = re.compile(r"[\x21-\x7e]*")
FORBIDDEN = 403


def is_export(url: str) -> bool:
    """A node's URL has no path; that of an export has, if only the name of its root file. A list of
    URLs is one of nodes."""
    return "," not in url and urlsplit(url).path.strip("/") != ""


@dataclass(frozen=True)
class Found:
    """Bytes [start, start + len(body)) of a file of `size_bytes`."""

    body: bytes
    start: int
    size_bytes: int
    etag: str
    """As the server says; empty if it says none that two answers can be compared by."""


class StaticClient:
    def __init__(
        self, url: str, *, limits: HttpLimits | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """`url` is the folder's, or that of the file `kdn-export.json` in it."""
        parts = urlsplit(checked_url(url))
        if parts.query or parts.fragment or not _PATH.fullmatch(parts.path):
            raise UnsupportedError(
                f"expected the URL of an export, percent-encoded, without '?', found {shown(url)}"
            )
        self.url = url.rstrip("/").removesuffix(ROOT_FILE).rstrip("/")
        self.limits = limits or HttpLimits()
        self._tls = tls
        self._headers = {"Accept-Encoding": "identity"}
        self._session: aiohttp.ClientSession | None = None
        self._ranges: RangeConnections | None = None
        self._is_export = False

    async def check(self) -> None:
        """That there is an export which we can read. Asked until it is; then no more."""
        if self._is_export:
            return
        found = await self.get(ROOT_FILE, MAX_ROOT_BYTES)
        if found is None:
            raise RefusedError(f"{self.url}: there is no export here: no file {ROOT_FILE}")
        told = Reply(200, found.body, {}).json
        if member(told, "format", str) != FORMAT or member(told, "version", int) != VERSION:
            raise RefusedError(
                f"{self.url}: expected {FORMAT!r} of version {VERSION}, found "
                f"{str(told.get('format'))[:80]!r}, {told.get('version')}"
            )
        self._is_export = True

    @property
    def _missing(self) -> tuple[int, ...]:
        """Object stores that must not be listed answer 403 for a file that is not there."""
        return (*MISSING, FORBIDDEN) if self._is_export else MISSING

    async def get(
        self, path: str, limit_bytes: int, *, start: int = 0, known: str = ""
    ) -> Found | None:
        """A file from `start` on, if that has at most `limit_bytes`; None if there is no such file.
        Where `start` is not 0, `known` is the etag of what was read before: of another version the
        whole is returned."""
        headers = {"Range": f"bytes={start}-", "If-Range": known} if start else {}
        answer = await self._ask(path, headers, limit_bytes)
        return None if answer is None else _found(self.url, *answer, start)

    async def get_if_changed(
        self, path: str, limit_bytes: int, known: str, end: int | None = None
    ) -> Found | str | None:
        """The first `end` bytes of a file; `known` itself if that is still the file's etag."""
        headers = {"If-None-Match": known} if known else {}
        if end is not None:
            headers["Range"] = f"bytes=0-{end - 1}"
        answer = await self._ask(path, headers, limit_bytes)
        if answer is not None and answer[0] == 304:
            return known
        return None if answer is None else _found(self.url, *answer, 0)

    async def size(self, path: str) -> int | None:
        """Of a file; None if there is no such file."""
        answer = await self._ask(path, {}, 0, "HEAD")
        if answer is None:
            return None
        try:
            return int(answer[1].get("content-length", ""))
        except ValueError:
            raise StoreError(f"{self.url}: expected Content-Length, found none") from None

    async def read_chunks(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        """Parts of chunks, straight from the socket."""
        if self._ranges is None:
            limits = self.limits
            self._ranges = RangeConnections(
                self.url, self._headers, self._tls,
                ReadLimits(
                    limits.connections, limits.connect_s, limits.silence_s, limits.deadline_s
                ),
            )  # fmt: skip
        try:
            await self._ranges.read_ranges(asks, receiver, _chunk_path, self._missing)
        except (OSError, TimeoutError) as error:
            raise StoreError(f"{self.url}: GET failed: {explain(error)}") from error
        except KdnError as error:
            raise type(error)(f"{self.url}: {error}") from error

    async def close(self) -> None:
        """For all who share it."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._ranges is not None:
            await self._ranges.close()
            self._ranges = None

    async def _ask(
        self, path: str, headers: Mapping[str, str], limit_bytes: int, method: str = "GET"
    ) -> tuple[int, Mapping[str, str], bytes] | None:
        """Status, headers (names in lower case) and body; None if there is no such file."""
        try:
            async with self._opened().request(
                method, f"{self.url}/{path}", headers=headers, allow_redirects=False
            ) as answer:
                told = {name.lower(): value for name, value in answer.headers.items()}
                if answer.status == FORBIDDEN and path != ROOT_FILE:
                    await self.check()  # who may read that may read all that there is
                if answer.status in self._missing:
                    return None
                if answer.status == 304 and "If-None-Match" in headers:
                    return answer.status, told, b""
                check_status(answer.status, told)
                check_coding(told)
                body = b"" if method == "HEAD" else await _read(answer, limit_bytes)
                return answer.status, told, body
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise StoreError(f"{self.url}: {method} failed: {explain(error)}") from error
        except KdnError as error:
            raise type(error)(f"{self.url}/{path}: {error}") from error

    def _opened(self) -> aiohttp.ClientSession:
        """Made at the first request: a session belongs to a running loop."""
        if self._session is None:
            limits, tls = self.limits, True if self._tls is None else self._tls
            timeout = aiohttp.ClientTimeout(
                total=limits.deadline_s, connect=limits.connect_s, sock_read=limits.silence_s
            )
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=limits.connections, ssl=tls),
                headers=self._headers, auto_decompress=False, timeout=timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
            )  # fmt: skip
        return self._session


async def _read(answer: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body, if it is not longer: its length may not be told."""
    length = answer.content_length or 0
    parts: list[bytes] = []
    size = 0
    while length <= limit_bytes:
        part = await answer.content.read(READ_STEP_BYTES)
        size += len(part)
        if not part or size > limit_bytes:
            break
        parts.append(part)
    if max(length, size) > limit_bytes:
        answer.close()
        raise LimitError(f"expected at most {limit_bytes} bytes, found {max(length, size)}")
    return b"".join(parts)


def _found(url: str, status: int, headers: Mapping[str, str], body: bytes, start: int) -> Found:
    etag = headers.get("etag", "")
    if etag.startswith("W/") or not etag.isprintable():
        etag = ""  # of one that is only alike, ranges must not be joined
    if status == 200:
        return Found(body, 0, len(body), etag)
    begin, end, size = content_range(headers)
    if begin != start or end - begin != len(body) or size is None or end > size:
        raise StoreError(f"{url}: expected bytes from {start} on, found {begin} to {end}")
    return Found(body, begin, size, etag)


def _chunk_path(ask: Ask) -> str:
    return f"/{chunk_path(ask.key, ask.etag)}"
