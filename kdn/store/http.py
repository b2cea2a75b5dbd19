"""The store of another node, over its protocol (`docs/protocol.md`).

Objects are read as frames, which carry checksums: what arrives damaged is a miss, counted. Every
wait has a deadline, connections are bounded, and no answer may be longer than what was asked for.
A request that a closing connection cut off is sent once more, which changes nothing but the answer
to a delete: it may say that nothing was there.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import aiohttp

from kdn.errors import (
    FormatError,
    LimitError,
    StoreError,
)
from kdn.protocol.frames import (
    FAILED,
    FIXED_BYTES,
    MAX_ETAG_BYTES,
    MAX_KEY_BYTES,
    OK,
    Frame,
    split,
)
from kdn.protocol.limits import MAX_HEAD_BYTES, MAX_HEADS_BYTES, MAX_SPANS
from kdn.store.base import Entry, Hints, Span, Stats, Store, check_put
from kdn.store.http_answers import Answer, entry_of, join, listed, member, unhex
from kdn.store.streaming import Ask, FrameSplitter, Piece

MAX_JSON_BYTES = 4 << 20
LIST_PAGE = 1000
_MAX_FRAME_HEAD_BYTES = FIXED_BYTES + 2 * MAX_KEY_BYTES + MAX_ETAG_BYTES
_MIN_FRAME_BYTES = 16 << 10
"""No node cuts a span finer than this on average; only used to bound the length of an answer."""


@dataclass(frozen=True)
class HttpLimits:
    """Seconds, connections and bytes that a node may cost."""

    connections: int = 16
    connect_s: float = 3.0
    """Including the wait for one of the connections."""
    silence_s: float = 10.0
    """Longest time without a byte."""
    deadline_s: float = 60.0
    """Of a whole request."""
    object_bytes: int = 256 << 20


class _CutError(StoreError):
    """The connection ended before the answer began."""


class HttpStore(Store):
    def __init__(
        self,
        url: str,
        *,
        collection: str = "objects",
        token: str | None = None,
        client: str | None = None,
        limits: HttpLimits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`url` is the node's, as http://127.0.0.1:8700; `token` the tenant's; `client` names this
        one for fair sharing; `tls` is needed only for certificates the system does not know."""
        self._url = url.rstrip("/")
        self._collection = collection
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        if client:
            self._headers["Kdn-Client"] = client
        self._limits = limits or HttpLimits()
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._hits = self._misses = self._puts = self._corruptions = 0

    # the interface

    async def put(
        self,
        key: bytes,
        data: bytes,
        *,
        etag: bytes,
        checksum: int,
        hints: Hints | None = None,
        replacing: bytes | None = None,
    ) -> Entry:
        entry = Entry(key, etag, len(data), hints or Hints())
        check_put(entry, data, checksum)
        for name, value in (("key", key), ("parent", entry.hints.parent or b"")):
            if len(value) > MAX_KEY_BYTES:
                raise LimitError(f"a node takes a {name} of {MAX_KEY_BYTES} bytes: {len(value)}")
        headers = {"Kdn-Checksum": f"{checksum:016x}", "Kdn-Etag": etag.hex()}
        if entry.hints.parent:
            headers["Kdn-Parent"] = entry.hints.parent.hex()
        if entry.hints.saved_s:
            headers["Kdn-Saved-Seconds"] = repr(entry.hints.saved_s)
        if replacing is not None:
            headers["If-Match"] = f'"{replacing.hex()}"'
        answer = await self._request("PUT", self._path(key), data, headers=headers)
        if answer.status == 412:
            return await self._taken(key, answer)
        if answer.status not in (200, 201):
            raise answer.error
        kept = answer.json
        kept_etag = unhex(member(kept, "etag", str))
        entry = replace(entry, etag=kept_etag, size_bytes=member(kept, "size_bytes", int))
        self._puts += answer.status == 201 or (replacing is not None and kept_etag == etag)
        if entry.etag != etag:
            [found] = await self.lookup([key])
            return found or entry
        return entry

    async def _taken(self, key: bytes, answer: Answer) -> Entry:
        """What is there instead of what was to be replaced."""
        [found] = await self.lookup([key])
        if found is None:
            raise answer.error
        return found

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        assert start >= 0, f"ranges count from the beginning, found {start}"
        span = await self._get(key, start, end, etag) if _askable(key, etag) else None
        self._hits += span is not None
        self._misses += span is None
        return span

    async def _get(
        self, key: bytes, start: int, end: int | None, etag: bytes | None
    ) -> Span | None:
        most_bytes = self._limits.object_bytes
        wanted: dict[str, Any] = {"key": key.hex(), "start": min(start, 2**62)}
        if end is not None:
            wanted["end"] = max(start, min(end, 2**62))
            most_bytes = min(most_bytes, max(0, end - start))
        if etag is not None:
            wanted["etag"] = etag.hex()
        limit_bytes = most_bytes + _heads_bytes(most_bytes)
        frames = await self._frames("/v1/read", {"spans": [wanted]}, limit_bytes)
        try:
            return join(frames, key, start, end) if frames is not None else None
        except FormatError:
            self._corruptions += 1
            return None

    async def read_spans(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece, None]:
        """See `streaming.py`: pieces as they arrive, for readers who verify them."""
        spans = [
            {"key": ask.key.hex(), "start": ask.start, "end": ask.end, "etag": ask.etag.hex()}
            for ask in asks
        ]
        body = json.dumps({"collection": self._collection, "spans": spans}).encode()
        splitter = FrameSplitter(asks)
        try:
            async with self._open().post(
                f"{self._url}/v1/read",
                data=BytesIO(body),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    raise Answer(answer.status, await answer.content.read(MAX_JSON_BYTES)).error
                async for data in answer.content.iter_any():
                    for piece in splitter.feed(data):
                        yield piece
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise StoreError(f"{self._url}: POST failed: {error!r}") from error
        splitter.finish()

    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        head = min(head_bytes, MAX_HEAD_BYTES)
        step = min(MAX_SPANS, MAX_HEADS_BYTES // max(head, 1))
        asked = [key for key in dict.fromkeys(keys) if _askable(key)]
        found: dict[bytes, Entry] = {}
        for start in range(0, len(asked), step):
            found.update(await self._lookup(asked[start : start + step], head))
        for key, entry in found.items():
            if len(entry.head) < min(head_bytes, entry.size_bytes):
                span = await self._get(key, 0, head_bytes, entry.etag)
                found[key] = replace(entry, head=bytes(span.data) if span else entry.head)
        return [found.get(key) for key in keys]

    async def _lookup(self, keys: Sequence[bytes], head_bytes: int) -> dict[bytes, Entry]:
        asked = {"keys": [key.hex() for key in keys], "head_bytes": head_bytes}
        limit_bytes = len(keys) * (head_bytes + _MAX_FRAME_HEAD_BYTES)
        frames = await self._frames("/v1/lookup", asked, limit_bytes)
        if frames is None:
            return {}
        if [(frame.number, frame.key) for frame, _ in frames] != list(enumerate(keys)):
            self._corruptions += 1
            return {}
        return {
            frame.key: replace(entry_of(frame), head=bytes(data))
            for frame, data in frames
            if frame.status == OK
        }

    async def delete(self, key: bytes) -> bool:
        if not _askable(key):
            return False
        answer = await self._request("DELETE", self._path(key))
        if answer.status not in (204, 404):
            raise answer.error
        return answer.status == 204

    async def list(self, prefix: bytes = b"") -> AsyncIterator[Entry]:
        after: str | None = ""
        while after is not None and len(prefix) <= MAX_KEY_BYTES:
            query = {"prefix": prefix.hex(), "after": after, "limit": str(LIST_PAGE)}
            page = await self._json(f"/v1/{self._collection}", query)
            for told in member(page, "objects", list):
                yield listed(told)
            following = page.get("next")
            if following is not None and not (isinstance(following, str) and following > after):
                raise StoreError(f"expected to list on after {after!r}, found {following!r}")
            after = following

    async def stats(self) -> Stats:
        """Counters of this client; objects, bytes and quota of the tenant at the node."""
        told = await self._json("/v1/stats", {})
        return Stats(
            objects=member(told, "objects", int),
            size_bytes=member(told, "size_bytes", int),
            capacity_bytes=member(told, "quota_bytes", int),
            hits=self._hits,
            misses=self._misses,
            puts=self._puts,
            corruptions=self._corruptions,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # requests

    def _path(self, key: bytes) -> str:
        return f"/v1/{self._collection}/{key.hex()}"

    async def _frames(
        self, path: str, asked: dict[str, Any], limit_bytes: int
    ) -> Sequence[tuple[Frame, memoryview]] | None:
        """The answer's frames; None (and counted) if they arrived damaged."""
        body = json.dumps({"collection": self._collection, **asked}).encode()
        headers = {"Content-Type": "application/json"}
        try:
            answer = await self._request(
                "POST", path, body, headers=headers, limit_bytes=limit_bytes
            )
        except _CutError:  # of other methods, aiohttp takes care itself
            answer = await self._request(
                "POST", path, body, headers=headers, limit_bytes=limit_bytes
            )
        if answer.status != 200:
            raise answer.error
        try:
            frames = tuple(split(answer.body))
        except FormatError:
            self._corruptions += 1
            return None
        if any(frame.status == FAILED for frame, _ in frames):
            raise StoreError(f"{self._url}: the node's own store failed")
        return frames

    async def _json(self, path: str, query: Mapping[str, str]) -> Any:
        answer = await self._request("GET", path, query=query)
        if answer.status != 200:
            raise answer.error
        return answer.json

    async def _request(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        limit_bytes: int = 0,
    ) -> Answer:
        """An answer of at most `limit_bytes` (or what JSON may take)."""
        try:
            async with self._open().request(
                method,
                self._url + path,
                data=None if data is None else BytesIO(data),
                headers=headers,
                params=query,
                allow_redirects=False,
            ) as answer:
                length, limit = answer.content_length, max(limit_bytes, MAX_JSON_BYTES)
                if length is None and answer.status != 204:
                    raise StoreError(f"{self._url}: expected Content-Length, found none")
                if (length or 0) > limit:
                    raise LimitError(f"{self._url}: expected at most {limit} bytes, found {length}")
                return Answer(answer.status, await answer.read())
        except (aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
            raise _CutError(f"{self._url}: {method} was cut off: {error!r}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise StoreError(f"{self._url}: {method} failed: {error!r}") from error

    def _open(self) -> aiohttp.ClientSession:
        """Made at the first request: a session belongs to a running loop."""
        if self._session is None:
            limits = self._limits
            connector = aiohttp.TCPConnector(
                limit=limits.connections, ssl=True if self._tls is None else self._tls
            )
            timeout = aiohttp.ClientTimeout(
                total=limits.deadline_s, connect=limits.connect_s, sock_read=limits.silence_s
            )
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=self._headers, auto_decompress=False,
                raise_for_status=False,
            )  # fmt: skip
        return self._session


def _askable(key: bytes, etag: bytes | None = None) -> bool:
    """What a node cannot have, it need not be asked for."""
    return 1 <= len(key) <= MAX_KEY_BYTES and (etag is None or 1 <= len(etag) <= MAX_ETAG_BYTES)


def _heads_bytes(data_bytes: int) -> int:
    return (2 + data_bytes // _MIN_FRAME_BYTES) * _MAX_FRAME_HEAD_BYTES
