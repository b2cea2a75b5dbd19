"""What a planner sees and says. Pure data: no clock, no I/O, no torch.

A chunk's stream is fetched from its beginning: `levels` levels of it are its first
`level_ends[levels - 1]` bytes. Recomputing goes from the front, since a model can only read on from
what it has: the first `recompute` chunks are the model's, all others are loaded, or left to the
model after the deadline if nothing of them arrived.

Times are seconds since the request began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Offer:
    """A chunk as a lookup found it: how many bytes its first levels take, and how far off the
    model's answers are expected to be with them (`expected_kld[levels - 1]`, see the profile)."""

    num_tokens: int
    level_ends: tuple[int, ...]
    expected_kld: tuple[float, ...]
    weight: float = 1.0
    """How much each of its tokens counts, beside those of other chunks."""


def shares(offers: Sequence[Offer]) -> list[float]:
    """What part of a mean over the context each chunk has; together 1."""
    parts = [offer.num_tokens * offer.weight for offer in offers]
    total = sum(parts)
    return [part / total for part in parts]


@dataclass(frozen=True)
class Progress:
    """What there is of a chunk by now: the first `arrived_bytes` of its stream, `decoded` levels in
    the cache, or the model's own values."""

    arrived_bytes: int = 0
    decoded: int = 0
    computed: bool = False


@dataclass(frozen=True)
class Link:
    """What is known of the way to the store: `rate` in bytes a second, as the estimator expects it,
    and `low_rate` that it exceeds nine times out of ten over the next seconds."""

    rate: float
    low_rate: float
    latency_s: float


class Speeds(Protocol):
    """How fast this machine is, as measured."""

    def decode_s(self, num_tokens: int, levels: int) -> float:
        """Seconds to decode a chunk."""
        ...

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds the model needs to read tokens [start, end) after those before."""
        ...


@dataclass(frozen=True)
class Reading:
    """What the model has in hand: the chunks before `end` that it has not read, since `began_s`.
    They are done all at once."""

    end: int
    began_s: float


@dataclass(frozen=True)
class Situation:
    now_s: float
    deadline_s: float
    """When the cache must be complete; far away if it need not: `enough_kld` ends the fetching."""
    enough_kld: float
    """The mean need not be better than this, nor any chunk."""
    offers: tuple[Offer, ...]
    progress: tuple[Progress, ...]
    link: Link
    speeds: Speeds
    reading: Reading | None = None
    shared: bool = False
    """Whether decoder and model take turns on the same processor."""


class Fetch(NamedTuple):
    """Fetch what is missing of a chunk's first `levels` levels."""

    chunk: int
    levels: int


@dataclass(frozen=True)
class Plan:
    """Fetches in order. Later ones are the first to be given up when time runs short."""

    fetches: tuple[Fetch, ...]
    recompute: int
    """This many chunks from the front are the model's to read, at the same time."""
    done_s: float
    """When all of it is expected to be there."""
    kld: float
    """The mean over all tokens, then."""


Policy = Callable[[Situation], Plan]
