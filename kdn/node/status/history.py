"""The last minutes of a node: totals taken every two seconds, and the rates between them.

So whoever opens the dashboard sees at once what happened before, and a total becomes a rate without
anybody counting twice. A process that starts again counts from zero: no rate is negative.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kdn.node.status.traffic import Json

STEP_S = 2.0
NUM_STEPS = 150
RATE_S = 5.0
"""A rate is the mean of at least such a time, so that it can be read."""
TROUBLE_S = 300.0
"""Faults of the node show as a problem for so long."""
OWN_CODES = ("internal", "store_error", "no_space", "overloaded", "centre_unreachable")
"""Errors that are the node's own, not those of who asked."""


class Sample(NamedTuple):
    at_s: float
    sent_bytes: int
    received_bytes: int
    requests: int
    found: int
    missing: int
    errors: dict[str, int]
    """By code: the node's own."""


def sample_of(counts: Json, at_s: float) -> Sample:
    tenants = counts["tenants"].values()
    total = {
        name: sum(one[name] for one in tenants)
        for name in ("sent_bytes", "received_bytes", "requests", *FOUND, *MISSING)
    }
    return Sample(
        at_s, total["sent_bytes"], total["received_bytes"], total["requests"],
        *found_of(total), {code: counts["errors"].get(code, 0) for code in OWN_CODES},
    )  # fmt: skip


FOUND, MISSING = ("keys_found", "reads_found"), ("keys_missing", "reads_missing")


def found_of(total: Json) -> tuple[int, int]:
    """What was found and what was not: of lookups, where there are any, since clients read only
    what they have looked up; else of reads."""
    looked_up = total["keys_found"], total["keys_missing"]
    return looked_up if sum(looked_up) else (total["reads_found"], total["reads_missing"])


class History:
    """Of all processes of a node together."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=NUM_STEPS + 1)
        # Of tenants only the last few: sent bytes and requests.
        self._tenants: deque[tuple[float, dict[str, tuple[int, int]]]] = deque(maxlen=6)

    def add(self, counts: Json, at_s: float) -> None:
        self._samples.append(sample_of(counts, at_s))
        each = {name: _flow(one) for name, one in counts["tenants"].items()}
        self._tenants.append((at_s, each))

    def rates(self, now: Sample) -> Json:
        before = self._before(now.at_s - RATE_S)
        seconds = now.at_s - before.at_s if before else 0.0
        if before is None or seconds <= 0:
            return dict.fromkeys(RATES, 0.0)
        return _rates(before, now)

    def tenant_rates(self, tenant: str, counts: Json, now_s: float) -> Json:
        old = [one for one in self._tenants if one[0] <= now_s - RATE_S] or list(self._tenants)[:1]
        if not old or now_s <= old[-1][0]:
            return {"sent_bytes_per_s": 0.0, "requests_per_s": 0.0}
        at_s, each = old[-1]
        before = each.get(tenant, (0, 0))
        sent, requests = (
            max(0, new - old) / (now_s - at_s)
            for new, old in zip(_flow(counts), before, strict=True)
        )
        return {"sent_bytes_per_s": round(sent, 1), "requests_per_s": round(requests, 2)}

    def told(self) -> Json:
        """The rates of each step, the oldest first."""
        steps = [
            _rates(one, other)
            for one, other in zip(self._samples, list(self._samples)[1:], strict=False)
        ]
        return {"step_s": STEP_S, **{name: [step[name] for step in steps] for name in RATES}}

    def recent_errors(self, now: Sample) -> dict[str, int]:
        """The node's own errors of the last minutes, by code."""
        before = self._before(now.at_s - TROUBLE_S) or now
        grown = {code: now.errors[code] - before.errors[code] for code in OWN_CODES}
        return {code: number for code, number in grown.items() if number > 0}

    def _before(self, at_s: float) -> Sample | None:
        """The last sample up to then, or else the first."""
        old = [sample for sample in self._samples if sample.at_s <= at_s]
        return old[-1] if old else next(iter(self._samples), None)


RATES = (
    "sent_bytes_per_s", "received_bytes_per_s", "requests_per_s", "hit_ratio", "errors_per_s",
)  # fmt: skip


def _rates(before: Sample, now: Sample) -> Json:
    seconds = max(now.at_s - before.at_s, 1e-6)
    sent, received, requests = (
        round(max(0, new - old) / seconds, 2)
        for new, old in zip(_first(now), _first(before), strict=True)
    )
    found, missing = max(0, now.found - before.found), max(0, now.missing - before.missing)
    errors = max(0, sum(now.errors.values()) - sum(before.errors.values()))
    return {
        "sent_bytes_per_s": sent,
        "received_bytes_per_s": received,
        "requests_per_s": requests,
        "hit_ratio": round(found / (found + missing), 4) if found + missing else None,
        "errors_per_s": round(errors / seconds, 2),
    }


def _first(sample: Sample) -> Sequence[int]:
    return sample.sent_bytes, sample.received_bytes, sample.requests


def _flow(counts: Json) -> tuple[int, int]:
    return counts["sent_bytes"], counts["requests"]
