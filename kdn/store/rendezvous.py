"""Which of several nodes a key belongs to: rendezvous hashing.

Every node gets a number for every key, and the one with the highest has the key. So all clients
choose alike without talking to each other; when a node goes, only its keys move, evenly to all
others; when one comes, it takes an equal part of each. What a key hashes to is part of the
protocol between clients: it must not change between versions, or caches are filled anew.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest


def seed_of(name: str) -> int:
    """Of a node, by a name that all clients know it under."""
    return xxh3_64_intdigest(name.encode())


def rank(key: bytes, seed: int) -> int:
    """How much this node is the one for this key."""
    return xxh3_64_intdigest(key, seed)
