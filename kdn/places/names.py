"""Names as a client sees them: at a node over HTTP, or in a folder. See `docs/protocol.md`.

A name points to a manifest: for each model (by fingerprint) the token ids of a context and the keys
of its chunks. Several models may share a name, so a change is made against the version that was
read: whoever comes second reads again.
"""

from __future__ import annotations

import asyncio
import json
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kdn.checked import checked_name
from kdn.depot.depot import Depot, Report
from kdn.depot.names import Version
from kdn.depot.tenants import Tenant
from kdn.errors import ConditionError, FormatError, StoreError, UnsupportedError
from kdn.places.manifests import Manifest
from kdn.protocol.limits import MAX_LISTED, MAX_MANIFEST_BYTES, MAX_REPORT_BYTES, MAX_SEEN
from kdn.store.http_answers import Reply, member
from kdn.store.node_client import Asking

SILENCE_S = 30.0
"""While a node deletes what a name used, it says nothing."""
ATTEMPTS = 16
MAX_TURN_S = 0.02
"""Those who change one name at the same time wait for a random time, longer each time."""
_REPORTED = ("deleted", "kept", "missing")


@dataclass(frozen=True)
class Named:
    """One version of a name."""

    manifest: Manifest
    etag: str
    version: int
    stale_s: float | None = None
    """A number: there may be a newer one, since so many seconds at most."""


class Names(ABC):
    @abstractmethod
    async def get(self, name: str, *, latest: bool = False, stale_ok: bool = False) -> Named | None:
        """The newest version; None if there is no such name. At a region it may be a few seconds
        old, but not older than any that this client has seen. `latest`: not older than any that was
        acknowledged before, anywhere. CentreAwayError if that cannot be known, unless `stale_ok`:
        then whatever is known, which says how old it may be."""

    @abstractmethod
    async def put(self, name: str, manifest: Manifest, after: str | None) -> bool:
        """Make the next version, durably. `after` is the etag that must be the newest (None: there
        must be none); False if it is not."""

    @abstractmethod
    async def delete(self, name: str, *, chunks: bool = True) -> Report | None:
        """Forget a name and the chunks only it used: which were `deleted`, `kept`, `missing`. None
        if there was none."""

    @abstractmethod
    async def history(self, name: str) -> list[Version]:
        """Its versions that are still there, newest first; none if there is no such name."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[Version]:
        """The newest version of each name that begins so, in order of names."""

    async def change(self, name: str, update: Callable[[Manifest], Manifest]) -> None:
        """Replace a manifest ({} if there is none), whoever else does the same at that time."""
        for attempt in range(ATTEMPTS):
            found = await self.get(name, latest=attempt > 0)
            manifest = update(found.manifest if found else {})
            if await self.put(name, manifest, found.etag if found else None):
                return
            await asyncio.sleep(random.uniform(0, MAX_TURN_S * (attempt + 1)))
        raise StoreError(f"{name!r} is being changed by others all the time; try again")


class NodeNames(Names):
    """The client belongs to its owner, who closes it."""

    def __init__(self, node: Asking, seen: int = 0) -> None:
        """`seen`: what another of these has seen, if this client now asks another region."""
        self._node = node
        self.seen = seen
        """The highest sequence that a node has told."""

    async def get(self, name: str, *, latest: bool = False, stale_ok: bool = False) -> Named | None:
        headers = {"Kdn-Seen": str(self.seen)} if self.seen else {}
        if latest:
            headers["Kdn-Latest"] = "true"
        if stale_ok:
            headers["Kdn-Stale-Ok"] = "true"
        answer = await self._node.ask(
            "GET", _path(name), headers=headers, expect=(200, 404), limit_bytes=MAX_MANIFEST_BYTES
        )
        self._saw(answer)
        if answer.status == 404:
            return None
        told = answer.headers
        try:
            version = int(told.get("Kdn-Version", ""))
            stale_s = float(told["Kdn-Stale"]) if "Kdn-Stale" in told else None
        except ValueError as error:
            raise StoreError(f"{self._node.url}: expected the version of a name") from error
        return Named(_parse(answer.body), told.get("ETag", "").strip('"'), version, stale_s)

    def _saw(self, answer: Reply) -> None:
        """Nodes before regions tell no sequence."""
        told = answer.headers.get("Kdn-Sequence", "0")
        if told.isascii() and told.isdigit() and int(told[:20]) <= MAX_SEEN:
            self.seen = max(self.seen, int(told))

    async def put(self, name: str, manifest: Manifest, after: str | None) -> bool:
        condition = {"If-None-Match": "*"} if after is None else {"If-Match": f'"{after}"'}
        headers = {"Content-Type": "application/json", **condition}
        data = _dump(manifest)
        answer = await self._node.ask(
            "PUT", _path(name), data, headers=headers, expect=(200, 201, 412)
        )
        self._saw(answer)
        return answer.status != 412 or await self._has_put(name, data, after)

    async def _has_put(self, name: str, data: bytes, after: str | None) -> bool:
        """Whether the version right after that one has these bytes. A request is repeated when its
        answer was lost, and then finds its own version there."""
        versions = {about.version: about for about in await self.history(name)}
        before = (one.version for one in versions.values() if one.etag == after)
        number = 1 if after is None else next(before, 0) + 1
        made = versions.get(number)
        if made is None or made.size_bytes != len(data) or (after and number == 1):
            return False
        answer = await self._node.ask(
            "GET", _path(name), query={"version": str(number)}, expect=(200, 404),
            limit_bytes=MAX_MANIFEST_BYTES,
        )  # fmt: skip
        return answer.status == 200 and answer.body == data

    async def delete(self, name: str, *, chunks: bool = True) -> Report | None:
        """The newest version that there is: a request that is repeated because its answer was lost
        must not delete what somebody else made meanwhile."""
        for _ in range(ATTEMPTS):
            versions = await self.history(name)
            if not versions:
                return None
            answer = await self._node.ask(
                "DELETE", _path(name), headers={"If-Match": f'"{versions[0].etag}"'},
                query={"chunks": "true" if chunks else "false"}, expect=(200, 404, 412),
                limit_bytes=MAX_REPORT_BYTES, silence_s=SILENCE_S,
            )  # fmt: skip
            self._saw(answer)
            told = answer.json if answer.status == 200 else {}
            if answer.status != 412:  # 404: it was there, and is gone
                return {k: member({k: [], **told}, k, list) for k in _REPORTED}
        raise StoreError(f"{name!r} is being changed by others all the time; try again")

    async def history(self, name: str) -> list[Version]:
        answer = await self._node.ask("GET", f"{_path(name)}/history", expect=(200, 404))
        if answer.status == 404:
            return []
        return [_version(name, told) for told in member(answer.json, "versions", list)]

    async def list(self, prefix: str = "") -> AsyncIterator[Version]:
        async for told in self._node.list("/v1/names", "names", prefix):
            yield _version(member(told, "name", str), told)


class FolderNames(Names):
    """Of a depot in this process. It belongs to its owner, who closes it."""

    def __init__(self, depot: Depot, tenant: Tenant) -> None:
        self._depot = depot
        self._tenant = tenant

    async def get(self, name: str, *, latest: bool = False, stale_ok: bool = False) -> Named | None:
        reading = self._depot.names.get(self._tenant.name, checked_name(name))
        found = await self._depot.wait(reading)
        if found is None:
            return None
        about, manifest = found
        return Named(_parse(manifest), about.etag, about.version)

    async def put(self, name: str, manifest: Manifest, after: str | None) -> bool:
        data = _dump(manifest)
        try:
            await self._depot.put_manifest(
                self._tenant, checked_name(name), data, lambda newest: newest == after
            )
        except ConditionError:
            return False
        return True

    async def delete(self, name: str, *, chunks: bool = True) -> Report | None:
        checked_name(name)
        return await self._depot.delete_manifest(self._tenant, name, lambda _: True, chunks)

    async def history(self, name: str) -> list[Version]:
        versions = self._depot.names.history(self._tenant.name, checked_name(name))
        return await self._depot.wait(versions)

    async def list(self, prefix: str = "") -> AsyncIterator[Version]:
        names, tenant, after = self._depot.names, self._tenant.name, ""
        while page := await self._depot.wait(names.page(tenant, prefix, after, MAX_LISTED)):
            for about in page:
                yield about
            after = page[-1].name


def _path(name: str) -> str:
    return f"/v1/names/{quote(checked_name(name), safe='')}"


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
    except (ValueError, RecursionError) as error:
        raise FormatError(f"expected a manifest in JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise FormatError("expected a manifest: a JSON object")
    return manifest


def _version(name: str, told: Any) -> Version:
    """As a node tells it."""
    version, size_bytes = (member(told, key, int) for key in ("version", "size_bytes"))
    return Version(
        name, version, member(told, "etag", str), member(told, "created_s", float), size_bytes
    )
