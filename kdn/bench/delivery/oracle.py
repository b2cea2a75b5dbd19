"""What could be reached at best by one who knew the link in advance.

`least_s` is a schedule: the time a delivery of the coarsest level takes if the model reads just as
much as pays. `best_kld` is a bound: no schedule that is complete by the deadline is better. Whoever
knows everything lets the model read as many chunks as it can in time (they are exact, and cost link
and decoder nothing) and decodes each other chunk once. Of such a schedule two things are known:

- All its bytes are here before the last decoding begins.
- At any time t, what is being or has been decoded was here: its bytes are at most C(t), what the
  link has brought. The rest is decoded in D - t. So, with any price a of a byte in seconds,
  sum(min(a bytes, decoding)) <= a C(t) + D - t, and the least of the right sides over t counts.

Each is a supply that costs are charged to. Weighted sums of such conditions hold as well, and for
each of them the bound is that of Lagrange: with any price of the supply, the cheapest choice of
every chunk alone, less what the supply is worth, is at most the best that is feasible. That allows
parts of a step. With few chunks, where a step is much, all numbers of chunks per level are tried
as well.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np

from kdn.bench.delivery.simulate import Scenario
from kdn.delivery.outlook import Floats
from kdn.delivery.plan import shares

_SHARES = (0.2, 0.4, 0.6, 0.8)
_BISECTIONS = 30
_FEW_CHUNKS = 40


class Oracle:
    """For one scenario, whatever its deadline."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        chunks = range(len(scenario.offers))
        width = max(len(offer.level_ends) for offer in scenario.offers)
        self._kld = np.full((len(chunks), width), np.inf)
        self._bytes = np.ones_like(self._kld)
        self._decode_s = np.ones_like(self._kld)
        for chunk, offer in enumerate(scenario.offers):
            count = len(offer.level_ends)
            self._kld[chunk, :count] = offer.expected_kld
            self._bytes[chunk, :count] = offer.level_ends
            self._decode_s[chunk, :count] = [scenario.decode_s(chunk, i + 1) for i in range(count)]
        self._kld *= np.array(shares(scenario.offers))[:, None]
        self._prefill_s = np.append(0, np.cumsum([scenario.prefill_s(i) for i in chunks]))

    def least_s(self) -> float:
        """When all can be there, each chunk at its coarsest or read by the model."""
        low, high = 0, len(self._prefill_s) - 1  # the fewest chunks that take the model longer
        while low < high:
            middle = (low + high) // 2
            if self._prefill_s[middle] >= self._load_s(middle):
                high = middle
            else:
                low = middle + 1
        return min(
            max(float(self._prefill_s[count]), self._load_s(count))
            for count in (max(0, low - 1), low)
        )

    def _load_s(self, first: int) -> float:
        """Time to load the coarsest level of the chunks from `first` on: the better of two orders,
        small ones first for a busy decoder, long decodings first for a busy link."""
        sizes, work_s = self._bytes[first:, 0], self._decode_s[first:, 0]
        if not len(sizes):
            return 0.0
        orders = sizes.argsort(), (-work_s).argsort()
        return min(self._pipeline_s(sizes[order], work_s[order]) for order in orders)

    def _pipeline_s(self, sizes: Floats, work_s: Floats) -> float:
        arrived_s = np.array([self._scenario.arrived_s(total) for total in np.cumsum(sizes)])
        return float((arrived_s + work_s[::-1].cumsum()[::-1]).max())

    def best_kld(self, deadline_s: float) -> float:
        """No delivery that is complete by the deadline has a lower mean; infinite if none is."""
        count = int(self._prefill_s.searchsorted(deadline_s, "right")) - 1
        kld = self._kld[count:]
        if not len(kld):
            return 0.0
        costs = self._conditions(count, deadline_s)
        if any(cost[:, 0].sum() > 1 for cost in costs):
            return np.inf
        bounds = [_bound(kld, cost) for cost in costs]
        tightest = costs[int(np.argmax(bounds))]
        bounds += [
            _bound(kld, share * tightest + (1 - share) * cost)
            for cost in costs
            if cost is not tightest
            for share in _SHARES
        ]
        if len(kld) <= _FEW_CHUNKS and (kld == kld[0]).all():
            bounds.append(_whole_bound(kld[0], costs))
        return max(bounds)

    def _conditions(self, first: int, deadline_s: float) -> list[Floats]:
        """What every choice [chunk, level] costs of each supply, as a part of it."""
        sizes, work_s = self._bytes[first:], self._decode_s[first:]
        scenario = self._scenario
        supply = scenario.bytes_by(deadline_s - float(work_s[:, 0].min()))
        times_s, sums = scenario.trace.corners(deadline_s)
        sums = np.maximum(0, sums - scenario.trace.bytes_by(scenario.latency_s))
        pairs = [(sizes, supply)]
        for price in (work_s / sizes).mean(axis=0):
            # After the latency alone the sum may be beyond a corner: one more, where bytes begin.
            ends_s = price * sums + deadline_s - times_s
            begin_s = deadline_s - scenario.latency_s
            pairs.append((np.minimum(price * sizes, work_s), min(ends_s.min(), begin_s)))
        # A little more than there is: what just fits must not fail on the last bit.
        return [cost / max(supply * (1 + 1e-9), 1e-12) for cost, supply in pairs if cost.all()]


def _whole_bound(kld: Floats, costs: list[Floats]) -> float:
    """The best of all numbers of chunks per level that no condition rules out, chunks being equally
    worth. A cost is at least `part[chunk] * unit[level]`, so the least that such numbers cost is
    with the finest levels for the cheapest chunks."""
    chunks, width = costs[0].shape
    finer = np.array(list(combinations_with_replacement(range(chunks, -1, -1), width - 1)))
    # finer[:, i]: chunks with more than i + 1 levels; together with all and none, their differences
    # are the numbers per level.
    bounds = np.hstack((np.full((len(finer), 1), chunks), finer, np.zeros((len(finer), 1), int)))
    possible = np.ones(len(finer), bool)
    for cost in costs:
        unit = cost[0]
        sums = np.append(0, np.cumsum(np.sort((cost / unit).min(axis=1))))
        possible &= -np.diff(sums[bounds], axis=1) @ unit <= 1
    return float((-np.diff(bounds, axis=1)[possible] @ kld).min(initial=np.inf))


def _bound(kld: Floats, costs: Floats) -> float:
    """The highest bound with a supply of 1, over all prices: rising prices raise it as long as the
    cheapest choices need more than there is."""
    low, high = 0.0, 1.0
    while _demand(kld, costs, high)[0] > 1 and high < 1e6:
        low, high = high, 4 * high
    for _ in range(_BISECTIONS):
        price = (low + high) / 2
        if _demand(kld, costs, price)[0] > 1:
            low = price
        else:
            high = price
    return max(0.0, _demand(kld, costs, low)[1], _demand(kld, costs, high)[1])


def _demand(kld: Floats, costs: Floats, price: float) -> tuple[float, float]:
    total = kld + price * costs
    chosen = total.argmin(axis=1)
    rows = np.arange(len(kld))
    return float(costs[rows, chosen].sum()), float(total[rows, chosen].sum() - price)
