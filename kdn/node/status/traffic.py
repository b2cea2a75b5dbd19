"""What each tenant asks for and gets, counted as requests pass.

Every count is one addition to a plain number, made by the event loop alone. `told` turns them into
JSON, so that the owner of a node with workers can add up what all of its processes counted.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

BOUNDS_S = tuple(5e-5 * 1.25**step for step in range(74))
"""Latencies are counted in steps of 25 %, from 50 microseconds to ten minutes."""
RECENT_S = 60.0
"""Latencies are those of the last one to two such times."""
MAX_SAMPLES = 16
"""Reads of a tenant that are looked at, between two looks, for the levels they ask for."""
MAX_SHOWN = 50
"""Deliveries that are listed; the rest is only counted."""


class Delivery:
    """A response that is being sent."""

    __slots__ = ("asked_bytes", "began_s", "client", "sent_bytes", "tenant")

    def __init__(self, tenant: str, client: str, asked_bytes: int):
        self.tenant, self.client, self.asked_bytes = tenant, client, asked_bytes
        self.began_s, self.sent_bytes = 0.0, 0


class TenantTraffic:
    """One tenant's, since this process started."""

    __slots__ = (
        "before", "errors", "keys_found", "keys_missing", "latencies", "levels", "reads_found",
        "reads_missing", "requests", "samples", "status_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = 0
        self.status_bytes = 0  # of what this package told: looking at a node is no traffic
        self.keys_found = self.keys_missing = 0  # of lookups
        self.reads_found = self.reads_missing = 0  # spans
        self.latencies = [0] * (len(BOUNDS_S) + 1)
        self.before = [0] * (len(BOUNDS_S) + 1)
        self.errors: Counter[str] = Counter()
        self.levels: Counter[int] = Counter()
        self.samples: deque[tuple[bytes, int, int]] = deque(maxlen=MAX_SAMPLES)

    def looked_up(self, found: int, missing: int) -> None:
        self.keys_found += found
        self.keys_missing += missing

    def read(self, found: int, missing: int = 0) -> None:
        self.reads_found += found
        self.reads_missing += missing

    def asked(self, key: bytes, end: int, spans: int) -> None:
        """A chunk was asked for up to that byte, in a request of so many spans."""
        self.samples.append((key, end, spans))

    def told(self) -> Json:
        return {
            "requests": self.requests,
            "status_bytes": self.status_bytes,
            "keys_found": self.keys_found,
            "keys_missing": self.keys_missing,
            "reads_found": self.reads_found,
            "reads_missing": self.reads_missing,
            "latencies": [new + old for new, old in zip(self.latencies, self.before, strict=True)],
            "errors": dict(self.errors),
            "levels": {str(level): number for level, number in self.levels.items()},
        }


class Traffic:
    """Of one process. Tenants are those of the node's settings, so they are few."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, TenantTraffic] = {}
        self._aged_s = clock()
        self.deliveries: set[Delivery] = set()
        self.errors: Counter[str] = Counter()
        """By code, of all requests, also of those whose tenant is not known."""

    def of(self, tenant: str) -> TenantTraffic:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = TenantTraffic()
        return found

    def answered(self, tenant: str, status: int, seconds: float) -> None:
        """A request ended. Answers that were cut (status 0) say nothing of how fast the node is."""
        one = self.of(tenant)
        one.requests += 1
        if status:
            one.latencies[bisect_left(BOUNDS_S, seconds)] += 1

    def refused(self, tenant: str | None, code: str) -> None:
        self.errors[code] += 1
        if tenant is not None:
            self.of(tenant).errors[code] += 1

    def begin(self, delivery: Delivery) -> None:
        delivery.began_s = self._clock()
        self.deliveries.add(delivery)

    def end(self, delivery: Delivery) -> None:
        self.deliveries.discard(delivery)

    def told(self) -> Json:
        """All of it. Called every few seconds, which is also when latencies grow old."""
        now_s = self._clock()
        if now_s - self._aged_s >= RECENT_S:
            self._aged_s = now_s
            for one in self._tenants.values():
                one.before, one.latencies = one.latencies, [0] * len(one.latencies)
        longest = sorted(self.deliveries, key=lambda one: one.began_s)[:MAX_SHOWN]
        return {
            "tenants": {name: one.told() for name, one in self._tenants.items()},
            "errors": dict(self.errors),
            "num_deliveries": len(self.deliveries),
            "deliveries": [
                {
                    "tenant": one.tenant,
                    "client": one.client,
                    "sent_bytes": one.sent_bytes,
                    "asked_bytes": one.asked_bytes,
                    "seconds": round(now_s - one.began_s, 3),
                }
                for one in longest
            ],
        }

    def take_samples(self, most: int) -> list[tuple[TenantTraffic, tuple[bytes, int, int]]]:
        """Reads to look at, of every tenant in turn."""
        taken: list[tuple[TenantTraffic, tuple[bytes, int, int]]] = []
        waiting = [one for one in self._tenants.values() if one.samples]
        while waiting and len(taken) < most:
            for one in waiting:
                taken.append((one, one.samples.pop()))
            waiting = [one for one in waiting if one.samples]
        for one in self._tenants.values():
            one.samples.clear()
        return taken[:most]


def quantile_s(latencies: list[int], share: float) -> float | None:
    """The latency that this share of requests did not exceed; None if there were none."""
    left = share * sum(latencies)
    if not left:
        return None
    for number, bound_s in zip(latencies, BOUNDS_S, strict=False):
        left -= number
        if left <= 0:
            return bound_s
    return BOUNDS_S[-1]
