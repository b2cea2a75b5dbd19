"""Eviction policies: exact orders, and retention by name."""

from __future__ import annotations

import pytest

from kdn.errors import UnsupportedError
from kdn.store.base import Hints
from kdn.store.evict import LRU, POLICIES, S3Fifo, open_policy
from tests.store.policies import NAMES, chain, drain, fill


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="fifo"):
        open_policy("fifo")


# what all policies have in common


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_added_leaves_once(name: str) -> None:
    policy = open_policy(name)
    assert policy.victim() is None
    fill(policy, "abcde")
    policy.remove(b"c")
    assert sorted(drain(policy)) == sorted("abde")


@pytest.mark.parametrize("name", NAMES)
def test_unknown_keys_are_ignored(name: str) -> None:
    policy = POLICIES[name]()
    for method in (policy.touch, policy.remove, policy.hold, policy.release):
        method(b"x")
    assert policy.victim() is None


@pytest.mark.parametrize("name", NAMES)
def test_adding_again_is_a_use_not_a_second_object(name: str) -> None:
    policy = POLICIES[name]()
    fill(policy, "aba")
    assert sorted(drain(policy)) == ["a", "b"]


@pytest.mark.parametrize("name", NAMES)
def test_the_newcomer_is_named_last(name: str) -> None:
    policy = POLICIES[name]()
    for size, key in enumerate(b"abcdefgh"):
        policy.add(bytes([key]), 10 + 1000 * size, Hints(saved_s=1.0))
        for _ in range(3):
            policy.touch(bytes([key]))
    policy.add(b"new", 100_000, Hints())
    order = []
    while (victim := policy.victim()) is not None:
        policy.remove(victim)
        order.append(victim)
    assert order[-1] == b"new"
    assert len(order) == 9


@pytest.mark.parametrize("name", NAMES)
def test_what_is_held_is_not_named(name: str) -> None:
    policy = POLICIES[name]()
    fill(policy, "abcd")
    policy.hold(b"a")
    policy.hold(b"b")
    assert policy.victim() == b"c"
    policy.remove(b"c")
    assert policy.victim() == b"d"
    policy.remove(b"d")
    assert policy.victim() is None
    policy.release(b"b")
    assert policy.victim() == b"b"
    policy.remove(b"a")
    policy.add(b"a", 10, Hints())
    assert sorted(drain(policy)) == ["a", "b"], "a hold ends with its object"


# LRU


def test_lru_order() -> None:
    policy = LRU()
    fill(policy, "abcd")
    policy.touch(b"a")
    policy.add(b"b", 10, Hints())
    policy.hold(b"c")
    policy.release(b"c")
    assert drain(policy) == "dabc"


# S3-FIFO


def test_s3fifo_moves_what_was_used_twice_to_the_main_queue() -> None:
    policy = S3Fifo()
    fill(policy, "abcdefghij")
    for key in (b"b", b"b", b"d"):
        policy.touch(key)
    # b moves on; d was used only once; the small queue shrinks to its tenth, then main's turn
    assert drain(policy) == "acdefghibj"


def test_s3fifo_ghosts_come_back_into_the_main_queue() -> None:
    policy = S3Fifo()
    fill(policy, "abc")
    assert policy.victim() == b"a"
    policy.remove(b"a")
    policy.remove(b"b")  # deleted, not evicted: no ghost
    fill(policy, "dba")
    assert drain(policy) == "cdab"


def test_s3fifo_gives_the_used_another_round() -> None:
    policy = S3Fifo()
    fill(policy, "abc")
    for key in b"abc":
        policy.hold(bytes([key]))
        policy.release(bytes([key]))  # into the main queue
    policy.touch(b"a")
    for _ in range(9):
        policy.touch(b"b")  # counts at most three
    assert drain(policy) == "cab"


def test_s3fifo_remembers_no_more_ghosts_than_objects() -> None:
    policy = S3Fifo()
    for number in range(1000):
        policy.add(b"%d" % number, 10, Hints())
        if number >= 10:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
    assert len(policy._ghost) == 10


# names


@pytest.mark.parametrize("name", NAMES)
def test_names_are_counted_and_may_come_first(name: str) -> None:
    policy = open_policy(name)
    policy.retain(b"first", [b"a", b"b"])
    policy.retain(b"second", [b"a"])
    fill(policy, "abc")
    assert drain(policy) == "c"
    policy.retain(b"first", [])
    assert drain(policy) == "b"
    policy.retain(b"second", [])
    assert drain(policy) == "a"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_outlives_its_object(name: str) -> None:
    policy = open_policy(name)
    fill(policy, "a")
    policy.retain(b"name", [b"a"])
    policy.remove(b"a")
    fill(policy, "ab")
    assert drain(policy) == "b"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_retains_its_newest_set(name: str) -> None:
    policy = open_policy(name)
    fill(policy, "abcd")
    policy.retain(b"manual", [b"a", b"b"])
    policy.retain(b"other", [b"b"])
    assert sorted(drain(policy)) == ["c", "d"]
    policy.retain(b"manual", [b"b", b"e"])
    assert drain(policy) == "a"
    policy.retain(b"manual", [])
    assert drain(policy) == ""
    policy.retain(b"other", [])
    assert drain(policy) == "b"


@pytest.mark.parametrize("name", NAMES)
def test_of_what_is_held_children_go_before_their_parents(name: str) -> None:
    policy = open_policy(name)
    policy.retain(b"name", [b"a", b"b", b"c"])
    chain(policy, "abc")
    assert policy.victim() is None
    gone = []
    while (victim := policy.victim(held=True)) is not None:
        policy.remove(victim)
        gone.append(victim)
    assert gone == ([b"c", b"b", b"a"] if name in ("cost", "graded") else [b"a", b"b", b"c"])
