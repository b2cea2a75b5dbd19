"""The request that a delivery carries out, and its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.delivery.account import Account
from kdn.delivery.plan import Speeds
from kdn.delivery.sink import Sink

if TYPE_CHECKING:
    from kdn.delivery.refine import Refinement

FAR_S = 3600.0
"""Stands for "no deadline"."""
TAIL_TOKENS = 256
"""Half of what a coarse cache costs a continuation is due to its last tokens: with those one level
finer, `kdn bench codec` finds half the divergence (`klt` beside `klt-tail`)."""

TAIL_KLD, BODY_KLD = 0.25, 1.75
"""How far the last tokens, and those before them, may diverge: as multiples of `enough_kld`."""

Compute = Callable[[int, int], Awaitable[KVCache]]
"""Reads chunks [first, end) with the model, returns their values. Called from the front on, once
at a time; may be cancelled. It writes nothing itself: so a sink never holds half of a chunk."""


@dataclass(frozen=True)
class Request:
    chunks: Sequence[Chunk]
    """Consecutive chunks of one context, or the chunks of the pieces of a join."""
    codec: Codec
    expected_kld: Sequence[float]
    """`expected_kld[n - 1]` is the divergence expected of n levels, from the profile."""
    sink: Sink
    deadline_s: float = FAR_S
    """Seconds from the call; the result is whatever has arrived by then."""
    enough_kld: float = 0.0
    """The mean divergence that is good enough: once reached, the delivery ends early."""
    speeds: Speeds | None = None
    compute: Compute | None = None
    """Without it nothing is computed on the way, and no plan counts on it."""
    shared: bool = False
    """Whether model and decoder work on the same processor, at each other's cost."""
    skips_windows: bool = False
    """Whether layers with a sliding window are fetched only as far as a continuation from the end
    of the known tokens reads them. The sink must be able to report what a layer lacks."""

    def __post_init__(self) -> None:
        assert self.chunks, "a request is for at least one chunk"
        assert len(self.expected_kld) == self.codec.num_levels, "one expectation for each level"
        assert self.deadline_s > 0
        assert self.enough_kld >= 0

    def weights(self) -> list[float]:
        return token_weights(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Not where the last chunk ends: those of a join are not consecutive."""
        return sum(one.num_tokens for one in self.chunks)


def token_weights(chunks: Sequence[Chunk]) -> list[float]:
    """How much a token of each chunk counts: those of the end as much as all before them."""
    ends = list(accumulate(one.num_tokens for one in chunks))
    border = max(0, ends[-1] - TAIL_TOKENS)
    tail = max(1.0, border / (ends[-1] - border))
    both = zip(chunks, ends, strict=True)
    shares = [min(1.0, max(0, end - border) / one.num_tokens) for one, end in both]
    return [1 + share * (tail - 1) for share in shares]


def enough_levels(expected_kld: Sequence[float], enough_kld: float) -> int:
    """Fewest levels at which a chunk's expected KLD is at most `enough_kld`; all levels if none
    suffice."""
    good = (i + 1 for i, kld in enumerate(expected_kld) if kld <= enough_kld)
    return next(good, len(expected_kld))


def worst_kld(chunk: Chunk, end: int | None, enough_kld: float) -> float:
    """How far off one chunk of a context up to `end` may be: if all keep to that, the mean in which
    the last tokens count half is `enough_kld`. None: the end is not known yet, and far away."""
    is_tail = end is not None and chunk.end > end - TAIL_TOKENS
    return enough_kld * (TAIL_KLD if is_tail else BODY_KLD)


@dataclass(frozen=True)
class Snapshot:
    """A delivery on its way, for progress bars. `levels[i]` is -1 where the model read chunk i."""

    elapsed_s: float
    left_s: float
    """Until all that is planned is there, as expected."""
    levels: tuple[int, ...]
    num_levels: int
    fetched_bytes: int
    rate: float
    """Bytes a second, as expected of the link."""


OnProgress = Callable[[Snapshot], None]


class Arrived(NamedTuple):
    """A stream as far as it came: its header and its first `levels` levels, verified."""

    chunk: Chunk
    data: memoryview
    levels: int


@dataclass(frozen=True)
class Result:
    """The sink holds chunk i with `levels[i]` levels of stream `stream_ids[i]`, or with the model's
    own values where `computed[i]`; the chunks of `recompute` it does not hold."""

    sink: Sink
    num_levels: int
    levels: tuple[int, ...]
    computed: tuple[bool, ...]
    stream_ids: tuple[bytes, ...]
    """Empty where nothing was decoded."""
    known: int
    """So many chunks from the front were found."""
    fetched_bytes: int
    lookup_s: float
    first_byte_s: float | None
    done_s: float
    failures: int
    """Requests that failed and were made good, or not."""
    troubles: tuple[str, ...] = ()
    """What went wrong, for people."""
    kld: float = 0.0
    """The mean divergence that is expected, what is left to the model counting 0."""
    account: Account = field(default_factory=Account, repr=False)
    """What was planned, what came from where, and why the rest did not."""
    arrived: tuple[Arrived, ...] = field(default=(), repr=False)
    """What came of streams that can be decoded, for those who want to keep it."""
    _refine: Callable[[float], Refinement] | None = field(default=None, repr=False)

    @property
    def recompute(self) -> tuple[int, ...]:
        """What is left to the model, in order."""
        both = enumerate(zip(self.levels, self.computed, strict=True))
        return tuple(i for i, (levels, computed) in both if not levels and not computed)

    def refine(self, enough_kld: float = 0.0) -> Refinement:
        """The levels that were left out and that it takes to be that good, in the background: see
        `refine.py`."""
        assert self._refine is not None, "only a delivery can be refined"
        return self._refine(enough_kld)
