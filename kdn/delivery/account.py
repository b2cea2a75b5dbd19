"""What a delivery did, for those who ask later: which bytes came from where, and why the model has
to read what did not come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.lookup import Incoming
from kdn.delivery.plan import Plan


class Why(StrEnum):
    """Why the model reads a chunk."""

    MISS = "miss"
    """Nobody has it, or not the chunk before it."""
    LATE = "lookup late"
    """Nobody answered in time whether they have it."""
    REFUSED = "refused"
    """A place does not let this client ask."""
    GONE = "gone"
    """Nobody has it any more."""
    DAMAGED = "damaged"
    """It arrived, and was not what it should be."""
    UNDECODABLE = "not decodable"
    SILENT = "silent"
    """No byte came for long."""
    DEADLINE = "deadline"
    """Time was up."""
    SOONER = "read sooner"
    """The plan said that the model would have it before the link."""


@dataclass(frozen=True)
class Source:
    """What one endpoint brought."""

    name: str
    is_local: bool
    num_bytes: int
    num_tokens: int
    """Of chunks that are loaded, and that came mostly from here."""


@dataclass(frozen=True)
class Account:
    planned: tuple[int, ...] = ()
    """Levels of each chunk in the first plan; 0: none."""
    plans: int = 0
    """How many plans were made."""
    why: tuple[Why | None, ...] = ()
    """Of each chunk; None: it was loaded."""
    sources: tuple[Source, ...] = ()
    level_bytes: tuple[int, ...] = ()
    """Bytes that arrived and were verified, by level; headers count to the first."""


@dataclass
class Ending:
    """How it was when a delivery ended."""

    known: Sequence[Incoming]
    endpoints: Endpoints
    num_read: int
    """Chunks from the front that the model read meanwhile."""
    is_lookup_late: bool = False
    is_late: bool = False
    is_silent: bool = False
    first_plan: Plan | None = None
    plans: int = 0
    refused: bool = field(init=False)

    def __post_init__(self) -> None:
        self.refused = any(endpoint.refusal for endpoint in self.endpoints)

    def account(self, num_chunks: int, num_levels: int) -> Account:
        planned = [0] * num_chunks
        for fetch in self.first_plan.fetches if self.first_plan else ():
            planned[fetch.chunk] = max(planned[fetch.chunk], fetch.levels)
        return Account(
            tuple(planned), self.plans, tuple(map(self._why, range(num_chunks))),
            tuple(self._sources()), level_bytes(self.known, num_levels),
        )  # fmt: skip

    def _why(self, number: int) -> Why | None:
        if number < self.num_read:
            return Why.SOONER
        if number >= len(self.known):
            unknown = Why.REFUSED if self.refused else Why.MISS
            return Why.LATE if self.is_lookup_late else unknown
        one = self.known[number]
        if one.decoded:
            return None
        if one.undecodable:
            return Why.UNDECODABLE
        if one.lost or all(endpoint in one.lacking for endpoint in self.endpoints):
            return Why.DAMAGED if one.assembly.damages else Why.GONE
        if self.is_late or self.is_silent:
            return Why.DEADLINE if self.is_late else Why.SILENT
        return Why.SOONER

    def _sources(self) -> Iterator[Source]:
        num_bytes: Counter[Endpoint] = Counter()
        num_tokens: Counter[Endpoint] = Counter()
        for one in self.known:
            num_bytes.update(one.brought)
            if one.decoded and (place := self._place(one)) is not None:
                num_tokens[place] += one.chunk.num_tokens
        for endpoint in self.endpoints:
            if num_bytes[endpoint] or num_tokens[endpoint]:
                yield Source(
                    endpoint.name, endpoint.local, num_bytes[endpoint], num_tokens[endpoint]
                )

    def _place(self, one: Incoming) -> Endpoint | None:
        """Where most of it came from. All of a small chunk may have come with the lookup."""
        if one.brought:
            return max(one.brought, key=lambda endpoint: one.brought[endpoint])
        return one.at or next((e for e in self.endpoints if e not in one.lacking), None)


def level_bytes(known: Iterable[Incoming], num_levels: int) -> tuple[int, ...]:
    sums = [0] * num_levels
    for one in known:
        ends = one.assembly.wanted_ends[: one.assembly.levels]
        for level, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            sums[level] += end - start
    return tuple(sums)
