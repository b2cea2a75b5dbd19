"""Every way that a cache can take from the one who read a context to the one who asks about it.

`exact` is the cache as the model made it. `klt 1` and so on are its levels, all chunks alike.
`default` is what a client without a deadline fetches at the default quality: the planner's choice,
chunk by chunk; `high` is what vLLM fetches unless told otherwise. `cachegen 1` and so on are the
levels of CacheGen, as its paper describes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kdn.bench.rivals.ours import Layered
from kdn.cache.keys import Chunk, TokenIds
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.format import Bitstream
from kdn.defaults import ENGINE_QUALITY, QUALITY
from kdn.delivery import planner
from kdn.delivery.plan import Link, Offer, Progress, Situation
from kdn.delivery.request import FAR_S, token_weights
from kdn.session.quality import enough_kld

EXACT, DEFAULT, HIGH = "exact", QUALITY, ENGINE_QUALITY
LINK = Link(rate=12.5e6, low_rate=12.5e6, latency_s=0.01)
"""100 Mbit/s. Without a deadline a link only decides which of two levels is cheaper."""


class Arrived(NamedTuple):
    way: str
    size_bytes: int
    cache: KVCache


class _NeverReads:
    """The speeds of a client whose model computes nothing of the context itself."""

    def decode_s(self, num_tokens: int, levels: int) -> float:
        return 0.0

    def prefill_s(self, start: int, end: int) -> float:
        return FAR_S * (end - start)


@dataclass(frozen=True)
class Ways:
    """`klt` and `cachegen` as the benchmark of codecs has them; the latter may be left out."""

    klt: Layered
    cachegen: Layered | None
    enough_kld: Mapping[str, float]
    """What qualities ask for, by their names: `default` among them."""

    @property
    def labels(self) -> list[str]:
        klt = [f"klt {level + 1}" for level in range(self.klt.codec.num_levels)]
        others = [] if self.cachegen is None else _delta_levels(self.cachegen)
        return [EXACT, *klt, *self.enough_kld, *(f"cachegen {level}" for level in others)]

    def arrivals(self, tokens: TokenIds, cache: KVCache) -> Iterator[Arrived]:
        """The cache of these tokens by every way but `exact`, one at a time."""
        chunks, data = self.klt.encode(tokens, cache)
        plans = {f"klt {level + 1}": [level] * len(chunks) for level in self._klt_levels}
        for quality, enough in self.enough_kld.items():
            counts = planned(chunks, data, self.klt.codec.expected_kld, enough)
            plans[quality] = [count - 1 for count in counts]
        for way, levels in plans.items():
            yield _arrived(way, self.klt, chunks, data, levels, cache)
        if self.cachegen is not None:
            chunks, data = self.cachegen.encode(tokens, cache)
            for level in _delta_levels(self.cachegen):
                way, levels = f"cachegen {level}", [level] * len(chunks)
                yield _arrived(way, self.cachegen, chunks, data, levels, cache)

    @property
    def _klt_levels(self) -> range:
        return range(self.klt.codec.num_levels)


def asked_for(codec: Codec) -> dict[str, float]:
    """What requests ask for, as far as the codec can be that good."""
    return {word: max(enough_kld(word), codec.expected_kld[-1]) for word in (DEFAULT, HIGH)}


def planned(
    chunks: Sequence[Chunk], data: Sequence[bytes], kld: Sequence[float], enough_kld: float
) -> list[int]:
    """How many levels of each chunk a client fetches that has no deadline. `kld` is what the codec
    expects of one level, of two, and so on."""
    headers = [Bitstream.parse(part).header for part in data]
    ends = [tuple(one.level_end(level) for level in range(len(kld))) for one in headers]
    offers = tuple(
        Offer(chunk.num_tokens, own, tuple(kld), weight)
        for chunk, own, weight in zip(chunks, ends, token_weights(chunks), strict=True)
    )
    situation = Situation(
        0.0, FAR_S, enough_kld, offers, (Progress(),) * len(offers), LINK, _NeverReads()
    )
    fetches = {one.chunk: one.levels for one in planner.default(situation).fetches}
    return [fetches[number] for number in range(len(chunks))]


def _delta_levels(rival: Layered) -> range:
    """Level 0 of CacheGen is its anchors alone, which nobody would send without deltas."""
    return range(1, rival.codec.num_levels)


def _arrived(
    way: str, rival: Layered, chunks: Sequence[Chunk], data: Sequence[bytes],
    levels: Sequence[int], like: KVCache,
) -> Arrived:  # fmt: skip
    streams, size_bytes = rival.fetched(data, levels)
    return Arrived(way, size_bytes, rival.decode(chunks, streams, like))
