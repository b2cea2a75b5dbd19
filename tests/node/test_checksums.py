"""Remembered checksums are right, bounded, and forgotten."""

from __future__ import annotations

import xxhash

from kdn.node.checksums import MAX_SPANS, MIN_BYTES, Checksums
from kdn.store.base import Entry

DATA = bytes(range(256)) * 64
OTHER = DATA[::-1]


def test_computed_once_until_forgotten() -> None:
    checksums = Checksums()
    right = xxhash.xxh3_64_intdigest(DATA)
    assert checksums.of(b"k", b"e", 0, DATA) == right
    assert checksums.of(b"k", b"e", 0, OTHER) == right  # not looked at again
    assert checksums.of(b"k", b"f", 0, OTHER) == xxhash.xxh3_64_intdigest(OTHER)
    assert checksums.of(b"k", b"e", 1, OTHER) == xxhash.xxh3_64_intdigest(OTHER)
    checksums.forget(Entry(b"k", b"e", 5000))
    assert checksums.of(b"k", b"e", 0, OTHER) == xxhash.xxh3_64_intdigest(OTHER)
    checksums.forget(Entry(b"k", b"never seen", 5000))


def test_small_spans_are_not_remembered() -> None:
    checksums = Checksums()
    for data in (DATA[: MIN_BYTES - 1], OTHER[: MIN_BYTES - 1]):
        assert checksums.of(b"k", b"e", 0, data) == xxhash.xxh3_64_intdigest(data)


def test_bounds() -> None:
    checksums = Checksums(max_objects=2)
    for key in (b"a", b"b", b"a", b"c"):  # b was read longest ago
        checksums.of(key, b"e", 0, DATA)
    assert checksums.of(b"a", b"e", 0, OTHER) == xxhash.xxh3_64_intdigest(DATA)
    assert checksums.of(b"b", b"e", 0, OTHER) == xxhash.xxh3_64_intdigest(OTHER)
    for start in range(10 * MAX_SPANS):
        checksums.of(b"a", b"e", start, DATA)
    assert len(checksums._objects[b"a"][1]) <= MAX_SPANS
