"""Byte ranges that the centre is asked for together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kdn.region.centre import CentreStore
from kdn.region.flight import Flight, GoneError
from kdn.region.pieces import Partial
from kdn.store.streaming import Ask

MAX_REQUEST_BYTES = 8 << 20
MAX_REQUEST_PIECES = 512

Wanted = tuple[Partial, int, int]
"""Bytes [start, end) of an object."""


class Group:
    """Flights of one request, and where their bytes go."""

    def __init__(self, flights: Sequence[tuple[Partial, Flight]]) -> None:
        self.flights = flights

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        return self.flights[number][1].room(start, num_bytes)

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        """Nobody reads them before they are checked."""

    def check(self, number: int, start: int, num_bytes: int, checksum: int) -> None:
        self.flights[number][1].check(start, num_bytes, checksum)

    def gone(self, number: int) -> None:
        self.flights[number][1].fail(GoneError("the centre no longer has this object"))

    @property
    def asks(self) -> list[Ask]:
        return [Ask(one.key, f.start, f.end, one.etag) for one, f in self.flights]


def grouped(wanted: Iterable[Wanted], centre: CentreStore) -> Iterator[list[Wanted]]:
    """Ranges for one request each."""
    group: list[Wanted] = []
    size_bytes = 0
    for one in wanted:
        partial, start, end = one
        full = size_bytes + end - start > MAX_REQUEST_BYTES or len(group) >= MAX_REQUEST_PIECES
        other = group and centre.prefix_of(group[0][0].key) != centre.prefix_of(partial.key)
        if group and (full or other):
            yield group
            group, size_bytes = [], 0
        group.append(one)
        size_bytes += end - start
    if group:
        yield group
