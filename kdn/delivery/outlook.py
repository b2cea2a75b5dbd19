"""A situation as arrays, and what follows from it whichever policy asks.

Chunks are rows, levels columns. What does not change within a request (sizes, divergences, decoding
and prefill times) is laid out once and kept for the next plan of the same request: planning again
after every arrival must cost far less than the arrival itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kdn.delivery.plan import Fetch, Offer, Situation, Speeds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PREFILL_MARGIN = 0.03
"""A model may be this much slower than it was measured, and still be done when planned."""
_KEPT_TABLES = 8


@dataclass(frozen=True, eq=False)
class Table:
    """What stays the same. Chunks with fewer levels repeat their last one, at no bytes and no gain.

    Shapes: [chunks] or [chunks, levels]; `prefill_s` is [chunks + 1], from an empty cache."""

    weights: Floats  # parts of all tokens
    levels: Ints
    ends: Floats
    kld: Floats
    decode_s: Floats
    prefill_s: Floats
    fetches: tuple[tuple[Fetch, ...], ...]  # made once: [chunk][levels - 1]

    @classmethod
    def of(cls, offers: tuple[Offer, ...], speeds: Speeds) -> Table:
        width = max(len(offer.level_ends) for offer in offers)
        tokens = np.array([offer.num_tokens for offer in offers], np.float64)
        borders = np.append(0, np.cumsum(tokens)).astype(int).tolist()
        return cls(
            weights=tokens / tokens.sum(),
            levels=np.array([len(offer.level_ends) for offer in offers], np.int64),
            ends=np.array([_padded(offer.level_ends, width) for offer in offers], np.float64),
            kld=np.array([_padded(offer.expected_kld, width) for offer in offers], np.float64),
            decode_s=np.array(
                [
                    [
                        speeds.decode_s(offer.num_tokens, min(level, len(offer.level_ends)))
                        for level in range(1, width + 1)
                    ]
                    for offer in offers
                ]
            ),
            prefill_s=np.array([speeds.prefill_s(0, border) for border in borders]),
            fetches=tuple(
                tuple(Fetch(chunk, level) for level in range(1, len(offer.level_ends) + 1))
                for chunk, offer in enumerate(offers)
            ),
        )


def _padded(values: tuple[float, ...], width: int) -> tuple[float, ...]:
    return values + (values[-1],) * (width - len(values))


_tables: OrderedDict[tuple[int, int], tuple[tuple[Offer, ...], Speeds, Table]] = OrderedDict()


def table_of(offers: tuple[Offer, ...], speeds: Speeds) -> Table:
    """The table of these very objects. They are kept with it, so an id is never of another."""
    name = (id(offers), id(speeds))
    kept = _tables.get(name)
    if kept is None or kept[0] is not offers or kept[1] is not speeds:
        kept = (offers, speeds, Table.of(offers, speeds))
        _tables[name] = kept
        while len(_tables) > _KEPT_TABLES:
            _tables.popitem(last=False)
    return kept[2]


class Outlook:
    """One situation. `arrived` whole levels of each chunk are here, `decoded` are in the cache, the
    first `computed` chunks are the model's."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self.table = table_of(situation.offers, situation.speeds)
        progress = situation.progress
        self.bytes = np.array([one.arrived_bytes for one in progress], np.float64)
        self.decoded = np.array([one.decoded for one in progress], np.int64)
        here = (self.bytes[:, None] >= self.table.ends).sum(axis=1)
        self.arrived = np.minimum(here, self.table.levels)
        front = (i for i, one in enumerate(progress) if not one.computed)
        self.computed = next(front, len(progress))
        self.left_s = situation.deadline_s - situation.now_s
        self.wait_s = 0.0 if self.bytes.any() else situation.link.latency_s

    def __len__(self) -> int:
        return len(self.decoded)

    def computed_s(self) -> Floats:
        """[chunks + 1] when the model will have read so many chunks, if it goes on from here. It
        began with the request; where it has fallen behind, its next chunk is done now at best."""
        now_s, front = self.situation.now_s, self.computed
        planned_s = self.table.prefill_s * (1 + PREFILL_MARGIN)
        done_s = planned_s.copy()
        if front < len(self):
            behind_s = max(0.0, now_s - planned_s[front + 1])
            done_s += behind_s
        done_s[: front + 1] = np.minimum(done_s[: front + 1], now_s)
        return done_s

    def loaded_s(self, levels: Ints, rate: float) -> Floats:
        """[chunks + 1] when all chunks from there to the end will be decoded to `levels`."""
        chunks = np.arange(len(self))
        missing = np.maximum(self.table.ends[chunks, levels - 1] - self.bytes, 0)
        work_s = np.where(self.decoded >= levels, 0, self.table.decode_s[chunks, levels - 1])
        link_s = missing[::-1].cumsum()[::-1] / rate + np.where(missing > 0, self.wait_s, 0)
        last_s = np.where(work_s > 0, self.table.decode_s[chunks, levels - 1], 0)
        both_s = np.maximum(link_s + last_s, work_s[::-1].cumsum()[::-1])
        return np.append(np.maximum.accumulate(both_s[::-1])[::-1], 0) + self.situation.now_s

    def in_time(self) -> int:
        """How many chunks the model can read before the deadline."""
        done_s = self.computed_s()
        return int(done_s.searchsorted(self.situation.deadline_s, "right")) - 1

    def soonest(self, levels: Ints, rate: float, least: int = 0) -> tuple[int, float]:
        """How many chunks the model should read so that all is there soonest, the rest loaded at
        `levels`; and when that is. Never later than the model alone, as that is one of the ways."""
        ends_s = np.maximum(self.computed_s(), self.loaded_s(levels, rate))
        first = max(self.computed, least)
        # Of equals the fewest: what need not be computed leaves the machine to others.
        count = first + int(ends_s[first:].argmin())
        return count, float(ends_s[count])

    def enough(self) -> Ints:
        """The fewest levels of each chunk that are good enough; all of them where none is."""
        good = self.table.kld <= self.situation.enough_kld
        return np.where(good.any(axis=1), good.argmax(axis=1) + 1, self.table.levels)

    def kld_with(self, levels: Ints, recompute: int) -> float:
        """The mean over all tokens with these levels, the model's chunks being exact."""
        each = self.table.kld[np.arange(len(self)), np.maximum(levels, 1) - 1]
        return float((self.table.weights * each)[recompute:].sum())
