"""What the calls of a client return."""

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
    request_id: str = ""
    """For `kdn explain --request`."""


@dataclass(frozen=True)
class Loaded:
    """The cache of the first `num_tokens` tokens, at the quality that was asked for."""

    cache: KVCache | None
    num_tokens: int
    delivered: Delivered | None = field(repr=False)
    _config: PreTrainedConfig = field(repr=False)
    state: State | None = field(default=None, repr=False, kw_only=True)
    """For a model with recurrent layers: their state after the last of these tokens."""
    request_id: str = field(default="", kw_only=True)
    """For `kdn explain --request`."""

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
    request_id: str = ""
    """By which `kdn explain --request`, traces and the logs of nodes know it."""
    tier_tokens: dict[str, int] = field(default_factory=dict)
    """Loaded tokens, by where they came from: host, folder or remote."""
    level_bytes: tuple[int, ...] = ()
    """Bytes that were fetched and verified, by level."""
    avoided_s: float = 0.0
    """Seconds that the model would have taken to read the loaded tokens; 0: not known."""

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
