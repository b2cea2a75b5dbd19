"""Names as a client sees them: at a node over HTTP, or in a folder. See `docs/protocol.md`.

A name points to a manifest: for each model (by fingerprint) the token ids of a context and the keys
of its chunks. Several models may share a name, so a change is made against the version that was
read: whoever comes second reads again.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp

from kdn.errors import FormatError, StoreError, UnsupportedError
from kdn.protocol.limits import MAX_MANIFEST_BYTES
from kdn.store.http_answers import Answer, member

if TYPE_CHECKING:
    from kdn.node.state import Node
    from kdn.node.tenants import Tenant

DEADLINE_S = 30.0
ATTEMPTS = 8
PAGE = 1000

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Named:
    """One version of a name."""

    manifest: Manifest
    etag: str
    version: int


class Names(ABC):
    @abstractmethod
    async def get(self, name: str) -> Named | None:
        """The newest version; None if there is no such name."""

    @abstractmethod
    async def put(self, name: str, manifest: Manifest, after: str | None) -> bool:
        """Make the next version, durably. `after` is the etag that must be the newest (None: there
        must be none); False if it is not."""

    @abstractmethod
    async def delete(self, name: str, *, chunks: bool = True) -> dict[str, list[str]] | None:
        """Forget a name and the chunks only it used: which were `deleted`, `kept`, `missing`. None
        if there was none."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[str]:
        """All names that begin so, in order."""

    @abstractmethod
    async def close(self) -> None: ...

    async def change(self, name: str, update: Callable[[Manifest], Manifest]) -> None:
        """Replace a manifest ({} if there is none), whoever else does the same at that time."""
        for _ in range(ATTEMPTS):
            found = await self.get(name)
            manifest = update(found.manifest if found else {})
            if await self.put(name, manifest, found.etag if found else None):
                return
        raise StoreError(f"{name!r} is being changed by others all the time; try again")


class NodeNames(Names):
    def __init__(self, url: str, *, token: str | None = None, deadline_s: float = DEADLINE_S):
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._deadline_s = deadline_s
        self._session: aiohttp.ClientSession | None = None

    async def get(self, name: str) -> Named | None:
        answer, headers = await self._ask("GET", _path(name))
        if answer.status == 404:
            return None
        _expect(answer, 200)
        try:
            version = int(headers.get("Kdn-Version", ""))
        except ValueError as error:
            raise StoreError(f"{self._url}: expected the version of a name") from error
        return Named(_parse(answer.body), headers.get("ETag", "").strip('"'), version)

    async def put(self, name: str, manifest: Manifest, after: str | None) -> bool:
        condition = {"If-None-Match": "*"} if after is None else {"If-Match": f'"{after}"'}
        headers = {"Content-Type": "application/json", **condition}
        answer, _ = await self._ask("PUT", _path(name), _dump(manifest), headers)
        if answer.status == 412:
            return False
        _expect(answer, 200, 201)
        return True

    async def delete(self, name: str, *, chunks: bool = True) -> dict[str, list[str]] | None:
        flag = "true" if chunks else "false"
        answer, _ = await self._ask("DELETE", f"{_path(name)}?chunks={flag}")
        if answer.status == 404:
            return None
        _expect(answer, 200)
        return {kind: member(answer.json, kind, list) for kind in ("deleted", "kept", "missing")}

    async def list(self, prefix: str = "") -> AsyncIterator[str]:
        after = ""
        while True:
            query = f"prefix={quote(prefix)}&after={quote(after)}&limit={PAGE}"
            answer, _ = await self._ask("GET", f"/v1/names?{query}")
            _expect(answer, 200)
            for item in member(answer.json, "names", list):
                yield member(item, "name", str)
            following = answer.json.get("next")
            if following is None:
                return
            if not isinstance(following, str) or following <= after:
                raise StoreError(f"expected to list on after {after!r}, found {following!r}")
            after = following

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[Answer, dict[str, str]]:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._deadline_s)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        try:
            async with self._session.request(
                method, self._url + path, data=data, headers=headers, allow_redirects=False
            ) as answer:
                body = bytearray()
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > MAX_MANIFEST_BYTES:
                        raise StoreError(f"{self._url}: over {MAX_MANIFEST_BYTES} bytes")
                told = {key: answer.headers.get(key, "") for key in ("ETag", "Kdn-Version")}
                return Answer(answer.status, bytes(body)), told
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise StoreError(f"{self._url}: {method} failed: {error!r}") from error


class FolderNames(Names):
    """Of a node in this process. It belongs to its owner, who closes it."""

    def __init__(self, node: Node, tenant: Tenant) -> None:
        self._node = node
        self._tenant = tenant

    async def get(self, name: str) -> Named | None:
        reading = self._node.names.get(self._tenant.name, _checked(name))
        found = await self._node.wait(reading)
        if found is None:
            return None
        about, manifest = found
        return Named(_parse(manifest), about.etag, about.version)

    async def put(self, name: str, manifest: Manifest, after: str | None) -> bool:
        from kdn.node.answers import Refusal
        from kdn.node.names_api import put_manifest

        try:
            await self._node.wait(
                put_manifest(
                    self._node, self._tenant, _checked(name), _dump(manifest), lambda e: e == after
                )
            )
        except Refusal as refusal:
            if refusal.status == 412:
                return False
            raise StoreError(str(refusal)) from refusal
        return True

    async def delete(self, name: str, *, chunks: bool = True) -> dict[str, list[str]] | None:
        from kdn.node.answers import Refusal
        from kdn.node.names_api import delete_manifest

        try:
            return await self._node.wait(
                delete_manifest(self._node, self._tenant, _checked(name), lambda etag: True, chunks)
            )
        except Refusal as refusal:
            if refusal.status == 404:
                return None
            raise StoreError(str(refusal)) from refusal

    async def list(self, prefix: str = "") -> AsyncIterator[str]:
        after = ""
        node, tenant = self._node, self._tenant.name
        while page := await node.wait(node.names.page(tenant, prefix, after, PAGE)):
            for item in page:
                yield item.name
            after = page[-1].name

    async def close(self) -> None:
        """Nothing is its own."""


def _checked(name: str) -> str:
    from kdn.node.names_api import is_name

    if not is_name(name):
        raise UnsupportedError(
            f"expected a name of 1 to 128 letters, digits, '.', '_', '-', found {name!r}"
        )
    return name


def _path(name: str) -> str:
    return f"/v1/names/{quote(_checked(name), safe='')}"


def _dump(manifest: Manifest) -> bytes:
    data = json.dumps(manifest, separators=(",", ":")).encode()
    if len(data) > MAX_MANIFEST_BYTES:
        raise UnsupportedError(
            f"a manifest may have {MAX_MANIFEST_BYTES} bytes, this context needs {len(data)}"
        )
    return data


def _parse(data: bytes) -> Manifest:
    try:
        manifest = json.loads(data)
    except ValueError as error:
        raise FormatError(f"expected a manifest in JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise FormatError("expected a manifest: a JSON object")
    return manifest


def _expect(answer: Answer, *statuses: int) -> None:
    if answer.status not in statuses:
        raise answer.error
