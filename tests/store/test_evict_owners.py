"""Several owners of one store: who gives, and what nobody loses to others."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kdn.store.base import Hints
from kdn.store.evict import Owners, Policy, Retention, open_policy
from tests.store.policies import NAMES


def owners(**weights: float) -> Owners:
    """An owner is a key's first letter."""
    return Owners(lambda key: key[:1], {name.encode(): weight for name, weight in weights.items()})


def own(owner: str, number: int) -> bytes:
    return b"%s%d" % (owner.encode(), number)


def cut(policy: Policy, count: int) -> list[bytes]:
    """So many victims, gone."""
    gone = []
    for _ in range(count):
        victim = policy.victim()
        assert victim is not None
        policy.remove(victim)
        gone.append(victim)
    return gone


@pytest.mark.parametrize("name", NAMES)
def test_who_holds_the_most_for_its_weight_gives(name: str) -> None:
    policy = open_policy(name, owners=owners(a=1.0, b=3.0))
    for number in range(4):
        policy.add(own("a", number), 10, Hints())
    for number in range(12):
        policy.add(own("b", number), 10, Hints())
    policy.add(own("a", 4), 10, Hints())
    assert cut(policy, 1) == [b"a0"]
    policy.add(own("b", 12), 10, Hints())
    assert cut(policy, 1)[0][:1] == b"b"
    assert [key[:1] for key in cut(policy, 8)].count(b"b") == 6


@pytest.mark.parametrize("name", NAMES)
def test_what_others_leave_may_be_used_until_they_want_it(name: str) -> None:
    policy = open_policy(name, owners=owners(a=1.0, b=1.0))
    for number in range(10):
        policy.add(own("a", number), 10, Hints(saved_s=1e9))
    for number in range(5):
        policy.add(own("b", number), 10, Hints())
        assert cut(policy, 1)[0][:1] == b"a"
    policy.add(own("b", 5), 10, Hints())
    assert cut(policy, 1)[0][:1] == b"b", "beyond its share it gives of its own"


@pytest.mark.parametrize("name", NAMES)
def test_names_protect_within_the_share_of_their_owner(name: str) -> None:
    policy = open_policy(name, owners=owners(a=1.0, b=1.0))
    policy.retain(b"all", [own("a", number) for number in range(20)])
    for number in range(10):
        policy.add(own("a", number), 10, Hints())
    assert policy.victim() is None, "alone, all is its share"
    for number in range(5):
        policy.add(own("b", number), 10, Hints())
        assert cut(policy, 1) == [own("a", number)], "held the longest"
    policy.add(own("b", 5), 10, Hints())
    assert cut(policy, 1)[0][:1] == b"b"
    policy.add(own("a", 0), 10, Hints())
    assert cut(policy, 1)[0][:1] == b"a"


@pytest.mark.parametrize("name", NAMES)
def test_what_belongs_to_nobody_goes_first(name: str) -> None:
    policy = open_policy(name, owners=owners(a=1.0))
    policy.add(own("x", 0), 10, Hints(saved_s=1e9))
    for number in range(9):
        policy.add(own("a", number), 10, Hints())
    assert cut(policy, 1) == [b"x0"]


class Cache:
    """A store of `capacity` objects by a policy: what hits."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.here: set[bytes] = set()

    def ask(self, key: bytes, saved_s: float = 0.01) -> bool:
        """Whether it was here; if not, it is put."""
        if key in self.here:
            self.policy.touch(key)
            return True
        self.policy.add(key, 1_000_000, Hints(saved_s=saved_s))
        self.here.add(key)
        if len(self.here) > self.capacity:
            victim = self.policy.victim()
            gone = key if victim is None else victim
            self.policy.remove(gone)
            self.here.remove(gone)
        return False


def hit_rate(cache: Cache, beside: Callable[[], None] = lambda: None) -> float:
    """Of owner b: four of five asks are for 100 objects, some more popular; others never return."""
    rng, hits, asks = random.Random(7), 0, 5000
    for turn in range(asks):
        number = 1000 + turn if rng.random() < 0.2 else int(100 * rng.random() ** 2)
        hits += cache.ask(own("b", number))
        beside()
    return hits / asks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("named", [False, True])
def test_a_flood_with_absurd_hints_and_names_costs_another_owner_nothing(
    name: str, named: bool
) -> None:
    """Five puts of another owner beside each ask: never worse than with a store half as large."""
    both = owners(a=1.0, b=1.0)
    cache = Cache(open_policy(name, owners=both), 400)
    flood = iter(range(10**6))

    def attack() -> None:
        for _ in range(5):
            key = own("a", next(flood))
            if named:
                assert isinstance(cache.policy, Retention)
                cache.policy.retain(key, [key])
            cache.ask(key, saved_s=1e9)

    attacked = hit_rate(cache, attack)
    assert hit_rate(Cache(open_policy(name, owners=both), 400)) - attacked < 0.05
    assert attacked >= hit_rate(Cache(open_policy(name), 200)) - 0.005


@pytest.mark.parametrize("name", NAMES)
def test_one_owner_alone_is_served_as_without_shares(name: str) -> None:
    alone = hit_rate(Cache(open_policy(name, owners=owners(a=2.0, b=1.0)), 60))
    assert alone == hit_rate(Cache(open_policy(name), 60))
