"""What a store elsewhere was asked for: the things that clouds write bills for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Costs:
    """Since the store was opened. Requests that were tried again count again."""

    requests: Counter[str] = field(default_factory=Counter)
    """By kind: `get`, `head`, `put`, `copy`, `delete`, `list`."""
    sent_bytes: int = 0
    """Bodies only: of objects, not of heads around them."""
    received_bytes: int = 0

    def copy(self) -> Costs:
        return Costs(Counter(self.requests), self.sent_bytes, self.received_bytes)


def total(each: Iterable[Costs]) -> Costs:
    """What all of them cost together."""
    result = Costs()
    for costs in each:
        result.requests.update(costs.requests)
        result.sent_bytes += costs.sent_bytes
        result.received_bytes += costs.received_bytes
    return result
