"""The names of an export, and those of several places together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kdn.checked import checked_name
from kdn.depot.depot import Report
from kdn.depot.names import Version
from kdn.errors import FormatError
from kdn.places.manifests import Manifest
from kdn.places.names import Named, Names
from kdn.protocol.limits import MAX_MANIFEST_BYTES
from kdn.store.http_answers import Reply, member
from kdn.store.static import read_only_error
from kdn.store.static_client import StaticClient
from kdn.store.static_layout import MAX_NAMES_BYTES, NAMES_FILE, name_path

MAX_FILE_BYTES = MAX_MANIFEST_BYTES + (64 << 10)


class StaticNames(Names):
    """The newest versions, as they were when they were exported. The client belongs to its owner,
    who closes it."""

    def __init__(self, client: StaticClient) -> None:
        self._client = client

    async def get(self, name: str, *, latest: bool = False, stale_ok: bool = False) -> Named | None:
        told = await self._told(name)
        if told is None:
            return None
        about = version_of(told)
        if about.name != name:
            raise FormatError(f"expected the name {name!r}, found {about.name!r}")
        return Named(member(told, "manifest", dict), about.etag, about.version)

    async def put(self, name: str, manifest: Manifest, after: str | None) -> bool:
        raise read_only_error(self._client.url)

    async def delete(self, name: str, *, chunks: bool = True) -> Report | None:
        raise read_only_error(self._client.url)

    async def history(self, name: str) -> list[Version]:
        told = await self._told(name)
        return [] if told is None else [version_of(told)]

    async def list(self, prefix: str = "") -> AsyncIterator[Version]:
        await self._client.check()
        found = await self._client.get(NAMES_FILE, MAX_NAMES_BYTES)
        told = [] if found is None else member(Reply(200, found.body, {}).json, "names", list)
        for one in told:
            about = version_of(one)
            if about.name.startswith(prefix):
                yield about

    async def _told(self, name: str) -> object:
        path = name_path(checked_name(name))
        await self._client.check()
        found = await self._client.get(path, MAX_FILE_BYTES)
        return None if found is None else Reply(200, found.body, {}).json


def version_of(told: object) -> Version:
    """As an export tells it."""
    version, size_bytes = (member(told, key, int) for key in ("version", "size_bytes"))
    return Version(
        member(told, "name", str), version, member(told, "etag", str),
        member(told, "created_s", float), size_bytes,
    )  # fmt: skip


class LayeredNames(Names):
    """Those of one place that may be changed, and below them those of others that may not."""

    def __init__(self, own: Names, below: Sequence[Names]) -> None:
        self._own, self._below = own, below

    async def get(self, name: str, *, latest: bool = False, stale_ok: bool = False) -> Named | None:
        found = await self._own.get(name, latest=latest, stale_ok=stale_ok)
        for one in self._below:
            if found is not None:
                break
            found = await one.get(name)
        return found

    async def put(self, name: str, manifest: Manifest, after: str | None) -> bool:
        """A name that is not its own yet is new to it, whatever is below."""
        if after is not None and await self._own.get(name) is None:
            after = None
        return await self._own.put(name, manifest, after)

    async def delete(self, name: str, *, chunks: bool = True) -> Report | None:
        return await self._own.delete(name, chunks=chunks)

    async def history(self, name: str) -> list[Version]:
        found = await self._own.history(name)
        for one in self._below:
            found = found or await one.history(name)
        return found

    async def list(self, prefix: str = "") -> AsyncIterator[Version]:
        every: dict[str, Version] = {}
        for names in (self._own, *self._below):
            async for about in names.list(prefix):
                every.setdefault(about.name, about)
        for name in sorted(every):
            yield every[name]
