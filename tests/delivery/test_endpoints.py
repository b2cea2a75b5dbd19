"""Resting after failures, and streams that were rejected."""

from __future__ import annotations

from random import Random

from kdn.delivery.endpoints import (
    FIRST_REJECTION_S,
    LONGEST_REJECTION_S,
    MAX_REJECTED,
    Endpoint,
    Endpoints,
)
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from kdn.store.rest import FIRST_REST_S, LONGEST_REST_S, Rest


class Named(MemoryStore):
    def __init__(self, url: str) -> None:
        super().__init__(10_000, open_policy("lru"))
        self.url = url


def test_rests_grow_and_end_with_success() -> None:
    rest, rng, now_s = Rest(), Random(1), 100.0
    rests = []
    for _ in range(12):
        assert rest.is_over(now_s)
        rest.failed(now_s, now_s, rng)
        rests.append(rest.until_s - now_s)
        assert not rest.is_over(now_s)
        now_s = rest.until_s
    assert FIRST_REST_S / 2 <= rests[0] <= FIRST_REST_S
    assert LONGEST_REST_S / 2 <= rests[-1] <= LONGEST_REST_S
    rest.worked()
    rest.failed(now_s, now_s, rng)
    assert rest.until_s - now_s <= FIRST_REST_S


def test_requests_that_fail_together_count_once() -> None:
    rest, rng = Rest(), Random(1)
    for _ in range(10):
        rest.failed(1.0, 2.0, rng)
    assert rest.until_s - 2.0 <= FIRST_REST_S


def test_local_ones_come_first() -> None:
    far, near = Named("far"), Named("near")
    endpoints = Endpoints([far, Endpoint(near, local=True)])
    assert [endpoint.store for endpoint in endpoints] == [near, far]
    assert (len(endpoints.local), len(endpoints.remote)) == (1, 1)


def test_a_rejected_stream_is_tried_again_after_a_while() -> None:
    """Perhaps only the way here was bad. Each time it takes longer."""
    place = Endpoint(MemoryStore(2**20, open_policy("lru")))
    place.reject(b"key", b"bad", 100.0)
    assert place.is_rejected(b"key", b"bad", 100.0 + FIRST_REJECTION_S - 1)
    assert not place.is_rejected(b"key", b"other", 101.0)
    assert not place.is_rejected(b"key", b"bad", 100.0 + FIRST_REJECTION_S)
    assert place.rejected(b"key") == b"bad"  # it may be replaced all the same
    place.reject(b"key", b"bad", 200.0)
    assert place.is_rejected(b"key", b"bad", 200.0 + 2 * FIRST_REJECTION_S - 1)
    for _ in range(20):
        place.reject(b"key", b"bad", 300.0)
    assert not place.is_rejected(b"key", b"bad", 300.0 + LONGEST_REJECTION_S)
    place.accept(b"key")
    assert place.rejected(b"key") is None


def test_few_rejections_are_remembered() -> None:
    place = Endpoint(MemoryStore(2**20, open_policy("lru")))
    for number in range(MAX_REJECTED + 5):
        place.reject(number.to_bytes(16, "big"), b"bad", 0.0)
    assert place.rejected((4).to_bytes(16, "big")) is None
    assert place.rejected((5).to_bytes(16, "big")) == b"bad"
