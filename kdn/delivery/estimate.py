"""How fast the link and this machine are, for the planner: known speeds, corrected by measurement.

The link, from the bytes as they arrive, and how sure that is. Time counts only while something is
under way: the time between a request and its first byte is latency, and time without any request
does not count at all. The rest is cut into slots. They are long enough that the bursts of a socket
average out, and short enough that a change is seen: a fraction of the time measured so far, so the
same code serves transfers of ten milliseconds and of minutes. Older slots count less. The spread of
the slots, and how few they are, show how far the near future may fall below their mean.

The machine, from how long decoding takes. A planner keeps what it derives from a `Speeds` object,
so these never change: `Gauge` makes a new one when what was measured has moved away from what the
last one said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kdn.delivery.plan import Link, Speeds

UNKNOWN = Link(rate=12.5e6, low_rate=0.25e6, latency_s=0.05)
"""Assumed before anything is measured: probably 100 Mbit/s, hardly less than 2 Mbit/s."""

DECODE_S_PER_TOKEN = 1e-4
"""Assumed until something was decoded: the speed of SmolLM2 on two cores."""
NEVER_S_PER_TOKEN = 1e3
DRIFT = 0.2
MAX_RATIO = 4.0

MIN_SLOT_S = 0.001
BURST_S = 0.003
"""Bytes that come this soon after the first ones were waiting in a socket: they say nothing about
the link's speed."""
SLOTS_PER_MEMORY = 16
MAX_MEMORY_S = 5.0
_TENTH = 1.28  # standard deviations below which a tenth of a normal distribution lies


class Estimator:
    """Throughput with uncertainty. Times are of any one clock and never go back."""

    def __init__(self, prior: Link = UNKNOWN) -> None:
        self._prior = prior
        self._latency_s = prior.latency_s
        self._asked_s: float | None = None  # a request waits for its first byte
        self._last_s: float | None = None  # bytes have flowed without a gap until here
        self._first_s = 0.0  # and since then
        self._busy_s = 0.0
        self._slot_bytes = 0
        self._slot_s = 0.0
        # Sums over closed slots, older ones fading: weight, squared weight, bytes, rate moments.
        self._weight_s = 0.0
        self._weight2 = 0.0
        self._bytes = 0.0
        self._rate2 = 0.0

    def started(self, t_s: float) -> None:
        """A request was sent and nothing else is under way."""
        self._asked_s = t_s
        self._last_s = None

    def idle(self, t_s: float) -> None:
        """All that was asked for is here: until the next request, silence means nothing."""
        self._asked_s = None
        self._last_s = None

    def add(self, num_bytes: int, t_s: float) -> None:
        """Bytes arrived; none of them (`num_bytes` 0) is news too: time went by."""
        if self._last_s is None:
            self._first(num_bytes, t_s)
            return
        spent_s = max(0.0, t_s - self._last_s)
        self._last_s = t_s
        if t_s - self._first_s < BURST_S:
            return
        self._slot_bytes += num_bytes
        self._slot_s += spent_s
        self._busy_s += spent_s
        if self._slot_s >= self._slot_length_s():
            self._close_slot()

    def link(self) -> Link:
        weight_s = self._weight_s + self._slot_s
        num_bytes = self._bytes + self._slot_bytes
        if weight_s <= 0 or num_bytes <= 0:
            return self._before_any(weight_s)
        rate = num_bytes / weight_s
        if self._weight_s <= 0:
            return Link(rate, rate * math.exp(-_TENTH), self._latency_s)
        mean = self._bytes / self._weight_s
        variation2 = max(0.0, self._rate2 / self._weight_s / mean**2 - 1) if mean else 1.0
        slots = self._weight_s**2 / self._weight2
        deviation = math.sqrt(math.log1p(variation2) / 2 + 0.5 / slots)
        return Link(rate, rate * math.exp(-_TENTH * deviation), self._latency_s)

    def _before_any(self, waited_s: float) -> Link:
        """Nothing came yet. The longer that lasts, the less is to be hoped for."""
        late = 1 + waited_s / max(self._latency_s, MIN_SLOT_S)
        return Link(self._prior.rate / late, self._prior.low_rate / late, self._latency_s)

    def _first(self, num_bytes: int, t_s: float) -> None:
        """The first bytes after a gap tell the latency; how long they took, nobody knows."""
        if self._asked_s is not None:
            sample_s = max(0.0, t_s - self._asked_s)
            first = self._latency_s == self._prior.latency_s
            self._latency_s = sample_s if first else 0.75 * self._latency_s + 0.25 * sample_s
            self._asked_s = None
        self._first_s = self._last_s = t_s

    def _memory_s(self) -> float:
        return min(MAX_MEMORY_S, max(4 * MIN_SLOT_S, self._busy_s / 2))

    def _slot_length_s(self) -> float:
        return max(MIN_SLOT_S, self._memory_s() / SLOTS_PER_MEMORY)

    def _close_slot(self) -> None:
        fading = math.exp(-self._slot_s / self._memory_s())
        rate = self._slot_bytes / self._slot_s
        self._weight_s = fading * self._weight_s + self._slot_s
        self._weight2 = fading**2 * self._weight2 + self._slot_s**2
        self._bytes = fading * self._bytes + self._slot_bytes
        self._rate2 = fading * self._rate2 + self._slot_s * rate**2
        self._slot_bytes = 0
        self._slot_s = 0.0


@dataclass(frozen=True)
class Told:
    """Speeds of this machine as someone measured them before, corrected by a factor."""

    told: Speeds | None = None
    can_compute: bool = False
    factor: float = 1.0
    """Decoding takes this many times as long as `told` says."""

    def decode_s(self, num_tokens: int, levels: int) -> float:
        return self.factor * self.plain_decode_s(num_tokens, levels)

    def plain_decode_s(self, num_tokens: int, levels: int) -> float:
        if self.told is None:
            return DECODE_S_PER_TOKEN * num_tokens
        return max(self.told.decode_s(num_tokens, levels), 1e-9)

    def prefill_s(self, start: int, end: int) -> float:
        if end <= start:
            return 0.0
        if self.told is None or not self.can_compute:
            return NEVER_S_PER_TOKEN * (end - start)
        return self.told.prefill_s(start, end)


class Gauge:
    def __init__(self, told: Speeds | None, can_compute: bool) -> None:
        self.speeds = Told(told, can_compute)
        self._factor = 1.0
        self._samples = 0 if told is None else 1

    def decoded(self, num_tokens: int, levels: int, took_s: float) -> None:
        """What was told counts as the first sample; one that was held up says little."""
        ratio = min(took_s / self.speeds.plain_decode_s(num_tokens, levels), MAX_RATIO)
        self._samples += 1
        self._factor += (ratio - self._factor) * max(1 / self._samples, 0.25)
        if abs(self._factor - self.speeds.factor) > DRIFT * self.speeds.factor:
            self.speeds = replace(self.speeds, factor=self._factor)
