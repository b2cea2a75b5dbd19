"""Small deliveries for the tests of planning, in round figures, to be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

from kdn.delivery.plan import Link, Offer, Progress, Situation

KLD = (0.04, 0.01, 0.001)
ENDS = (100, 300, 900)


@dataclass(frozen=True)
class Steady:
    """A model of so many tokens a second, and a decoder of so many seconds a chunk and level."""

    tokens_per_s: float = 10.0
    level_s: float = 0.0

    def decode_s(self, num_tokens: int, levels: int) -> float:
        return self.level_s * levels

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) / self.tokens_per_s


SPEEDS = Steady()


def offers(count: int) -> tuple[Offer, ...]:
    """Chunks of 10 tokens: a second each for the model."""
    return tuple(Offer(10, ENDS, KLD) for _ in range(count))


def situation(
    count: int = 10,
    *,
    now_s: float = 0.0,
    deadline_s: float = 2.5,
    rate: float = 1000.0,
    low_rate: float | None = None,
    enough_kld: float = 0.0,
    speeds: Steady = SPEEDS,
    progress: dict[int, Progress] | None = None,
) -> Situation:
    return Situation(
        now_s=now_s,
        deadline_s=deadline_s,
        enough_kld=enough_kld,
        offers=offers(count),
        progress=tuple((progress or {}).get(i, Progress()) for i in range(count)),
        link=Link(rate, rate if low_rate is None else low_rate, 0.0),
        speeds=speeds,
    )
