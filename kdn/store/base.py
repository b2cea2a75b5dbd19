"""What every store does. A store sees keys and bytes only: no torch, no codec.

The first writer of a key wins, and every later put of that key is answered with what is there. Only
a put that names the object it takes the place of replaces it: for bytes that turned out to be
useless. Its `etag` (of a chunk: the stream id) tells two writers' bytes apart, so a reader that
reads one object in several ranges names the etag it began with and never joins bytes of two.

A miss is None. A wrong byte is never returned: what fails its checksum is a miss, counted, and set
aside. Errors are for what the caller must know: no space, no permission, a store that is gone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kdn.errors import ChecksumError, LimitError
from kdn.protocol.frames import MAX_ETAG_BYTES
from kdn.store.costs import Costs
from kdn.store.streaming import Ask, Piece, Receiver, hand_over
from kdn.store.tally import OWNER_BYTES, Usage, Watcher

MAX_KEY_BYTES = 64
"""More than travels: a node puts something before the keys of its tenants."""
MAX_CUTS = 32
"""As many as a bitstream has levels."""


@dataclass(frozen=True)
class Hints:
    """What a writer knows and eviction wants: nothing depends on it but what is kept longest.

    An object is worthless without its parent (a chunk is read only after the chunks before it).
    """

    parent: bytes | None = None
    saved_s: float = 0.0
    """Seconds of prefill that reading this object saves."""
    cuts: tuple[int, ...] = ()
    """Sizes in bytes at which the object may be cut, rising; the last is that of the whole. Its
    first bytes up to any of them are of use by themselves (of a chunk: its first levels). Empty:
    nothing less than the whole is."""


@dataclass(frozen=True)
class Entry:
    """What a store knows of one object. `head` holds its first bytes, as many as a lookup asked
    for (fewer if the object is shorter)."""

    key: bytes
    etag: bytes
    size_bytes: int
    hints: Hints = Hints()
    head: bytes = b""

    @property
    def is_cut(self) -> bool:
        """Whether only the beginning of the object is here, as far as that is known."""
        return bool(self.hints.cuts) and self.size_bytes < self.hints.cuts[-1]

    def is_beginning_of(self, other: Entry) -> bool:
        """Whether the other is the same object with more of its bytes."""
        return (
            self.etag == other.etag
            and self.size_bytes < other.size_bytes
            and self.size_bytes in other.hints.cuts
        )


@dataclass(frozen=True)
class Span:
    """Bytes [start, start + len(data)) of one object."""

    entry: Entry
    start: int
    data: bytes | memoryview

    def is_short_of(self, end: int | None) -> bool:
        """Whether the object was cut before `end`, up to where it was asked for."""
        return self.entry.is_cut and (end is None or end > self.entry.size_bytes)


@dataclass
class Stats:
    """Counters since the store was opened; `objects` and `size_bytes` are what it holds now.
    A store counts in one of its own, and gives copies away."""

    objects: int = 0
    size_bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    evictions: int = 0
    cuts: int = 0
    """Times that an object was cut to make room, instead of being evicted."""
    corruptions: int = 0
    """Objects found damaged, each counted once: never served, set aside."""
    tiers: dict[str, int] = field(default_factory=dict)
    """Of a store with tiers: the hits of each, by its name."""
    costs: Costs = field(default_factory=Costs)
    """Of a store elsewhere: requests and bytes."""
    evicted: Counter[tuple[bytes, str]] = field(default_factory=Counter)
    """The evictions by whose object went (how its key begins) and why: one of `EVICTED`."""

    def count_eviction(self, key: bytes, why: str) -> None:
        self.evictions += 1
        self.evicted[key[:OWNER_BYTES], why] += 1


EVICTED = {
    "room": "to make room for newer objects",
    "share": "named, but beyond its tenant's share of a full store",
    "smaller": "the store was given less room than it had",
}
"""Why objects are evicted."""


@dataclass(frozen=True)
class TierReport:
    """One tier of a store, as the people who run it want to see it."""

    name: str
    stats: Stats | None
    """None: it does not answer."""
    hits: int
    owners: Mapping[bytes, int]
    """The hits by how keys begin; empty if the whole store is this one tier."""
    errors: int = 0
    rests: bool = False
    """It failed again and again, and is left alone for a while."""


class NodeAt(NamedTuple):
    """Where a node is asked: its URL, and of the addresses of its name the one to use."""

    url: str
    address: str | None = None


class Store(ABC):
    """Every method may be called from many tasks of one event loop at once."""

    volatile = False
    """Nothing here survives the end of the process."""
    read_only = False
    """Puts and deletes raise ReadOnlyError."""
    kind = "store"
    """What people call it."""

    async def put(
        self,
        key: bytes,
        data: bytes,
        *,
        etag: bytes,
        checksum: int,
        hints: Hints | None = None,
        replacing: bytes | None = None,
    ) -> Entry:
        """Store `data` unless `key` is taken; the entry that is now there, whoever wrote it.

        `replacing` is the etag of an object that gives way: under another one the key is taken, and
        if there is none this is a put like any other. A reader gets the old object, the new one or
        a miss, never a mix. If this fails, there may be neither.

        An object that was cut (`Hints.cuts`) keeps its etag. To put it again with more of its
        bytes makes it whole, without `replacing`, in a store that cuts objects itself.

        `checksum` is the xxh3-64 of `data`, computed where the bytes came from: ChecksumError if
        it does not fit. NoSpaceError if it cannot be kept.

        What is returned has been kept: the object survives whatever this store promises to survive
        (on disk: a power loss; several tiers: the longest-lived of them; a node: whatever its own
        store does; memory alone: nothing). It can be read from then on: a lookup through this store
        finds exactly this entry, until it is evicted, deleted or replaced. So nobody who puts needs
        to look again.
        """
        entry = Entry(key, etag, len(data), hints or Hints())
        return await self.put_entry(entry, data, checksum, replacing)

    @abstractmethod
    async def put_entry(
        self, entry: Entry, data: bytes, checksum: int, replacing: bytes | None = None
    ) -> Entry:
        """`put`, for whoever has an entry of the new object."""

    @abstractmethod
    async def get(
        self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
    ) -> Span | None:
        """Bytes [start, end) of an object, clipped to its end; None if it is not here, or is not
        the one that `etag` names."""

    def peek(self, key: bytes) -> Entry | None:
        """What is under a key, if that can be told at once; None says nothing."""
        return None

    def get_now(self, key: bytes, start: int, end: int, etag: bytes) -> Span | None:
        """What `get` would return, if it need not wait for it; None says nothing. For those who
        read many small parts."""
        return None

    @abstractmethod
    async def lookup(self, keys: Sequence[bytes], *, head_bytes: int = 0) -> list[Entry | None]:
        """One answer per key, in order, None for those that are not here."""

    async def read_spans(self, asks: Sequence[Ask]) -> AsyncGenerator[Piece]:
        """The pieces of all asks, in order, for readers who verify them (`streaming.py`). Close it
        (`aclosing`) to stop early."""
        for number, ask in enumerate(asks):
            span = await self.get(ask.key, ask.start, ask.end, etag=ask.etag)
            yield Piece(number, ask.start, None if span is None else span.data)

    def expecting(self, asks: Iterable[Ask]) -> AbstractContextManager[None]:
        """While these are read with `get`, in order: a store that is far away may fetch ahead."""
        return nullcontext()

    async def read_into(self, asks: Sequence[Ask], receiver: Receiver) -> None:
        """What `read_spans` gives, put where the reader wants it."""
        async with aclosing(self.read_spans(asks)) as pieces:
            async for number, start, data in pieces:
                if data is None:
                    receiver.gone(number)
                else:
                    hand_over(receiver, number, start, data)

    async def nodes_of(self, keys: Sequence[bytes]) -> Sequence[tuple[NodeAt, Sequence[int]]]:
        """For those who read from nodes by themselves: whom to ask, and for which of these keys.
        Nobody if this is no store of nodes."""
        return ()

    @abstractmethod
    async def delete(self, key: bytes) -> bool:
        """True if it was here. When this returns, the bytes are gone."""

    @abstractmethod
    def list(self, prefix: bytes = b"") -> AsyncGenerator[Entry]:
        """All objects whose key begins so, in key order. What comes and goes meanwhile may or may
        not be among them."""

    def used(self, keys: Sequence[bytes]) -> None:
        """These were read elsewhere, from copies: it counts for what is kept longest."""
        return

    def usage(self, prefix: bytes) -> Usage:
        """What objects whose key begins so take here, at once; nothing in a store elsewhere. The
        prefixes that are asked for should have one length: each new length costs a count of all."""
        return Usage()

    @property
    def own(self) -> Store | None:
        """What holds objects in this machine (of several tiers, the largest), so that asking it
        costs nobody else anything; None of a store elsewhere."""
        return None

    def watch(self, watcher: Watcher) -> None:
        """Tell it from now on what comes and goes; a store elsewhere tells nothing."""
        return

    async def tier_reports(self) -> Sequence[TierReport]:
        """Its tiers, the fastest first."""
        stats = await self.stats()
        return [TierReport(self.kind, stats, stats.hits, {})]

    @abstractmethod
    async def stats(self) -> Stats:
        """Counters of this store."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what was promised, then release everything. Nothing may be called afterwards."""


def is_taken(entry: Entry | None, replacing: bytes | None, new: Entry | None = None) -> bool:
    """Whether what is there stays: it is neither what a put replaces nor the beginning of `new`.
    What has the etag of the new object may well be replaced by it: somebody found that its bytes
    are not what they should be."""
    if entry is None or entry.etag == replacing:
        return False
    return new is None or not entry.is_beginning_of(new)


def check_put(entry: Entry, data: bytes, checksum: int) -> None:
    """What every store refuses before it touches anything."""
    check_entry(entry, data)
    found = xxh3_64_intdigest(data)
    if found != checksum:
        raise ChecksumError(f"expected bytes with xxh3-64 {checksum:016x}, found {found:016x}")


def check_entry(entry: Entry, data: bytes) -> None:
    """The same, but for the bytes themselves."""
    assert entry.size_bytes == len(data), f"an entry of {entry.size_bytes}, not {len(data)} bytes"
    hints = entry.hints
    for what, value, limit in (
        ("key", entry.key, MAX_KEY_BYTES),
        ("etag", entry.etag, MAX_ETAG_BYTES),
    ):
        if not 1 <= len(value) <= limit:
            raise LimitError(f"expected a {what} of 1 to {limit} bytes, found {len(value)}")
    if hints.parent is not None and len(hints.parent) > MAX_KEY_BYTES:
        raise LimitError(f"expected a parent of {MAX_KEY_BYTES} bytes, found {len(hints.parent)}")
    if not 0 <= hints.saved_s < math.inf:
        raise LimitError(f"expected a number of seconds saved, found {hints.saved_s}")
    if not may_have(hints.cuts, entry.size_bytes):
        raise LimitError(f"expected {entry.size_bytes} bytes among rising cuts, found {hints.cuts}")


def may_have(cuts: Sequence[int], size_bytes: int) -> bool:
    """Whether an object of that size may have these cuts (`Hints.cuts`)."""
    rising = all(low < high for low, high in pairwise((0, *cuts)))
    return not cuts or (rising and len(cuts) <= MAX_CUTS and size_bytes in cuts)


def clip(start: int, end: int | None, size_bytes: int) -> tuple[int, int]:
    """The part of [start, end) that an object of `size_bytes` has."""
    assert start >= 0, f"ranges count from the beginning, found {start}"
    stop = size_bytes if end is None else min(end, size_bytes)
    begin = min(start, size_bytes)
    return begin, max(begin, stop)
