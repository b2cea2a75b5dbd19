"""Names in a region: read here as long as the copy is new enough, changed at the centre alone.

What is promised (`docs/cluster.md`, tested by `bench/cluster/linearizable.py`):

- A default read is at most `max_stale_s` old, and never older than what its client has seen: the
  client tells the highest sequence it has heard of. If this region is behind, it asks the centre.
- A read of the latest asks the centre after it has come in.
- If the centre does not answer, both fail by name, unless a stale answer was asked for: that says
  how old it may be.
- A change is made by the centre, against the version that it was meant for, or fails.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

from kdn.depot.manifests import chunks_of
from kdn.depot.names import Asked, Change, FeedReport, Must, NameStore, Told, Totals, Version
from kdn.errors import CentreAwayError, ConditionError, StoreError, UnsupportedError
from kdn.region.centre_names import Answer, CentreNames
from kdn.region.following import Following
from kdn.region.names_copy import NamesCopy
from kdn.region.next_flight import NextFlight

ATTEMPTS = 16
"""To change a name that others change all the time."""

Before = Callable[[str, Iterable[bytes]], Awaitable[None]]
"""Called with a tenant and the chunks of a manifest before it is sent."""


async def _at_once(tenant: str, chunks: Iterable[bytes]) -> None:
    """Nothing has to happen before."""


class RegionNames(NameStore):
    def __init__(
        self,
        copy: NamesCopy,
        centres: Mapping[str, CentreNames],
        following: Mapping[str, Following],
        *,
        max_stale_s: float,
        timeout_s: float,
        before_put: Before = _at_once,
    ) -> None:
        """`centres` and `following`: by tenant."""
        self._copy, self._centres, self._following = copy, centres, following
        self._max_stale_s, self._timeout_s = max_stale_s, timeout_s
        self._before_put = before_put
        self._flights: NextFlight[Answer] = NextFlight()
        self._told: Counter[str] = Counter()  # by tenant: the highest sequence the centre told

    @property
    def age_s(self) -> float:
        """Of the oldest copy."""
        return max(feed.age_s for feed in self._following.values())

    @property
    def feeds(self) -> dict[str, FeedReport]:
        return {
            tenant: FeedReport(self._copy.view(tenant).position, feed.age_s)
            for tenant, feed in self._following.items()
        }

    # reads

    async def read(
        self, tenant: str, name: str, version: int | None = None, asked: Asked | None = None
    ) -> Told:
        asked = asked or Asked()
        if version is not None:
            return await self._read_old(tenant, name, version)
        if (told := self._from_copy(tenant, name, asked)) is not None:
            return told
        try:
            answer = await self._ask(tenant, name)
        except CentreAwayError:
            if asked.stale_ok:
                return self._stale(tenant, name)
            raise
        return Told(answer.about, answer.sequence)

    def _from_copy(self, tenant: str, name: str, asked: Asked) -> Told | None:
        """What is known here, if that is new enough. All in one moment, without waiting."""
        view = self._copy.view(tenant)
        if asked.latest or view.position < asked.seen:
            return None
        if self._following[tenant].age_s > self._max_stale_s:
            return None
        newest, held = view.names.get(name), view.held.get(name)
        if newest is None:
            return Told(None, view.position)
        if held is None or held.etag != newest.etag:
            return None
        return Told(held, view.position)

    def _stale(self, tenant: str, name: str) -> Told:
        """The newest whose manifest is here; CentreAwayError if nobody here knows."""
        view = self._copy.view(tenant)
        age_s = self._following[tenant].age_s
        if age_s == float("inf"):
            age_s = max(0.0, time.time() - view.heard_s)
        held = view.held.get(name)
        if held is None and (name in view.names or not view.position):
            raise CentreAwayError("the centre cannot be reached, and no copy is here")
        return Told(held, view.position, age_s)

    async def _ask(self, tenant: str, name: str) -> Answer:
        """The centre, not before now. Others who ask meanwhile share the question after this."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._flights.run((tenant, name), lambda: self._fetch(tenant, name))
        except TimeoutError:
            raise CentreAwayError(f"no answer of the centre within {self._timeout_s:g} s") from None

    async def _fetch(self, tenant: str, name: str) -> Answer:
        answer = await self._centres[tenant].read(name, self._copy.view(tenant).held.get(name))
        self._told[tenant] = max(self._told[tenant], answer.sequence)
        if answer.about is not None and answer.manifest is not None:
            await self._copy.keep(tenant, answer.about, answer.manifest, answer.sequence)
        return answer

    async def _read_old(self, tenant: str, name: str, version: int) -> Told:
        """A version by its number never changes, but it may be forgotten."""
        answer = await self._centres[tenant].read(name, None, version)
        return Told(answer.about, answer.sequence)

    async def find(self, tenant: str, name: str, version: int | None = None) -> Version | None:
        return (await self.read(tenant, name, version)).about

    async def manifest(self, tenant: str, about: Version) -> bytes | None:
        found = await self._copy.manifest(tenant, about)
        if found is None:
            answer = await self._centres[tenant].read(about.name, None, about.version)
            if answer.about is not None and answer.about.etag == about.etag:
                found = answer.manifest
        return found

    async def history(self, tenant: str, name: str) -> list[Version]:
        return await self._centres[tenant].history(name)

    async def page(self, tenant: str, prefix: str, after: str, limit: int) -> list[Version]:
        found, sequence = await self._centres[tenant].page(prefix, after, limit)
        self._told[tenant] = max(self._told[tenant], sequence)
        return found

    # changes

    async def put(
        self,
        tenant: str,
        name: str,
        manifest: bytes,
        chunks: Iterable[bytes],
        must: Must,
        most: Totals | None = None,
    ) -> Version:
        """The centre counts what a tenant has, not this region: `most` is not looked at."""
        await self._before_put(tenant, chunks)
        centre = self._centres[tenant]
        newest = self._copy.view(tenant).names.get(name)
        etag = newest.etag if newest else None  # as the feed tells: if late, the centre says so
        if not must(etag):
            etag = await self._expected(tenant, name, must)
        for _ in range(ATTEMPTS):
            written = await centre.put(name, manifest, etag)
            self._told[tenant] = max(self._told[tenant], written.sequence)
            if written.made is not None:
                await self._copy.keep(tenant, written.made, manifest, written.sequence)
                return written.made
            etag = written.newest
            if not must(etag):
                raise ConditionError(etag)
        raise StoreError(f"{name!r} is being changed by others all the time; try again")

    async def delete(self, tenant: str, name: str, must: Must) -> bool:
        return await self.remove(tenant, name, must, False) is not None

    async def remove(
        self, tenant: str, name: str, must: Must, chunks: bool
    ) -> dict[str, list[str]] | None:
        """`delete`, with the chunks that only it used if `chunks`: what became of them."""
        centre = self._centres[tenant]
        etag = await self._expected(tenant, name, must)
        for _ in range(ATTEMPTS):
            if etag is None:
                return None
            report, written = await centre.delete(name, etag, chunks)
            self._told[tenant] = max(self._told[tenant], written.sequence)
            if report is not None:
                return report
            etag = written.newest
            if not must(etag):
                raise ConditionError(etag)
        raise StoreError(f"{name!r} is being changed by others all the time; try again")

    async def _expected(self, tenant: str, name: str, must: Must) -> str | None:
        """The etag of the newest version. ConditionError if `must` does not agree."""
        about = (await self._ask(tenant, name)).about
        etag = about.etag if about else None
        if not must(etag):
            raise ConditionError(etag)
        return etag

    # what a depot asks

    async def chunks_of(self, tenant: str, name: str) -> tuple[list[bytes], list[bytes]]:
        raise UnsupportedError("a region leaves deletions to its centre")

    async def newest_chunks(self, tenant: str) -> AsyncIterator[tuple[str, list[bytes]]]:
        for name, about in list(self._copy.view(tenant).held.items()):
            if (manifest := await self._copy.manifest(tenant, about)) is not None:
                yield name, list(chunks_of(manifest))

    async def totals(self, tenant: str) -> Totals:
        """Nothing counts here: the centre knows what a tenant has."""
        return Totals(0, 0, 0)

    async def known(self, tenant: str) -> Totals:
        return Totals(len(self._copy.view(tenant).names), 0, 0)

    async def sequence(self) -> int:
        return max([await self.last_change(tenant) for tenant in self._centres])

    async def last_change(self, tenant: str) -> int:
        """No change that was made through this region, or read through it, is later."""
        return max(self._told[tenant], self._copy.view(tenant).position)

    async def changes(self, after: int, limit: int) -> list[Change]:
        raise UnsupportedError("the feed of names is the centre's: a region cannot be an upstream")

    async def close(self) -> None:
        await self._flights.close()
        await self._copy.close()
