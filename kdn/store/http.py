"""The store of another node, over its protocol (`docs/protocol.md`).

Objects are read as frames, which carry checksums: what arrives damaged is a miss, counted. How a
node is asked at all is `node_client.py`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from kdn.errors import FormatError, LimitError, StoreError, UnavailableError
from kdn.protocol.frames import (
    FAILED,
    FIXED_BYTES,
    MAX_ETAG_BYTES,
    MAX_KEY_BYTES,
    OK,
    Frame,
    split,
)
from kdn.protocol.limits import (
    MAX_CHUNK_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADS_BYTES,
    MAX_OFFSET,
    MAX_PROFILE_BYTES,
    MAX_SPANS,
)
from kdn.store.base import Entry, NodeAt, Span, Stats, Store, check_entry
from kdn.store.http_answers import Reply, entry_of, join, member, told_entry
from kdn.store.node_client import Asking, NodeClient
from kdn.store.streaming import Ask, FrameReader, Receiver

_MAX_FRAME_HEAD_BYTES = FIXED_BYTES + 2 * MAX_KEY_BYTES + MAX_ETAG_BYTES
_MIN_FRAME_BYTES = 16 << 10
"""No node cuts a span finer than this on average; only used to bound the length of an answer."""


class HttpStore(Store):
    """One collection of a node. Closing it closes its client, for all who share that."""

    def __init__(
        self,
        node: NodeClient | str,
        *,
        collection: str = "objects",
        counts: Stats | None = None,
    ) -> None:
        """A URL is enough for a node that asks for no token. `counts`: where to count, if not in
        counters of its own."""
        self._node = NodeClient(node) if isinstance(node, str) else node
        self._collection = collection
        self._counts = Stats() if counts is None else counts

    # the interface

    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        key, etag = entry.key, entry.etag
        check_entry(entry, data)  # the node checks the bytes, when they have come
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
        answer = await self._node.ask(
            "PUT", self._path(key), data, headers=headers, expect=(200, 201, 412)
        )
        kept = await self._taken(key, answer) if answer.status == 412 else told_entry(answer.json)
        if kept.key != key:
            raise StoreError(f"{self._node.url}: put {key.hex()}, and {kept.key.hex()} is there")
        self._counts.puts += answer.status == 201 or (replacing is not None and kept.etag == etag)
        return kept

    async def _taken(self, key: bytes, answer: Reply) -> Entry:
        """What is there instead of what was to be replaced. Older nodes have to be asked."""
        if isinstance(answer.json, dict) and "object" in answer.json:
            return told_entry(answer.json["object"])
        [found] = await self.lookup([key])
        if found is None:
            raise answer.error(self._node.url)
        return found

    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        assert start >= 0, f"ranges count from the beginning, found {start}"
        span = await self._get(key, start, end, etag) if _askable(key, etag) else None
        self._counts.hits += span is not None
        self._counts.misses += span is None
        return span

    async def _get(
        self, key: bytes, start: int, end: int | None, etag: bytes | None
    ) -> Span | None:
        most_bytes = MAX_PROFILE_BYTES if self._collection == "profiles" else MAX_CHUNK_BYTES
        begin = min(start, MAX_OFFSET)
        wanted: dict[str, Any] = {"key": key.hex(), "start": begin}
        if end is not None:
            wanted["end"] = max(begin, min(end, MAX_OFFSET))
            most_bytes = min(most_bytes, max(0, end - start))
        if etag is not None:
            wanted["etag"] = etag.hex()
        limit_bytes = most_bytes + _heads_bytes(most_bytes)
        frames = await self._frames("/v1/read", {"spans": [wanted]}, limit_bytes)
        try:
            return join(frames, key, start, end) if frames is not None else None
        except FormatError:
            self._counts.corruptions += 1
            return None

    async def read_into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        """In one request, straight from the socket."""
        spans = [
            {"key": ask.key.hex(), "start": ask.start, "end": ask.end, "etag": ask.etag.hex()}
            for ask in asks
        ]
        question = {"collection": self._collection, "spans": spans}
        await self._node.read("/v1/read", question, FrameReader(asks, receiver))

    async def nodes_of(self, keys: Sequence[bytes]) -> Sequence[tuple[NodeAt, Sequence[int]]]:
        return [(self._node.where, range(len(keys)))]

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
            self._counts.corruptions += 1
            return {}
        return {
            frame.key: replace(entry_of(frame), head=bytes(data))
            for frame, data in frames
            if frame.status == OK
        }

    async def delete(self, key: bytes) -> bool:
        if not _askable(key):
            return False
        answer = await self._node.ask("DELETE", self._path(key), expect=(204, 404))
        return answer.status == 204

    async def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        async for entry in list_entries(self._node, self._collection, prefix):
            yield entry

    async def stats(self) -> Stats:
        """Counters of this client; objects, bytes and quota of the tenant at the node."""
        return await with_totals(self._node, self._counts)

    async def close(self) -> None:
        await self._node.close()

    # requests

    def _path(self, key: bytes) -> str:
        return f"/v1/{self._collection}/{key.hex()}"

    async def _frames(
        self, path: str, asked: dict[str, Any], limit_bytes: int
    ) -> Sequence[tuple[Frame, memoryview]] | None:
        """The answer's frames; None (and counted) if they arrived damaged."""
        body = json.dumps({"collection": self._collection, **asked}).encode()
        headers = {"Content-Type": "application/json"}
        answer = await self._node.ask("POST", path, body, headers=headers, limit_bytes=limit_bytes)
        try:
            frames = tuple(split(answer.body))
        except FormatError:
            self._counts.corruptions += 1
            return None
        if any(frame.status == FAILED for frame, _ in frames):
            raise UnavailableError(f"{self._node.url}: the node's own store failed")
        return frames


async def list_entries(node: Asking, collection: str, prefix: bytes) -> AsyncGenerator[Entry]:
    """What is listed of a collection."""
    if len(prefix) <= MAX_KEY_BYTES:
        async for told in node.list(f"/v1/{collection}", "objects", prefix.hex()):
            yield told_entry(told)


async def with_totals(node: Asking, counts: Stats) -> Stats:
    """A client's counters, with what its tenant has at the node."""
    told = (await node.ask("GET", "/v1/stats")).json
    return replace(
        counts,
        objects=member(told, "objects", int),
        size_bytes=member(told, "size_bytes", int),
        capacity_bytes=member(told, "quota_bytes", int),
    )


def _askable(key: bytes, etag: bytes | None = None) -> bool:
    """What a node cannot have, it need not be asked for."""
    return 1 <= len(key) <= MAX_KEY_BYTES and (etag is None or 1 <= len(etag) <= MAX_ETAG_BYTES)


def _heads_bytes(data_bytes: int) -> int:
    return (2 + data_bytes // _MIN_FRAME_BYTES) * _MAX_FRAME_HEAD_BYTES
