"""Policies in tests: keys as letters, and what leaves in which order."""

from __future__ import annotations

from kdn.store.base import Hints
from kdn.store.evict import POLICIES, Policy

NAMES = sorted(POLICIES)


def fill(policy: Policy, keys: str, size_bytes: int = 10) -> None:
    for key in keys:
        policy.add(key.encode(), size_bytes, Hints())


def chain(policy: Policy, keys: str, saved_s: float = 1.0) -> None:
    """Each the child of the one before."""
    parent = None
    for key in keys:
        policy.add(key.encode(), 10, Hints(parent, saved_s))
        parent = key.encode()


def drain(policy: Policy) -> str:
    """All victims, in their order."""
    order = ""
    while (victim := policy.victim()) is not None:
        assert policy.victim() == victim, "asking changes nothing"
        policy.remove(victim)
        order += victim.decode()
    return order
