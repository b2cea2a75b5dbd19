"""Which object leaves next when a store is full: pure policies, no I/O, no clock.

`open_policy` wraps a policy in `PerOwner`, where a store has several owners, and in `Retention`,
which adds retention by name.
"""

from __future__ import annotations

from kdn.errors import UnsupportedError
from kdn.store.evict.base import Policy
from kdn.store.evict.cost import CostAware
from kdn.store.evict.graded import Graded
from kdn.store.evict.lru import LRU
from kdn.store.evict.owners import Owners, PerOwner
from kdn.store.evict.retention import Retention
from kdn.store.evict.s3fifo import S3Fifo

__all__ = [
    "LRU", "POLICIES", "CostAware", "Graded", "Owners", "PerOwner", "Policy", "Retention", "S3Fifo",
    "open_policy", "why_evicted",
]  # fmt: skip

POLICIES: dict[str, type[Policy]] = {
    "lru": LRU, "s3fifo": S3Fifo, "cost": CostAware, "graded": Graded,
}  # fmt: skip


def open_policy(name: str, owners: Owners | None = None, *, may_cut: bool = True) -> Retention:
    """A policy by its name, with fair shares if there are `owners`. Not `may_cut`: it keeps objects
    whole, for caches of a store that has all of them."""
    if name not in POLICIES:
        raise UnsupportedError(f"expected a policy of {', '.join(POLICIES)}, found {name!r}")
    kind = POLICIES[name]
    if kind.may_cut and not may_cut:
        kind = CostAware
    policy = PerOwner(kind, owners) if owners else kind()
    return Retention(policy)


def why_evicted(policy: Policy, victim: bytes) -> str:
    """Of an object that a full store drops (`base.EVICTED`)."""
    return "share" if policy.is_held(victim) else "room"
