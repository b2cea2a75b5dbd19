"""What a client gives back."""

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
    """What became of a context that was to be learned."""

    name: str
    num_tokens: int
    known_chunks: int
    """Were there already."""
    new_chunks: int
    computed_tokens: int
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """The cache of the first `num_tokens` tokens, as good as asked for."""

    cache: KVCache | None
    num_tokens: int
    delivered: Delivered | None = field(repr=False)
    _config: PreTrainedConfig = field(repr=False)
    state: State | None = field(default=None, repr=False, kw_only=True)
    """Of a model with recurrent layers, after the last of these tokens."""

    @property
    def exact_until(self) -> int | None:
        """See `Delivered`."""
        return None if self.delivered is None else self.delivered.exact_until

    @property
    def past_key_values(self) -> DynamicCache | None:
        """A fresh one for the model to go on from; None if nothing is known."""
        from kdn.engines.transformers import to_dynamic_cache

        if self.cache is None:
            return None
        return to_dynamic_cache(self.cache, self._config, state=self.state)


@dataclass(frozen=True)
class Joined(Loaded):
    """The cache of a join, all of it, whose tokens are `tokens`. Nothing that is computed on top of
    it can be published."""

    tokens: list[int] = field(default_factory=list, repr=False)
    stats: Stats = field(default_factory=lambda: Stats())

    @property
    def exact_until(self) -> int | None:
        return 0


@dataclass
class Stats:
    """What an answer took. Filled while it is being given."""

    prompt_tokens: int = 0
    known_tokens: int = 0
    """Of the prompt, loaded."""
    computed_tokens: int = 0
    """Of the prompt, read by the model."""
    new_tokens: int = 0
    """Of the answer."""
    fetched_bytes: int = 0
    delivery_s: float = 0.0
    ttft_s: float = 0.0
    """From the question to the first token of the answer."""
    levels: tuple[int, ...] = ()
    """Of each chunk that was asked for, by now; 0: computed."""
    refined_chunks: int = 0
    """Chunks that became finer while the answer was being given."""
    refined_bytes: int = 0
    """Fetched for that."""
    joined_pieces: int = 0
    """That were learned apart; none: one context was asked about."""
    moved_tokens: int = 0
    """Of what was loaded: they stand elsewhere than they were learned."""
    repaired_tokens: int = 0
    """Of these, by seams."""
    recomputed_tokens: int = 0
    """Of these, computed anew by the model, because the question looks at them."""
    recompute_s: float = 0.0
    """For finding and computing them, and for reading the question with them."""
    troubles: tuple[str, ...] = ()


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
