"""How fast this machine decodes and reads, for the planner: as told, corrected by what is measured.

A planner keeps what it derives from a `Speeds` object, so these never change: `Gauge` makes a new
one when what was measured has moved away from what the last one said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kdn.delivery.plan import Speeds

DECODE_S_PER_TOKEN = 1e-4
"""Until something was decoded; SmolLM2 on two cores."""
NEVER_S_PER_TOKEN = 1e3
DRIFT = 0.2
MAX_RATIO = 4.0


@dataclass(frozen=True)
class Told:
    """`Speeds`: what whoever measured this machine says; None: nobody did."""

    told: Speeds | None = None
    can_compute: bool = False
    factor: float = 1.0
    """Decoding takes so many times what was told."""

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
