"""Any run of operations on an eviction policy, against plain models."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kdn.store.base import Hints
from kdn.store.evict import Retention, open_policy

Operations = list[tuple[str, bytes, bytes | None, float]]

KEYS = [bytes([key]) for key in b"abcdefgh"]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "touch", "evict", "remove", "hold", "release"]),
        st.sampled_from(KEYS),
        st.sampled_from([None, *KEYS]),
        st.floats(0, 10),
    ),
    max_size=60,
)


class Model:
    """What must hold for every policy, by brute force."""

    def __init__(self) -> None:
        self.here: dict[bytes, bytes | None] = {}  # to its parent
        self.used: dict[bytes, int] = {}
        self.holds: dict[bytes, int] = {}
        self.turn = 0

    def use(self, key: bytes) -> None:
        self.turn += 1
        self.used[key] = self.turn

    def drop(self, key: bytes) -> None:
        for known in (self.here, self.used):
            known.pop(key, None)

    def may_go(self) -> set[bytes]:
        return {key for key in self.here if not self.holds.get(key)}


def play(
    policy: Retention, operations: Operations, check: Callable[[Model, bytes | None], None]
) -> None:
    model = Model()
    for operation, key, parent, saved_s in operations:
        if operation == "add":
            model.here.setdefault(key, parent)
            model.use(key)
            policy.add(key, 10, Hints(parent, saved_s))
        elif operation == "touch" and key in model.here:
            model.use(key)
            policy.touch(key)
        elif operation == "remove":
            model.drop(key)
            policy.remove(key)
        elif operation == "hold":
            model.holds[key] = model.holds.get(key, 0) + 1
            policy.hold(key)
        elif operation == "release":
            if model.holds.get(key):
                model.holds[key] -= 1
                if not model.holds[key] and key in model.here:
                    model.use(key)
            policy.release(key)
        victim = policy.victim()
        check(model, victim)
        if operation == "evict" and victim is not None:
            model.drop(victim)
            policy.remove(victim)


@settings(deadline=None, max_examples=150)
@given(OPERATIONS)
def test_lru_against_a_model(operations: Operations) -> None:
    def check(model: Model, victim: bytes | None) -> None:
        assert victim == min(model.may_go(), key=model.used.__getitem__, default=None)

    play(open_policy("lru"), operations, check)


@settings(deadline=None, max_examples=150)
@given(OPERATIONS)
def test_s3fifo_against_a_model(operations: Operations) -> None:
    def check(model: Model, victim: bytes | None) -> None:
        assert victim in (model.may_go() or {None})

    play(open_policy("s3fifo"), operations, check)


@settings(deadline=None, max_examples=300)
@given(OPERATIONS)
def test_cost_against_a_model(operations: Operations) -> None:
    """Rings of parents are left out here: which link is cut depends on the order they came in."""

    def check(model: Model, victim: bytes | None) -> None:
        leaves = {key for key in model.may_go() if key not in set(model.here.values())}
        assert victim in (leaves or {None})

    acyclic = [
        (name, key, parent if parent is not None and parent < key else None, saved_s)
        for name, key, parent, saved_s in operations
    ]
    play(open_policy("cost"), acyclic, check)


@settings(deadline=None, max_examples=150)
@given(OPERATIONS)
def test_cost_names_someone_whatever_the_hints(operations: Operations) -> None:
    def check(model: Model, victim: bytes | None) -> None:
        if model.here and not any(model.holds.values()):
            assert victim in model.here

    play(open_policy("cost"), operations, check)
