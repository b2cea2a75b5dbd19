"""What the calls of a client return."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kdn.cache.states import State
from kdn.cache.tensors import KVCache
from kdn.session.delivered import Delivered

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedConfig


@dataclass(frozen=True)
class Learned:
    """The result of `learn`."""

    name: str
    num_tokens: int
    known_chunks: int
    """Chunks that were already there."""
    new_chunks: int
    """Chunks that were published now."""
    computed_tokens: int
    """Tokens that the model read for this."""
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """The cache of the first `num_tokens` tokens, at the quality that was asked for."""

    cache: KVCache | None
    num_tokens: int
    delivered: Delivered | None = field(repr=False)
    _config: PreTrainedConfig = field(repr=False)
    state: State | None = field(default=None, repr=False, kw_only=True)
    """For a model with recurrent layers: their state after the last of these tokens."""

    @property
    def exact_until(self) -> int | None:
        """The first token that was loaded with losses; None: there is none."""
        return None if self.delivered is None else self.delivered.exact_until

    @property
    def past_key_values(self) -> DynamicCache | None:
        """A fresh cache for the model to continue from; None if nothing is known."""
        from kdn.engines.transformers import to_dynamic_cache

        if self.cache is None:
            return None
        return to_dynamic_cache(self.cache, self._config, state=self.state)


@dataclass(frozen=True)
class Joined(Loaded):
    """The whole cache of a join, and its `tokens`. Nothing that is computed on top of it can be
    published."""

    tokens: list[int] = field(default_factory=list, repr=False)
    stats: Stats = field(default_factory=lambda: Stats())

    @property
    def exact_until(self) -> int | None:
        return 0


@dataclass
class Stats:
    """The cost of an answer. The fields are filled while the answer is being given."""

    prompt_tokens: int = 0
    """Tokens of the whole prompt."""
    known_tokens: int = 0
    """Tokens of the prompt that were loaded."""
    computed_tokens: int = 0
    """Tokens of the prompt that the model read."""
    new_tokens: int = 0
    """Tokens of the answer."""
    fetched_bytes: int = 0
    """Bytes that came from places before the first token."""
    delivery_s: float = 0.0
    """Seconds that the delivery took before the first token."""
    ttft_s: float = 0.0
    """Seconds from the question to the first token of the answer."""
    levels: tuple[int, ...] = ()
    """Levels of each chunk by now; 0: the model read it."""
    refined_chunks: int = 0
    """Chunks that became finer while the answer was being given."""
    refined_bytes: int = 0
    """Bytes that were fetched for that."""
    joined_pieces: int = 0
    """Pieces that were joined; 0: the question was about one context."""
    moved_tokens: int = 0
    """Loaded tokens whose position differs from where they were learned."""
    repaired_tokens: int = 0
    """Moved tokens that seams repaired."""
    recomputed_tokens: int = 0
    """Moved tokens that the model computed again, because the question looks at them."""
    recompute_s: float = 0.0
    """Seconds for finding and computing them, and for reading the question with them."""
    troubles: tuple[str, ...] = ()
    """What went wrong on the way."""


class Answer:
    """Text as it is made: `async for piece in answer`, or all of it with `await answer.read()`."""

    def __init__(self, pieces: AsyncGenerator[str, None], stats: Stats) -> None:
        self.stats = stats
        self.text = ""
        """So far."""
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        piece = await anext(self._pieces)
        self.text += piece
        return piece

    async def read(self) -> str:
        async for _ in self:
            pass
        return self.text

    async def close(self) -> None:
        """Stop here."""
        await self._pieces.aclose()


@dataclass
class Metrics:
    """Counters of a client since it was opened."""

    answers: int = 0
    known_tokens: int = 0
    computed_tokens: int = 0
    fetched_bytes: int = 0
    joins: int = 0
    """Answers from pieces that were learned apart."""
    moved_tokens: int = 0
    repaired_tokens: int = 0
    recomputed_tokens: int = 0
    audits: int = 0
    failed_audits: int = 0
    audited_tokens: int = 0
    audit_kld_sum: float = 0.0
    audit_kld_max: float = 0.0
    """Largest mean KLD of any audited answer."""

    @property
    def audit_kld(self) -> float:
        """Mean over all audited tokens."""
        return self.audit_kld_sum / max(1, self.audited_tokens)

    def count(self, stats: Stats) -> None:
        self.answers += 1
        self.known_tokens += stats.known_tokens
        self.computed_tokens += stats.computed_tokens
        self.fetched_bytes += stats.fetched_bytes
        self.joins += stats.joined_pieces > 0
        self.moved_tokens += stats.moved_tokens
        self.repaired_tokens += stats.repaired_tokens
        self.recomputed_tokens += stats.recomputed_tokens

    def audited(self, klds: npt.NDArray[np.float64]) -> None:
        self.audits += 1
        self.audited_tokens += len(klds)
        self.audit_kld_sum += float(klds.sum())
        self.audit_kld_max = max(self.audit_kld_max, float(klds.mean()))
