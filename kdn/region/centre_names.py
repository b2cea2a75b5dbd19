"""Names at the centre, asked over its protocol. Every question has a deadline, and what keeps the
centre from answering is one error: CentreAwayError."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

from kdn.depot.names import Version
from kdn.errors import CentreAwayError, KdnError, NoSpaceError, RefusedError, StoreError
from kdn.protocol.limits import MAX_LISTED, MAX_MANIFEST_BYTES, MAX_REPORT_BYTES
from kdn.store.http_answers import Reply, member
from kdn.store.node_client import NodeClient

FEED_SILENCE_S = 5.0
"""A centre says something every second."""
DELETE_S = 60.0


class Answer(NamedTuple):
    """What the centre says of a name's newest version, and how far its feed is."""

    about: Version | None
    manifest: bytes | None
    """None if it is the one that was known already."""
    sequence: int


class Written(NamedTuple):
    """What became of a change: the version made, or None and the etag that is there instead."""

    made: Version | None
    newest: str | None
    sequence: int


class CentreNames:
    """One tenant's."""

    def __init__(self, client: NodeClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    async def read(self, name: str, known: Version | None, version: int | None = None) -> Answer:
        """`known`: a version whose manifest need not be sent again."""
        headers = {"Kdn-Latest": "true"}
        if known is not None:
            headers["If-None-Match"] = f'"{known.etag}"'
        query = {} if version is None else {"version": str(version)}
        reply = await self._ask(
            "GET", _path(name), headers=headers, query=query, expect=(200, 304, 404),
            limit_bytes=MAX_MANIFEST_BYTES,
        )  # fmt: skip
        sequence = sequence_of(reply)
        if reply.status == 404:
            return Answer(None, None, sequence)
        about = _about(name, reply)
        if reply.status == 304:
            if known is None or known.etag != about.etag:
                raise StoreError("the centre: expected a manifest, found none")
            return Answer(known, None, sequence)
        return Answer(about, reply.body, sequence)

    async def put(self, name: str, manifest: bytes, after: str | None) -> Written:
        """The next version, if `after` is the newest (None: if there is none)."""
        headers = {"Content-Type": "application/json", **_condition(after)}
        reply = await self._ask(
            "PUT", _path(name), manifest, headers=headers, expect=(200, 201, 412)
        )
        sequence = sequence_of(reply)
        if reply.status == 412:
            return Written(None, _etag(reply) or None, sequence)
        told = reply.json
        version, etag = member(told, "version", int), member(told, "etag", str)
        return Written(Version(name, version, etag, 0.0, len(manifest)), etag, sequence)

    async def delete(
        self, name: str, after: str, chunks: bool
    ) -> tuple[dict[str, list[str]] | None, Written]:
        """The report, if there was such a name of that etag."""
        reply = await self._ask(
            "DELETE", _path(name), headers=_condition(after), expect=(200, 404, 412),
            query={"chunks": "true" if chunks else "false"}, limit_bytes=MAX_REPORT_BYTES,
            timeout_s=DELETE_S, silence_s=DELETE_S,
        )  # fmt: skip
        newest = _etag(reply) or None if reply.status == 412 else None
        written = Written(None, newest, sequence_of(reply))
        if reply.status != 200:
            return None, written
        kinds = ("deleted", "kept", "missing")
        return {kind: member(reply.json, kind, list) for kind in kinds}, written

    async def history(self, name: str) -> list[Version]:
        reply = await self._ask("GET", f"{_path(name)}/history", expect=(200, 404))
        if reply.status == 404:
            return []
        return [_listed(name, one) for one in member(reply.json, "versions", list)]

    async def page(self, prefix: str, after: str, limit: int) -> tuple[list[Version], int]:
        """Names in order, and the sequence after they were read."""
        query = {"prefix": prefix, "after": after, "limit": str(min(limit, MAX_LISTED))}
        reply = await self._ask("GET", "/v1/names", query=query)
        told = member(reply.json, "names", list)
        return [_listed(member(one, "name", str), one) for one in told], sequence_of(reply)

    @asynccontextmanager
    async def changes(self, after: int) -> AsyncIterator[tuple[Reply, AsyncIterator[bytes]]]:
        """The feed from there on: see `docs/protocol.md`."""
        query = {"after": str(after)}
        async with self._client.endless("/v1/names/changes", query, FEED_SILENCE_S) as found:
            yield found

    async def _ask(self, *args: Any, timeout_s: float | None = None, **named: Any) -> Reply:
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                return await self._client.ask(*args, **named)
        except (RefusedError, NoSpaceError):
            raise
        except TimeoutError:
            raise CentreAwayError("the centre did not answer in time") from None
        except (KdnError, OSError) as error:
            raise CentreAwayError(f"the centre cannot be asked: {error}") from error


def sequence_of(reply: Reply) -> int:
    return _number(reply.headers, "Kdn-Sequence")


def _about(name: str, reply: Reply) -> Version:
    version = _number(reply.headers, "Kdn-Version")
    return Version(name, version, _etag(reply), 0.0, len(reply.body))


def _number(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise StoreError(f"the centre: expected the header {name}, found {text[:80]!r}")
    return int(text)


def _etag(reply: Reply) -> str:
    return reply.headers.get("ETag", "").strip('"')


def _condition(after: str | None) -> dict[str, str]:
    return {"If-None-Match": "*"} if after is None else {"If-Match": f'"{after}"'}


def _path(name: str) -> str:
    return f"/v1/names/{quote(name, safe='')}"


def _listed(name: str, told: Any) -> Version:
    version, size_bytes = (member(told, key, int) for key in ("version", "size_bytes"))
    created_s = member(told, "created_s", float)
    return Version(name, version, member(told, "etag", str), created_s, size_bytes)
