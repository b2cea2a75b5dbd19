"""Who may hold how much of what there is only so much of: memory, requests, connections.

Half of it is divided evenly among the tenants, each tenant's own part, which nobody else gets. The
other half is common: whoever comes first has it. So a tenant that is alone may use more than half,
and one that comes late finds at least its own part, whatever all the others do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Shares:
    """Pure accounting. `caps`: every tenant, and the most that it may hold; 0: what is there."""

    def __init__(self, total: int, caps: Mapping[str, int]):
        assert caps, "expected at least one tenant"
        self._caps = dict(caps)
        self._own = total // (2 * len(caps))
        self._common = self._common_free = total - self._own * len(caps)
        self._held: Counter[str] = Counter()

    def held(self, tenant: str) -> int:
        return self._held[tenant]

    def held_by_all(self) -> int:
        return sum(self.held(tenant) for tenant in self._caps)

    def held_here(self, tenant: str) -> int:
        """Of that, what this process has given it."""
        return self._held[tenant]

    def most(self, tenant: str) -> int:
        """What this tenant gets if it alone wants any."""
        most = self._own + self._common
        return min(most, self._caps[tenant]) if self._caps[tenant] else most

    def take(self, tenant: str, amount: int, *, common: bool = True) -> bool:
        """Whether the tenant now holds so much more. Without `common` only its own part counts."""
        held = self._held[tenant]
        wanted = self._beyond_own(held + amount) - self._beyond_own(held)
        if held + amount > self.most(tenant) or wanted > (self._common_free if common else 0):
            return False
        self._held[tenant] += amount
        self._common_free -= wanted
        return True

    def give_back(self, tenant: str, amount: int) -> None:
        held = self._held[tenant]
        assert amount <= held, f"{tenant} holds {held}, not {amount}"
        self._held[tenant] -= amount
        self._common_free += self._beyond_own(held) - self._beyond_own(held - amount)

    def _beyond_own(self, held: int) -> int:
        return max(0, held - self._own)
