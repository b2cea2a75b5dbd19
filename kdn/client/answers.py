"""What a client gives back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kdn.cache.states import State
from kdn.cache.tensors import KVCache
from kdn.delivery.plan import Speeds
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
    request_id: str = ""
    """For `kdn explain --request`."""


@dataclass(frozen=True)
class Loaded:
    """The cache of the first `num_tokens` tokens, as good as asked for."""

    cache: KVCache | None
    num_tokens: int
    delivered: Delivered | None = field(repr=False)
    _config: PreTrainedConfig = field(repr=False)
    state: State | None = field(default=None, repr=False, kw_only=True)
    """Of a model with recurrent layers, after the last of these tokens."""
    request_id: str = field(default="", kw_only=True)
    """For `kdn explain --request`."""

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
    request_id: str = ""
    """By which `kdn explain --request`, traces and the logs of nodes know it."""
    tier_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that were loaded, by where they came from: host, folder or remote."""
    level_bytes: tuple[int, ...] = ()
    """Bytes that were fetched and verified, by level."""
    avoided_s: float = 0.0
    """That the model would have taken to read what was loaded; 0: that cannot be told."""

    def note(self, got: Delivered, speeds: Speeds | None) -> None:
        """What a delivery did. `speeds`: the model's, if they are known."""
        self.fetched_bytes, self.delivery_s = got.fetched_bytes, got.done_s
        self.levels = got.levels
        self.troubles += got.troubles
        self.tier_tokens, self.level_bytes = got.tokens_by_tier, got.level_bytes
        both = zip(got.chunks, got.levels, strict=True)
        loaded = [chunk for chunk, levels in both if levels]
        if speeds is not None:
            self.avoided_s = sum(speeds.prefill_s(one.start, one.end) for one in loaded)


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
