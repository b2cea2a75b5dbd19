"""Names in Redis or Valkey: every operation is one script on the server (`redis_scripts.py`), whose
state is the only truth: all nodes see the same.

A put or delete is two round trips (what is the newest; then the change, if that still is), one more
for each lost race, and those of `WAIT`; everything else is one. An update is acknowledged as the
options of the URL say (`wait`), as a chunk is.

Of a Cluster all names are on one shard, by their hash tag: they need one order. Chunks are on all.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from secrets import token_hex
from typing import Any

from kdn.credentials import Credentials
from kdn.depot import redis_scripts as scripts
from kdn.depot.names import (
    MAX_CHANGES,
    MAX_VERSIONS,
    UNCHANGED,
    Change,
    Must,
    SharedNames,
    Totals,
    Version,
    check_known,
    make_version,
)
from kdn.depot.redis_primary import RedisPrimary
from kdn.errors import ChecksumError, ConditionError, FormatError, QuotaError, StoreError
from kdn.store.tally import Usage

MAX_REMOVED = 1 << 16
REMOVED_AT_ONCE = 4096
PAGE = 1000
ATTEMPTS = 1000
"""Races that one update may lose: each is won by another."""

_FEED = ("sequence", "first", "changes")
_REMOVALS = ("removals", "kept", "removed")


class RedisNames(SharedNames):
    recount_s = 3600.0

    def __init__(
        self, url: str, credentials: Credentials, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Nothing is asked yet."""
        self._redis = RedisPrimary(url, credentials)
        self._clock = clock

    async def find(self, tenant: str, name: str, version: int | None = None) -> Version | None:
        if version is None:
            script, keys, field = _HGET, [f"{tenant}:newest"], name
        else:
            script, keys, field = _HGET, [f"{tenant}:{name}:versions"], str(version)
        found = await self._redis.read(script, keys, field)
        return None if found is None else _parse(name, found)

    async def manifest(self, tenant: str, about: Version) -> bytes | None:
        of_name = f"{tenant}:{about.name}"
        keys = [f"{of_name}:versions", f"{of_name}:manifests"]
        record, manifest = await self._redis.read(scripts.MANIFEST, keys, about.version)
        if record is None or manifest is None or _parse(about.name, record) != about:
            return None
        if make_version(about.name, about.version, about.created_s, manifest) != about:
            raise ChecksumError(f"the manifest of {about.name!r} is not what was written")
        found: bytes = manifest
        return found

    async def put(
        self,
        tenant: str,
        name: str,
        manifest: bytes,
        chunks: Iterable[bytes],
        must: Must,
        most: Totals | None = None,
    ) -> Version:
        limits = (most.names, most.size_bytes, most.chunks) if most else (-1, -1, -1)
        created_s, used = self._clock(), set(chunks)
        made: Version | None = None

        def change(newest: Version | None) -> tuple[Any, ...]:
            nonlocal made
            made = make_version(name, newest.version + 1 if newest else 1, created_s, manifest)
            return (made.version, _record(made), manifest, MAX_VERSIONS, *limits, *used)

        await self._change(scripts.PUT, tenant, name, must, change)
        assert made is not None
        return made

    async def delete(self, tenant: str, name: str, must: Must) -> bool:
        try:
            await self._change(scripts.DELETE, tenant, name, must, _existing)
        except _NoSuchNameError:
            return False
        return True

    async def _change(
        self,
        script: str,
        tenant: str,
        name: str,
        must: Must,
        change: Callable[[Version | None], tuple[Any, ...]],
    ) -> None:
        """Until the newest version is the one that was decided about."""
        of_tenant = [f"{tenant}:{one}" for one in ("order", "newest", "totals", "users")]
        of_name = [f"{tenant}:{name}:{one}" for one in ("versions", "manifests", "uses")]
        keys = [f"done:{token_hex(8)}", *_FEED, *of_tenant, *of_name]
        for _ in range(ATTEMPTS):
            newest = await self.find(tenant, name)
            more = change(newest)
            etag = newest.etag if newest else None
            if not must(etag):
                raise ConditionError(etag)
            start = time.time_ns() // 1000
            answer = await self._redis.write(
                script, keys, tenant, name, etag or "", start, MAX_CHANGES, *more
            )
            if answer.startswith(b"quota "):
                raise QuotaError(answer.decode()[6:])
            if answer != b"moved":
                return
        raise StoreError(f"{name!r} is being changed by others all the time; try again")

    async def history(self, tenant: str, name: str) -> list[Version]:
        found = await self._redis.read(_HVALS, [f"{tenant}:{name}:versions"])
        versions = [_parse(name, record) for record in found]
        return sorted(versions, key=lambda about: about.version, reverse=True)

    async def page(self, tenant: str, prefix: str, after: str, limit: int) -> list[Version]:
        least = f"({after}" if after >= prefix and after else f"[{prefix}"
        most = b"[" + prefix.encode() + b"\xff"
        keys = [f"{tenant}:order", f"{tenant}:newest"]
        found = await self._redis.read(scripts.PAGE, keys, least, most, limit)
        return [_parse(name.decode(), record) for name, record in _pairs(found)]

    async def chunks_of(self, tenant: str, name: str) -> tuple[list[bytes], list[bytes]]:
        keys = [f"{tenant}:{name}:uses", f"{tenant}:users"]
        found = sorted(_pairs(await self._redis.read(scripts.CHUNKS, keys)))
        own = [chunk for chunk, users in found if int(users) == 1]
        return own, [chunk for chunk, users in found if int(users) != 1]

    async def newest_chunks(self, tenant: str) -> AsyncIterator[tuple[str, list[bytes]]]:
        after = ""
        while page := await self.page(tenant, "", after, PAGE):
            for about in page:
                keys = [f"{tenant}:newest", f"{tenant}:{about.name}:uses"]
                record, uses = await self._redis.read(scripts.NEWEST, keys, about.name)
                if record is not None:
                    newest = _parse(about.name, record).version
                    yield about.name, [chunk for chunk, last in _pairs(uses) if int(last) == newest]
            after = page[-1].name

    async def totals(self, tenant: str) -> Totals:
        found = dict(_pairs(await self._redis.read(_HGETALL, [f"{tenant}:totals"])))
        return Totals(*(int(found.get(one, 0)) for one in (b"names", b"size_bytes", b"chunks")))

    async def sequence(self) -> int:
        found = await self._redis.read(scripts.BEGIN, _FEED[:2], time.time_ns() // 1000)
        return int(found[1])

    async def last_change(self, tenant: str) -> int:
        found = dict(_pairs(await self._redis.read(_HGETALL, [f"{tenant}:totals"])))
        return int(found.get(b"changed", UNCHANGED))

    async def changes(self, after: int, limit: int) -> list[Change]:
        found = await self._redis.read(scripts.AFTER, _FEED, after, limit)
        first, last, told = found or (0, 0, [])
        check_known(after, int(first), int(last))
        return [_parse_change(one) for one in told]

    # what nodes agree on

    async def count(self, tenant: str, more: Usage) -> Usage:
        keys = [f"done:{token_hex(8)}", f"{tenant}:totals"]
        found = await self._redis.write(
            scripts.COUNT, keys, more.objects, more.size_bytes, may_be_evicted=True
        )
        objects, size_bytes = map(int, found.split())
        return Usage(objects, size_bytes)

    async def begin_recount(self, tenant: str, every_s: float) -> bool:
        keys = [f"done:{token_hex(8)}", f"{tenant}:totals"]
        answer = await self._redis.write(
            scripts.RECOUNT, keys, repr(self._clock()), every_s, may_be_evicted=True
        )
        return answer == b"yours"

    async def remove(self, keys: Sequence[bytes]) -> None:
        for first in range(0, len(keys), REMOVED_AT_ONCE):
            some = (key.hex() for key in keys[first : first + REMOVED_AT_ONCE])
            done, start = f"done:{token_hex(8)}", time.time_ns() // 1000
            await self._redis.write(
                scripts.REMOVE, [done, *_REMOVALS], start, MAX_REMOVED, *some, may_be_evicted=True
            )

    async def removed(self, after: int) -> tuple[int, list[bytes] | None]:
        begun = await self._redis.read(scripts.BEGIN, _REMOVALS[:2], time.time_ns() // 1000)
        if not int(begun[0]) <= after <= int(begun[1]):
            return int(begun[1]), None
        found = await self._redis.read(scripts.AFTER, _REMOVALS, after, MAX_REMOVED)
        first, last, told = found or (0, 0, [])
        if not int(first) <= after <= int(last) or len(told) != int(last) - after:
            return int(last), None  # forgotten, or evicted
        return int(last), [bytes.fromhex(one.split()[1].decode()) for one in told]

    async def close(self) -> None:
        await self._redis.close()


_HGET = "return redis.call('HGET', KEYS[1], ARGV[1])"
_HVALS = "return redis.call('HVALS', KEYS[1])"
_HGETALL = "return redis.call('HGETALL', KEYS[1])"


class _NoSuchNameError(Exception):
    pass


def _existing(newest: Version | None) -> tuple[Any, ...]:
    if newest is None:
        raise _NoSuchNameError
    return ()


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _record(about: Version) -> str:
    return f"{about.version} {about.etag} {about.created_s!r} {about.size_bytes}"


def _parse(name: str, record: bytes) -> Version:
    """As `_record` wrote it."""
    try:
        version, etag, created_s, size_bytes = record.decode().split(" ")
        return Version(name, int(version), etag, float(created_s), int(size_bytes))
    except ValueError as error:
        raise FormatError(f"expected a version of {name!r}: {error}") from error


def _parse_change(told: bytes) -> Change:
    try:
        sequence, tenant, name, version, etag = told.decode().split(" ")
        return Change(int(sequence), tenant, name, int(version), None if etag == "-" else etag)
    except ValueError as error:
        raise FormatError(f"expected a change of a name: {error}") from error
