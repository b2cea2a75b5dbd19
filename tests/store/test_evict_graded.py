"""The policy that cuts: what goes, what is cut, and what it learns of its readers."""

from __future__ import annotations

import random

from kdn.store.base import Hints
from kdn.store.evict import CostAware, Graded, Owners, PerOwner, Retention
from kdn.store.evict.cost import MIN_LEARN_EVERY
from kdn.store.evict.demand import Demand

CUTS = (4, 12, 30, 100)
WANTED = 30
SAVED_S = 1e-3
"""Little enough to be believed of so few bytes."""


def add(policy: Graded | PerOwner | Retention, key: bytes, parent: bytes | None = None) -> None:
    policy.add(key, CUTS[-1], Hints(parent, SAVED_S, CUTS))


def steps(policy: Graded, count: int) -> list[tuple[bytes, int]]:
    """What makes room next, and how much of it stays."""
    found = []
    for _ in range(count):
        victim = policy.victim()
        assert victim is not None
        assert policy.victim() == victim, "asking changes nothing"
        kept = policy.kept_bytes(victim)
        found.append((victim, kept))
        if kept:
            policy.cut(victim, kept, kept)
        else:
            policy.remove(victim)
    return found


def test_the_finest_levels_of_all_go_before_any_object() -> None:
    policy = Graded()
    for key in (b"a", b"b", b"c", b"d"):
        add(policy, key)
    assert steps(policy, 3) == [(b"a", WANTED), (b"b", WANTED), (b"c", WANTED)]
    assert steps(policy, 2) == [(b"a", 0), (b"b", 0)], "the newest stays whole"


def test_a_parent_may_be_cut_but_goes_after_its_children() -> None:
    policy = Graded()
    for key, parent in ((b"a", None), (b"b", b"a"), (b"c", b"b"), (b"x", None)):
        add(policy, key, parent)
    assert steps(policy, 3) == [(b"a", WANTED), (b"b", WANTED), (b"c", WANTED)]
    assert steps(policy, 3) == [(b"c", 0), (b"b", 0), (b"a", 0)]


def test_what_lost_its_parent_goes_at_once() -> None:
    policy = Graded()
    for key, parent in ((b"a", None), (b"b", b"a"), (b"x", None)):
        add(policy, key, parent)
    policy._ghosts[b"a"] = policy._objects[b"a"]
    policy.remove(b"a")
    policy._ghosts[b"a"] = policy._objects[b"x"]
    assert steps(policy, 1) == [(b"b", 0)]


def test_an_object_without_cuts_goes_as_a_whole() -> None:
    policy = Graded()
    policy.add(b"state", 100, Hints(None, SAVED_S))
    add(policy, b"x")
    assert steps(policy, 1) == [(b"state", 0)]


def test_what_came_cut_is_known_to_be() -> None:
    policy = Graded()
    add(policy, b"a")
    policy.cut(b"a", WANTED, WANTED)
    add(policy, b"b")
    add(policy, b"c")
    assert steps(policy, 1) == [(b"b", WANTED)]


def test_where_readers_want_all_levels_objects_stay_whole() -> None:
    policy, plain = Graded(random.Random(1)), CostAware(random.Random(1))
    for number in range(40):
        add(policy, b"%d" % number)
        plain.add(b"%d" % number, CUTS[-1], Hints(None, SAVED_S, CUTS))
    policy.cut(b"7", WANTED, WANTED)
    for _ in range(MIN_LEARN_EVERY // 10):
        for number in range(20, 40):
            policy.touch(b"%d" % number, 0, CUTS[-1])
            plain.touch(b"%d" % number)
    assert steps(policy, 1) == [(b"7", 0)], "nobody has a use for what is left of it"
    assert all(kept == 0 for _, kept in steps(policy, 5))


def test_where_readers_want_little_more_is_cut() -> None:
    policy = Graded()
    for number in range(8):
        add(policy, b"%d" % number)
    for _ in range(MIN_LEARN_EVERY):
        for number in range(8):
            policy.touch(b"%d" % number, 0, 12)
    found = steps(policy, 7)
    assert {kept for _, kept in found} <= {12, WANTED}
    assert 12 in {kept for _, kept in found + steps(policy, 7)}


def test_what_is_held_is_neither_cut_nor_dropped() -> None:
    policy = Retention(Graded())
    policy.retain(b"name", [b"a"])
    add(policy, b"a")
    add(policy, b"b")
    add(policy, b"c")
    assert policy.may_cut
    assert policy.victim() == b"b"
    assert policy.kept_bytes(b"b") == WANTED
    policy.remove(b"b")
    assert policy.victim() == b"c", "the newest, if nothing else may go"


def test_shares_count_what_is_left() -> None:
    policy = PerOwner(Graded, Owners(lambda key: key[:1], {b"a": 1.0, b"b": 1.0}))
    for key in (b"a1", b"a2", b"a3", b"b1", b"b2"):
        add(policy, key)
    victim = policy.victim()
    assert victim == b"a1", "of the owner who holds the most"
    kept = policy.kept_bytes(victim)
    assert kept == WANTED
    policy.cut(victim, kept, kept)
    policy.cut(b"a2", WANTED, WANTED)
    assert policy.victim() == b"b1", "now the other holds more"


def test_demand_counts_bytes_however_they_are_read() -> None:
    whole, pieces = Demand(), Demand()
    for _ in range(200):
        whole.note(CUTS, 0, 30)
        for start, end in ((0, 4), (4, 7), (7, 12), (12, 20), (20, 30)):
            pieces.note(CUTS, start, end)
    assert whole.content()[:4] == pieces.content()[:4]
    content = whole.content()
    assert content[0] == 1.0
    assert content[1] > 0.95, "hardly anybody wants the last level"
    assert content[2] < 0.3
    assert list(content) == sorted(content, reverse=True)
