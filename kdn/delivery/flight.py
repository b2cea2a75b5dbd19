"""A request on its way, how many there may be, and what is to be known of the link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kdn.delivery.assemble import Assembly
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.lookup import Incoming
from kdn.delivery.plan import Link
from kdn.store.streaming import SKIPPED_BYTES


class ThroughputEstimator(Protocol):
    """What delivery needs of an estimator (`estimate.py`)."""

    def started(self, t_s: float) -> None: ...
    def idle(self, t_s: float) -> None: ...
    def add(self, num_bytes: int, t_s: float) -> None: ...
    def link(self) -> Link: ...


@dataclass(frozen=True)
class Limits:
    max_window_bytes: int = 64 << 20
    window_s: float = 0.1
    """In flight is what arrives in this time, or in three round trips if that is more: connections
    that begin, or begin again, need some before they are fast."""
    first_window_bytes: int = 48 << 10
    """Bytes in flight on an unknown link. The window then grows by four times what has arrived."""
    min_request_bytes: int = 24 << 10
    requests: int = 8
    hedge_s: float = 0.15
    """Silence, besides what queues and round trips explain, before another endpoint is asked."""
    silence_s: float = 1.0
    """Silence after which a connection is taken for dead."""


class Part(NamedTuple):
    incoming: Incoming
    assembly: Assembly
    start: int
    end: int


@dataclass(eq=False)
class Flight:
    """One request. `late`: its bytes are asked for elsewhere as well."""

    endpoint: Endpoint
    parts: list[Part]
    began_s: float
    heard_s: float
    left_bytes: int
    patience_s: float
    """Silence that round trips and queued bytes explain; after it, another endpoint is asked."""
    late: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_needed(self) -> bool:
        return any(
            not part.incoming.lost and _within(part.assembly.missing(part.end), part.start)
            for part in self.parts
        )


class Landing:
    """Where a flight's bytes go: to their streams. What another flight brought is skipped."""

    def __init__(
        self,
        flight: Flight,
        on_bytes: Callable[[Flight, Part, int], None],
        on_gone: Callable[[Flight, Part], None],
    ) -> None:
        self._flight, self._on_bytes, self._on_gone = flight, on_bytes, on_gone
        self._is_new = True  # what is being received
        self._left = [part.end - part.start for part in flight.parts]

    @property
    def short(self) -> list[Part]:
        """Those of which something has not come."""
        both = zip(self._flight.parts, self._left, strict=True)
        return [part for part, left_bytes in both if left_bytes > 0]

    def room(self, number: int, start: int, num_bytes: int) -> memoryview:
        known_bytes, memory = self._flight.parts[number].assembly.room(start, num_bytes)
        self._is_new = not known_bytes
        return memory if self._is_new else memoryview(bytearray(min(known_bytes, SKIPPED_BYTES)))

    def taken(self, number: int, start: int, num_bytes: int) -> None:
        part = self._flight.parts[number]
        if self._is_new:
            part.assembly.arrived(start, num_bytes)
        self._left[number] -= num_bytes
        self._on_bytes(self._flight, part, num_bytes)

    def gone(self, number: int) -> None:
        self._left[number] = 0
        self._on_gone(self._flight, self._flight.parts[number])


def size_of(parts: Sequence[Part]) -> int:
    return sum(part.end - part.start for part in parts)


def _within(gaps: Sequence[tuple[int, int]], start: int) -> bool:
    return any(end > start for _, end in gaps)
