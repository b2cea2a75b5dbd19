"""The cost policy: the least worth goes, contexts shrink from their tail, reuse is learnt."""

from __future__ import annotations

import random

from kdn.store.base import Hints
from kdn.store.evict import LRU, CostAware, Policy
from kdn.store.evict.bag import Bag
from kdn.store.evict.cost import MAX_SAVED_S_PER_BYTE, MAX_UNLEARNED
from kdn.store.evict.reuse import PRIOR_OBJECTS, Reuse
from tests.store.policies import chain, drain, fill


def test_cost_is_like_lru_while_nothing_else_is_known() -> None:
    policy = CostAware()
    for key in "abcdefgh":
        policy.add(key.encode(), 10, Hints(saved_s=1.0))
    assert drain(policy) == "abcdefgh"


def test_cost_keeps_what_saves_more_seconds_per_byte() -> None:
    policy = CostAware()
    policy.add(b"a", 10_000, Hints(saved_s=4.0))
    policy.add(b"b", 1_000_000, Hints(saved_s=4.0))
    policy.add(b"c", 10_000, Hints(saved_s=0.1))
    policy.add(b"d", 10_000, Hints(saved_s=9.0))
    policy.add(b"n", 10_000, Hints())
    assert drain(policy) == "bcadn"


def test_cost_believes_no_more_seconds_than_are_plausible() -> None:
    policy = CostAware()
    policy.add(b"a", 10_000, Hints(saved_s=1e9))
    policy.add(b"b", 10_000, Hints(saved_s=MAX_SAVED_S_PER_BYTE * 10_000))
    policy.add(b"n", 10_000, Hints())
    assert drain(policy) == "abn", "worth the same, so the older goes first"


def test_cost_takes_bounded_memory_where_nothing_has_to_go() -> None:
    policy = CostAware()
    fill(policy, "ab")
    for _ in range(3 * MAX_UNLEARNED):
        policy.touch(b"a")
    waiting = sum(len(queue) for row in policy._reuse._waiting for queue in row)
    assert waiting < 1.5 * MAX_UNLEARNED


def test_cost_contexts_shrink_from_their_tail() -> None:
    policy = CostAware()
    chain(policy, "abcd")
    assert drain(policy) == "dcba"


def test_cost_a_parent_outlives_children_that_came_before_it() -> None:
    policy = CostAware()
    policy.add(b"c", 10, Hints(b"b", 1e9))
    policy.add(b"b", 10, Hints(b"a", 0.0))
    policy.add(b"a", 10, Hints(None, 0.0))
    assert drain(policy) == "cba"


def test_cost_a_shared_prefix_stays_while_one_context_needs_it() -> None:
    policy = CostAware()
    chain(policy, "abc")
    policy.add(b"x", 10, Hints(b"a", 1.0))
    policy.add(b"n", 10, Hints())
    order = drain(policy)
    assert order.index("a") > max(order.index(key) for key in "bcx")


def test_cost_a_childs_use_keeps_its_ancestors() -> None:
    policy = CostAware()
    chain(policy, "ab")
    chain(policy, "xy")
    for _ in range(50):
        policy.add(b"n", 10, Hints(saved_s=1.0))  # time passes
    policy.touch(b"b")
    assert drain(policy) == "yxban"


def test_cost_what_is_left_without_its_parent_goes_first() -> None:
    policy = CostAware()
    chain(policy, "ab")
    policy.add(b"m", 10, Hints(saved_s=1e9))
    assert policy.victim() == b"b"
    policy.remove(b"b")
    policy.add(b"c", 10, Hints(b"b", 1e9))
    policy.add(b"n", 10, Hints())
    assert policy.victim() == b"c"


def test_cost_what_was_once_precious_leaves() -> None:
    policy = CostAware()
    policy.add(b"precious", 1_000_000, Hints(saved_s=100.0))
    left_after = 0
    for number in range(20_000):
        policy.add(b"%d" % number, 1_000_000, Hints(saved_s=1.0))
        if number >= 20:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
            if victim == b"precious":
                left_after = number
                break
    assert 20 < left_after < 19_999


def test_cost_a_ring_of_parents_still_leaves() -> None:
    policy = CostAware()
    policy.add(b"s", 10, Hints(b"s"))
    for key, parent in (b"ab", b"bc", b"ca"):
        policy.add(bytes([key]), 10, Hints(bytes([parent])))
    assert sorted(drain(policy)) == ["a", "b", "c", "s"]


def test_cost_a_held_tail_keeps_its_prefix() -> None:
    policy = CostAware()
    chain(policy, "abc")
    policy.hold(b"b")
    assert drain(policy) == "c"
    policy.release(b"b")
    assert drain(policy) == "ba"


def test_cost_learns_to_keep_what_comes_back_late() -> None:
    """A loop one and a half times as long as the cache: LRU never hits."""

    def hits(policy: Policy) -> int:
        present: set[bytes] = set()
        count = 0
        for turn in range(9000):
            key = b"%d" % (turn % 150)
            count += key in present
            policy.add(key, 10, Hints(saved_s=1.0))
            present.add(key)
            if len(present) > 100:
                victim = policy.victim()
                assert victim is not None
                policy.remove(victim)
                present.remove(victim)
        return count

    assert hits(LRU()) == 0
    assert hits(CostAware()) > 2000


def test_without_knowledge_the_index_falls_with_age() -> None:
    reuse = Reuse()
    indices = [reuse.index(1, age) for age in (0, 1, 2, 3, 7, 100, 1000, 10**6, 2**40)]
    assert indices == sorted(indices, reverse=True)
    assert indices[-1] > 0


def test_the_index_knows_when_uses_come() -> None:
    """Every object is used 1,000 after its last use: the nearer to it the better, and no later."""
    reuse = Reuse()
    last: dict[bytes, int] = {}
    for now in range(20_000):
        key = b"%d" % (now % 1000)
        if key in last:
            reuse.ended(3, now - last[key])
        last[key] = now
        reuse.began(key, 3, now)
        if now % 500 == 499:
            reuse.learn(now, last.get)
    assert reuse.index(3, 600) > 4 * reuse.index(3, 4000)
    assert reuse.index(3, 600) > reuse.index(3, 100) > reuse.index(3, 10)
    assert PRIOR_OBJECTS < 1000, "what was seen outweighs the prior here"


def test_a_bag_draws_only_members() -> None:
    bag, rng = Bag(), random.Random(1)
    for number in range(100):
        bag.add(b"%d" % number)
        bag.add(b"%d" % number)
    for number in range(0, 100, 2):
        bag.discard(b"%d" % number)
        bag.discard(b"%d" % number)
    odd = {b"%d" % number for number in range(1, 100, 2)}
    assert set(bag.sample(50, rng)) == odd
    drawn = set(bag.sample(10, rng))
    assert 5 <= len(drawn) <= 10
    assert drawn <= odd
