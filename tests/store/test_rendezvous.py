"""Who has which key: evenly, alike for all, and moving no more than it must."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

from kdn.store.rendezvous import rank, seed_of

KEYS = [blake2b(b"%d" % i, digest_size=16).digest() for i in range(6000)]
NODES = [f"http://10.0.0.{i}:8470" for i in range(1, 7)]


def owner(key: bytes, nodes: list[str]) -> str:
    return max(nodes, key=lambda node: rank(key, seed_of(node)))


def test_what_belongs_where_never_changes() -> None:
    """Other clients, and later versions, must choose alike."""
    assert seed_of(NODES[0]) == 0x2F177E93E8B672B9
    assert rank(b"key", 12345) == 0x8A41DD72C7CDCC22
    assert [NODES.index(owner(key, NODES)) for key in KEYS[:8]] == [3, 5, 3, 0, 3, 3, 5, 1]


def test_every_node_has_an_even_part() -> None:
    for nodes in (NODES[:2], NODES[:3], NODES):
        parts = Counter(owner(key, nodes) for key in KEYS)
        even = len(KEYS) / len(nodes)
        assert all(0.88 * even < parts[node] < 1.12 * even for node in nodes), parts


def test_keys_that_differ_little_are_spread_too() -> None:
    parts = Counter(owner(b"name-%d" % i, NODES[:3]) for i in range(3000))
    assert all(850 < part < 1150 for part in parts.values())


def test_when_a_node_goes_only_its_keys_move_and_evenly() -> None:
    before = {key: owner(key, NODES) for key in KEYS}
    after = {key: owner(key, NODES[1:]) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert set(moved) == {key for key in KEYS if before[key] == NODES[0]}
    parts = Counter(after[key] for key in moved)
    even = len(moved) / 5
    assert all(0.75 * even < parts[node] < 1.25 * even for node in NODES[1:]), parts


def test_when_a_node_comes_it_takes_its_part_and_nothing_else_moves() -> None:
    before = {key: owner(key, NODES[:5]) for key in KEYS}
    after = {key: owner(key, NODES) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert all(after[key] == NODES[5] for key in moved)
    assert 0.85 < len(moved) / (len(KEYS) / 6) < 1.15
