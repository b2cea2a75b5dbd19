"""Names in a bucket: a log that all nodes append to (`object_log.py`), and a manifest an object.

What an operation costs in requests, while nobody else writes at that moment:

    put       2: the manifest, then the entry of the log that makes it the newest version
    find      1: what is the log's next entry? (mostly: there is none)
    get       2: that, and the manifest
    delete    1, and one for each manifest
    changes   1, and one for each entry that is new to this node
    history, page, totals, chunks_of: 1

Each old version that gives way is one more (deletes cost nothing in most clouds), and every 64
entries the whole state is kept: 3 requests and one for each entry that is overwritten. A node that
opens reads it: 2 requests and one for each entry since. Nothing is ever listed.

The manifest is put before the entry that names it. Whoever dies between the two leaves it behind:
nobody finds it, and nobody deletes it. Manifests are checked when they are read: the etag of a
version is a digest of it.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from secrets import token_hex

from kdn.background import watched
from kdn.depot.name_state import (
    Count,
    Delete,
    NameState,
    Put,
    Removed,
    forgotten_for,
    version_of,
)
from kdn.depot.names import Change, Must, SharedNames, Totals, Version, make_version
from kdn.depot.object_log import ObjectLog
from kdn.depot.small_objects import SmallObjects
from kdn.errors import ChecksumError, ConditionError, KdnError, QuotaError, StoreError
from kdn.protocol.limits import MAX_MANIFEST_BYTES
from kdn.store.tally import Usage

MAX_REMOVED_AT_ONCE = 8192


class ObjectNames(SharedNames):
    recount_s = 7 * 24 * 3600.0

    def __init__(self, bucket: SmallObjects, *, clock: Callable[[], float] = time.time) -> None:
        self._bucket = bucket
        self._log = ObjectLog(bucket)
        self._clock = clock
        self._cleaning: set[asyncio.Task[None]] = set()

    async def find(self, tenant: str, name: str, version: int | None = None) -> Version | None:
        record = (await self._log.refresh()).record(tenant, name)
        held = record.find(version) if record else None
        return version_of(name, held) if held else None

    async def manifest(self, tenant: str, about: Version) -> bytes | None:
        if (body := self._body(tenant, about)) is None:
            await self._log.refresh()
            body = self._body(tenant, about)
        if body is None:
            return None
        found = await self._bucket.get(self._log.path("bodies", body), MAX_MANIFEST_BYTES)
        if found is not None:
            if make_version(about.name, about.version, about.created_s, found) != about:
                raise ChecksumError(f"the manifest of {about.name!r} is not what was written")
            return found
        await self._log.refresh()
        if self._body(tenant, about) is not None:
            raise StoreError(f"the manifest of {about.name!r} is missing in the bucket")
        return None

    def _body(self, tenant: str, about: Version) -> str | None:
        record = self._log.state.record(tenant, about.name)
        held = record.find(about.version) if record else None
        return held.body if held and held.etag == about.etag else None

    async def put(
        self,
        tenant: str,
        name: str,
        manifest: bytes,
        chunks: Iterable[bytes],
        must: Must,
        most: Totals | None = None,
    ) -> Version:
        created_s, used, body = self._clock(), tuple(set(chunks)), token_hex(16)

        def decide(state: NameState) -> Put:
            newest = state.newest(tenant, name)
            if not must(newest.etag if newest else None):
                raise ConditionError(newest.etag if newest else None)
            version = newest.version + 1 if newest else 1
            made = make_version(name, version, created_s, manifest)
            forget = forgotten_for(state.tenant(tenant), made, used, most)
            values = (made.version, made.etag, created_s, made.size_bytes)
            return Put(tenant, name, *values, body, used, forget)

        await self._log.begin()
        await self._allowed(decide)
        await self._bucket.put(self._log.path("bodies", body), manifest)
        try:
            happened, gone = await self._log.commit(decide)
        except (ConditionError, QuotaError):  # after any other error it may yet happen
            self._clean([body])
            raise
        self._clean(gone)
        return make_version(name, happened.version, created_s, manifest)

    async def _allowed(self, decide: Callable[[NameState], Put]) -> None:
        """So that what is refused is not even put, in most cases."""
        try:
            decide(self._log.state)
        except KdnError:
            decide(await self._log.refresh())

    async def delete(self, tenant: str, name: str, must: Must) -> bool:
        def decide(state: NameState) -> Delete:
            newest = state.newest(tenant, name)
            if newest is None:
                raise _NoSuchNameError
            if not must(newest.etag):
                raise ConditionError(newest.etag)
            return Delete(tenant, name, newest.version)

        if (await self._log.refresh()).newest(tenant, name) is None:
            return False
        try:
            _, gone = await self._log.commit(decide)
        except _NoSuchNameError:
            return False
        await self._log.delete_bodies(gone)  # when this returns, the texts are gone
        return True

    async def history(self, tenant: str, name: str) -> list[Version]:
        record = (await self._log.refresh()).record(tenant, name)
        return [version_of(name, held) for held in reversed(record.versions if record else [])]

    async def page(self, tenant: str, prefix: str, after: str, limit: int) -> list[Version]:
        state = await self._log.refresh()
        own = state.tenant(tenant)
        at = max(bisect_right(own.order, after), bisect_left(own.order, prefix))
        found = []
        for name in own.order[at : at + limit]:
            if not name.startswith(prefix):
                break
            found.append(version_of(name, own.names[name].versions[-1]))
        return found

    async def chunks_of(self, tenant: str, name: str) -> tuple[list[bytes], list[bytes]]:
        own = (await self._log.refresh()).tenant(tenant)
        record = own.names.get(name)
        used = sorted(record.uses) if record else []
        shared = {chunk for chunk in used if own.users[chunk] > 1}
        return [c for c in used if c not in shared], [c for c in used if c in shared]

    async def newest_chunks(self, tenant: str) -> AsyncIterator[tuple[str, list[bytes]]]:
        own = (await self._log.refresh()).tenant(tenant)
        for name in list(own.order):
            if record := own.names.get(name):
                newest = record.versions[-1].version
                yield name, [chunk for chunk, last in record.uses.items() if last == newest]

    async def totals(self, tenant: str) -> Totals:
        return (await self._log.refresh()).tenant(tenant).totals

    async def sequence(self) -> int:
        state = await self._log.refresh()
        return (state if self._log.is_begun else await self._log.begin()).sequence

    async def last_change(self, tenant: str) -> int:
        return (await self._log.refresh()).tenant(tenant).changed

    async def changes(self, after: int, limit: int) -> list[Change]:
        return (await self._log.refresh()).changes_after(after, limit)

    # what nodes agree on

    async def count(self, tenant: str, more: Usage) -> Usage:
        if more.objects or more.size_bytes:
            happening = Count(tenant, more.objects, more.size_bytes)
            await self._log.commit(lambda state: happening)
            own = self._log.state.tenant(tenant)
        else:
            own = (await self._log.refresh()).tenant(tenant)
        return Usage(own.num_objects, own.objects_bytes + own.size_bytes)

    async def begin_recount(self, tenant: str, every_s: float) -> bool:
        now_s = self._clock()

        def decide(state: NameState) -> Count:
            if now_s - state.tenant(tenant).recounted_s < every_s:
                raise _NotYetError
            return Count(tenant, 0, 0, now_s)

        try:
            await self._log.commit(decide)
        except _NotYetError:
            return False
        return True

    async def remove(self, keys: Sequence[bytes]) -> None:
        for first in range(0, len(keys), MAX_REMOVED_AT_ONCE):
            some = Removed(tuple(keys[first : first + MAX_REMOVED_AT_ONCE]))
            await self._log.commit(lambda state, some=some: some)  # type: ignore[misc]

    async def removed(self, after: int) -> tuple[int, list[bytes] | None]:
        state = await self._log.refresh()
        return state.sequence, state.removed_after(after)

    def _clean(self, bodies: Sequence[str]) -> None:
        """Nobody waits for it; what is left behind is only not deleted."""
        if bodies:
            task = asyncio.create_task(self._log.delete_bodies(bodies))
            self._cleaning.add(task)
            task.add_done_callback(self._cleaning.discard)
            task.add_done_callback(watched("deleting manifests", StoreError))

    async def close(self) -> None:
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=10.0)
        await self._log.close()
        await self._bucket.close()


class _NoSuchNameError(KdnError):
    pass


class _NotYetError(KdnError):
    pass
