"""What is under a key of a bucket, as its first bytes say; and what was learnt so, for a while.

A remembered header saves the request that would find it again. It is never trusted alone: whoever
reads on names the version that it belongs to, so an object that changed meanwhile shows.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kdn.errors import FormatError, StoreError
from kdn.store.base import Entry
from kdn.store.disk_format import Header
from kdn.store.object_bucket import Bucket, Version
from kdn.store.object_layout import HEAD_BYTES, checked_header, needed_bytes, path_of
from kdn.store.object_requests import ChangedError

TRIES = 5
"""For an object that changes between two requests."""
MAX_REMEMBERED = 4096
MAX_REMEMBERED_SUMS = 1 << 20
"""Checksums of blocks, over all remembered headers: they take about 40 bytes each."""
MAX_DAMAGED = 4096


@dataclass(frozen=True)
class There:
    """An object in the bucket. `header` is None if it is damaged: nobody reads it, and whoever puts
    takes its place."""

    version: Version
    header: Header | None
    head: memoryview | bytes = b""
    """Its first bytes, as many as came along."""

    @property
    def entry(self) -> Entry | None:
        return self.header.entry if self.header else None


class Heads:
    """Finds headers, remembers them, and knows which objects are damaged."""

    def __init__(self, bucket: Bucket) -> None:
        self.corruptions = 0
        self._bucket = bucket
        self._known: OrderedDict[bytes, There] = OrderedDict()  # least recently used first
        self._sums = 0  # of all that are known
        self._damaged: OrderedDict[bytes, Version] = OrderedDict()

    def recall(self, key: bytes) -> There | None:
        """What was there when it was last seen."""
        there = self._known.get(key)
        if there is not None:
            self._known.move_to_end(key)
        return there

    async def find(self, key: bytes, more_bytes: int = 0) -> There | None:
        """What is there now, with its first `more_bytes` bytes or more. One request, as a rule."""
        for _ in range(TRIES):
            try:
                there = await self._read(key, more_bytes)
            except ChangedError:
                continue
            self.forget(key)
            if there is not None and there.header is not None:
                self.remember(key, there.version, there.header)
            return there
        raise StoreError(f"{self._bucket.name}: {key.hex()} changes faster than it can be read")

    async def _read(self, key: bytes, more_bytes: int) -> There | None:
        path = path_of(key)
        try:
            found = await self._bucket.get(path, 0, HEAD_BYTES + more_bytes)
        except FormatError:  # nothing in it
            return await self._empty(key)
        if found is None:
            return None
        data, size_bytes, version = found
        try:
            header_bytes = needed_bytes(bytes(data[:HEAD_BYTES]), size_bytes)
            if len(data) < min(header_bytes + more_bytes, size_bytes):
                more = await self._bucket.get(path, 0, header_bytes + more_bytes, pin=version)
                if more is None:
                    return None
                data = more.data
            header = checked_header(bytes(data[:header_bytes]), key, size_bytes)
        except FormatError:
            self.set_aside(key, version)
            return There(version, None)
        if self.is_damaged(key, version):
            return There(version, None)
        return There(version, header, data[header_bytes:])

    async def _empty(self, key: bytes) -> There | None:
        version = await self._bucket.head(path_of(key))
        if version is None:
            return None
        self.set_aside(key, version)
        return There(version, None)

    # what is known

    def remember(self, key: bytes, version: Version, header: Header) -> None:
        self.forget(key)
        self._known[key] = There(version, header)
        self._sums += len(header.block_sums)
        while len(self._known) > MAX_REMEMBERED or self._sums > MAX_REMEMBERED_SUMS:
            self.forget(next(iter(self._known)))

    def forget(self, key: bytes) -> None:
        there = self._known.pop(key, None)
        if there is not None and there.header is not None:
            self._sums -= len(there.header.block_sums)

    def set_aside(self, key: bytes, version: Version) -> None:
        """This object is damaged: count it once, and let it count as missing from now on."""
        if self._damaged.get(key) == version:
            return
        self.corruptions += 1
        self.forget(key)
        self._damaged[key] = version
        if len(self._damaged) > MAX_DAMAGED:
            self._damaged.popitem(last=False)

    def is_damaged(self, key: bytes, version: Version) -> bool:
        damaged = self._damaged.get(key)
        return damaged is not None and damaged.may_be(version)

    def replaced(self, key: bytes, version: Version, header: Header) -> None:
        """This was put: what was there before is of no account any more."""
        self._damaged.pop(key, None)
        self.remember(key, version, header)

    def deleted(self, key: bytes) -> None:
        self._damaged.pop(key, None)
        self.forget(key)
