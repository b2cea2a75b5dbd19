"""Checksums of spans, each computed once: at 1 MiB a frame that saves a fifth of serving it.

An object never changes under its key and etag, so neither does the checksum of a span of it. What
is put or deleted here is forgotten all the same: a writer may call other bytes by an old etag.
"""

from __future__ import annotations

from collections import OrderedDict

import xxhash

from kdn.store.base import Entry

MAX_OBJECTS = 1 << 13
MAX_SPANS = 32
"""Of one object: a reader asks for its levels, and there are few. All take 50 MB at the most."""
MIN_BYTES = 4096


class Checksums:
    """Those of the least recently read objects are forgotten."""

    def __init__(self, max_objects: int = MAX_OBJECTS):
        self._max_objects = max_objects
        # By key: etag, and checksums by start and length.
        self._objects: OrderedDict[bytes, tuple[bytes, dict[tuple[int, int], int]]] = OrderedDict()

    def of(self, key: bytes, etag: bytes, start: int, data: bytes | memoryview) -> int:
        """XXH3-64 of `data`, the bytes of this object from `start`."""
        if len(data) < MIN_BYTES:
            return xxhash.xxh3_64_intdigest(data)
        span = (start, len(data))
        known = self._objects.get(key)
        if known is None or known[0] != etag:
            known = self._objects[key] = (etag, {})
            if len(self._objects) > self._max_objects:
                self._objects.popitem(last=False)
        else:
            self._objects.move_to_end(key)
        spans = known[1]
        checksum = spans.get(span)
        if checksum is None:
            if len(spans) >= MAX_SPANS:
                spans.clear()
            checksum = spans[span] = xxhash.xxh3_64_intdigest(data)
        return checksum

    def forget(self, entry: Entry) -> None:
        self.forget_key(entry.key)

    def forget_key(self, key: bytes) -> None:
        self._objects.pop(key, None)
