"""A situation as arrays, and what follows from it whichever policy asks.

Chunks are rows, levels columns. What does not change within a request (sizes, divergences, decoding
and prefill times) is laid out once and kept for the next plan of the same request: planning again
after every arrival must cost far less than the arrival itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from kdn.delivery.plan import Fetch, Offer, Situation, Speeds, shares

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PREFILL_MARGIN = 0.03
"""A model may be this much slower than it was measured, and still be done when planned."""
LATE = 0.1
"""A model that should be done by now is expected to need so much more of the time it took."""
WORTH = 0.75
"""On a shared processor the model reads along if that takes no more of the time without it."""
_KEPT_TABLES = 8


@dataclass(frozen=True, eq=False)
class Table:
    """What stays the same. Chunks with fewer levels repeat their last one, at no bytes and no gain.

    Shapes: [chunks] or [chunks, levels]; `prefill_s` is [chunks + 1], from an empty cache."""

    weights: Floats  # parts of the mean
    levels: Ints
    ends: Floats
    kld: Floats
    decode_s: Floats
    prefill_s: Floats
    fetches: tuple[tuple[Fetch, ...], ...]  # made once: [chunk][levels - 1]

    @classmethod
    def of(cls, offers: tuple[Offer, ...], speeds: Speeds) -> Table:
        width = max(len(offer.level_ends) for offer in offers)
        return cls(
            weights=np.array(shares(offers)),
            levels=np.array([len(offer.level_ends) for offer in offers], np.int64),
            ends=np.array([_padded(offer.level_ends, width) for offer in offers], np.float64),
            kld=np.array([_padded(offer.expected_kld, width) for offer in offers], np.float64),
            fetches=tuple(
                tuple(Fetch(chunk, level) for level in range(1, len(offer.level_ends) + 1))
                for chunk, offer in enumerate(offers)
            ),
            **_times(offers, width, speeds),
        )

    def on(self, offers: tuple[Offer, ...], speeds: Speeds) -> Table:
        """The same on a machine of another speed."""
        return replace(self, **_times(offers, self.ends.shape[1], speeds))


def _times(offers: tuple[Offer, ...], width: int, speeds: Speeds) -> dict[str, Any]:
    borders = accumulate((offer.num_tokens for offer in offers), initial=0)
    kinds = [(offer.num_tokens, len(offer.level_ends)) for offer in offers]
    rows = {  # most chunks are alike
        (tokens, levels): [
            speeds.decode_s(tokens, min(level, levels)) for level in range(1, width + 1)
        ]
        for tokens, levels in set(kinds)
    }
    return {
        "decode_s": np.array([rows[kind] for kind in kinds]),
        "prefill_s": np.array([speeds.prefill_s(0, border) for border in borders]),
    }


def _padded(values: tuple[float, ...], width: int) -> tuple[float, ...]:
    return values + (values[-1],) * (width - len(values))


_tables: OrderedDict[tuple[int, int], tuple[tuple[Offer, ...], Speeds, Table]] = OrderedDict()


def table_of(offers: tuple[Offer, ...], speeds: Speeds) -> Table:
    """The table of these very objects. They are kept with it, so an id is never of another."""
    name = (id(offers), id(speeds))
    kept = _tables.get(name)
    if kept is None or kept[0] is not offers or kept[1] is not speeds:
        before = next((table for own, _, table in _tables.values() if own is offers), None)
        table = Table.of(offers, speeds) if before is None else before.on(offers, speeds)
        kept = (offers, speeds, table)
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
        """[chunks + 1] when the model will have read so many chunks, if it goes on from here."""
        now_s, front, reading = self.situation.now_s, self.computed, self.situation.reading
        took_s = self.table.prefill_s * (1 + PREFILL_MARGIN)
        next_one, next_s = front, now_s
        if reading is not None:
            next_one, next_s = reading.end, reading.began_s + took_s[reading.end] - took_s[front]
            if next_s < now_s:  # slower than it was measured
                next_s = now_s + LATE * (now_s - reading.began_s)
        done_s: Floats = next_s + took_s - took_s[next_one]
        done_s[: next_one + 1] = next_s
        done_s[: front + 1] = now_s
        return done_s

    def loaded_s(self, levels: Ints, rate: float) -> Floats:
        """[chunks + 1] when all chunks from there to the end will be decoded to `levels`."""
        chunks = np.arange(len(self))
        missing = np.maximum(self.table.ends[chunks, levels - 1] - self.bytes, 0)
        work_s = self._work_s(levels)
        link_s = missing[::-1].cumsum()[::-1] / rate + np.where(missing > 0, self.wait_s, 0)
        last_s = np.where(work_s > 0, self.table.decode_s[chunks, levels - 1], 0)
        both_s = np.maximum(link_s + last_s, work_s[::-1].cumsum()[::-1])
        return np.append(np.maximum.accumulate(both_s[::-1])[::-1], 0) + self.situation.now_s

    def _work_s(self, levels: Ints) -> Floats:
        """[chunks] what is left for the decoder."""
        own_s = self.table.decode_s[np.arange(len(self)), levels - 1]
        return np.where(self.decoded >= levels, 0, own_s)

    def _computed_beside_s(self, levels: Ints) -> Floats:
        """[chunks + 1] when the model will have read so many, the others being decoded to `levels`
        on the same processor if it is the same."""
        done_s = self.computed_s()
        if self.situation.shared:
            done_s += np.append(self._work_s(levels)[::-1].cumsum()[::-1], 0)
        return done_s

    def in_time(self) -> int:
        """How many chunks the model can read before the deadline, the others being decoded."""
        done_s = self._computed_beside_s(np.maximum(self.decoded, 1))
        return int(done_s.searchsorted(self.situation.deadline_s, "right")) - 1

    def soonest(self, levels: Ints, rate: float, least: int = 0) -> tuple[int, float]:
        """How many chunks the model should read so that all is there soonest, the rest loaded at
        `levels`; and when that is. Never later than the model alone, as that is one of the ways."""
        ends_s = np.maximum(self._computed_beside_s(levels), self.loaded_s(levels, rate))
        first = max(self.computed, least)
        # Of equals the fewest: what need not be computed leaves the machine to others.
        count = first + int(ends_s[first:].argmin())
        if self.situation.shared and self._is_hardly_worth(ends_s, first, count):
            count = first
        return count, float(ends_s[count])

    def _is_hardly_worth(self, ends_s: Floats, first: int, count: int) -> bool:
        """Whether loading alone takes little longer, and not longer than the model alone: what two
        do on one processor seldom goes as planned."""
        now_s = self.situation.now_s
        without_s, with_s = ends_s[first] - now_s, ends_s[count] - now_s
        return bool(with_s > WORTH * without_s and ends_s[first] <= ends_s[-1])

    def kld_with(self, levels: Ints, recompute: int) -> float:
        """The mean with these levels, the model's chunks being exact."""
        each = self.table.kld[np.arange(len(self)), np.maximum(levels, 1) - 1]
        return float((self.table.weights * each)[recompute:].sum())
