"""What the scheduler's side tells the worker's side in each step, and what it hears back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from kdn.cache.keys import Chunk
from kdn.session.changes import Change
from kdn.tracing import Request, clean_id


@dataclass(frozen=True)
class JoinOrder:
    """How the chunks of a load are joined."""

    head: int
    """Tokens that all pieces share."""
    pieces: tuple[tuple[int, ...], ...]
    """The chunks of each, by their numbers in the order."""
    seams: bytes = b""
    """Which repair all but the first; none if it is empty."""


@dataclass(frozen=True)
class LoadOrder:
    """Tokens [start, end) of a request, both multiples of vLLM's block size."""

    request_id: str
    chunks: tuple[Chunk, ...]
    """Consecutive, covering these tokens and perhaps some around them; of a join, all of it, each
    once."""
    heads: tuple[bytes, ...]
    """Of their streams, as they were looked up: the worker asks nobody again. Empty where this host
    held the chunk itself."""
    start: int
    end: int
    block_ids: tuple[int, ...]
    """Of the whole request, from its first token on."""
    deadline_s: float
    enough_kld: float
    strict: bool = False
    """Whether what is coarser than that is not used, even if nothing better came in time."""
    number: int = 0
    """By which the ranks of an engine know the load: each has another."""
    join: JoinOrder | None = None
    """None: chunks stand where they were learned."""
    trace: str = ""
    """The span of its request, as `kdn/tracing.py` writes it."""

    @property
    def origin(self) -> Request:
        """Whose load it is."""
        return Request.elsewhere(clean_id(self.request_id), self.trace)


@dataclass(frozen=True)
class SaveOrder:
    """Chunks whose values are complete after this step, and are the model's own."""

    request_id: str
    chunks: tuple[Chunk, ...]
    block_ids: tuple[int, ...]
    exact_until: int | None = None
    """See `RequestState`."""
    trace: str = ""
    """See `LoadOrder`."""

    @property
    def origin(self) -> Request:
        return Request.elsewhere(clean_id(self.request_id), self.trace)


T = TypeVar("T", LoadOrder, SaveOrder)


@dataclass(frozen=True)
class Step:
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    num_tokens: int = 0
    """That the model reads in this step."""
    waiting: bool = False
    """For lookups: with no tokens to read, there is nothing else to do."""
    stopped: bool = False
    """For good: nothing is loaded or published any more, and what is under way is not used."""

    def with_seal_key(self, seal_key: bytes) -> Step:
        """Steps may cross a network, so they travel without the key (b"") that chunks are sealed
        with; the worker, who knows the secret, puts it back."""

        def keyed(one: T) -> T:
            return replace(one, chunks=tuple(c.with_seal_key(seal_key) for c in one.chunks))

        return replace(
            self, loads=tuple(map(keyed, self.loads)), saves=tuple(map(keyed, self.saves))
        )


@dataclass
class LoadReport:
    """Loads that have ended: up to where each is as the model itself would have it."""

    exact_until: dict[str, int] = field(default_factory=dict)
    failed_from: dict[str, int] = field(default_factory=dict)
    """Of those that failed: tokens from here on did not come, and the model computes them."""
    weights_changed: bool = False
    """The model is not the one any more that chunks are named after."""
    ranks: dict[str, int] = field(default_factory=dict)
    """On how many ranks each load has ended, where it is more than one."""
    unsaved: dict[str, dict[bytes, int]] = field(default_factory=dict)
    """Chunks of requests that found no room: their keys, and where they start. They may be saved
    by a later step."""
    changes: tuple[Change, ...] = ()
    """Of what the host and the place hold."""

    def num_ranks(self, request_id: str) -> int:
        return self.ranks.get(request_id, int(request_id in self.exact_until))

    def take(self, num_ranks: int) -> LoadReport:
        """The loads that have ended on so many ranks; the others stay."""
        done = [name for name in self.exact_until if self.num_ranks(name) >= num_ranks]
        taken = LoadReport()
        for name in done:
            taken.exact_until[name] = self.exact_until.pop(name)
            self.ranks.pop(name, None)
            if name in self.failed_from:
                taken.failed_from[name] = self.failed_from.pop(name)
        return taken

    def __bool__(self) -> bool:
        parts = (self.exact_until, self.weights_changed, self.unsaved, self.changes)
        return any(map(bool, parts))

    def joined(self, other: LoadReport) -> LoadReport:
        """Of several ranks: exact is what is exact on all, failed what failed on one."""
        names = self.exact_until.keys() | other.exact_until.keys()
        return LoadReport(
            _least(self.exact_until, other.exact_until),
            _least(self.failed_from, other.failed_from),
            self.weights_changed or other.weights_changed,
            {name: self.num_ranks(name) + other.num_ranks(name) for name in names},
            unsaved=_together(self.unsaved, other.unsaved),
            changes=self.changes + other.changes,
        )


def _least(mine: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    return mine | {name: min(end, mine.get(name, end)) for name, end in theirs.items()}


def _together(
    mine: dict[str, dict[bytes, int]], theirs: dict[str, dict[bytes, int]]
) -> dict[str, dict[bytes, int]]:
    return {name: mine.get(name, {}) | theirs.get(name, {}) for name in mine.keys() | theirs.keys()}
