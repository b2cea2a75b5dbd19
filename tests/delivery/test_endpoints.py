"""Resting after failures, and finding a node that has moved."""

from __future__ import annotations

import asyncio
from random import Random

from kdn.delivery.endpoints import (
    FIRST_REJECTION_S,
    FIRST_REST_S,
    LONGEST_REJECTION_S,
    LONGEST_REST_S,
    MAX_REJECTED,
    Endpoint,
    Endpoints,
)
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore


class Named(MemoryStore):
    def __init__(self, url: str) -> None:
        super().__init__(10_000, open_policy("lru"))
        self.url, self.is_closed = url, False

    async def close(self) -> None:
        self.is_closed = True


def test_rests_grow_and_end_with_success() -> None:
    endpoint, rng, now_s = Endpoint(Named("a")), Random(1), 100.0
    rests = []
    for _ in range(12):
        assert endpoint.is_ready(now_s)
        endpoint.failed(now_s, now_s, rng)
        rests.append(endpoint.rests_until_s - now_s)
        assert not endpoint.is_ready(now_s)
        now_s = endpoint.rests_until_s
    assert FIRST_REST_S / 2 <= rests[0] <= FIRST_REST_S
    assert LONGEST_REST_S / 2 <= rests[-1] <= LONGEST_REST_S
    endpoint.worked()
    endpoint.failed(now_s, now_s, rng)
    assert endpoint.rests_until_s - now_s <= FIRST_REST_S


def test_requests_that_fail_together_count_once() -> None:
    endpoint, rng = Endpoint(Named("a")), Random(1)
    for _ in range(10):
        endpoint.failed(1.0, 2.0, rng)
    assert endpoint.rests_until_s - 2.0 <= FIRST_REST_S


def test_a_node_that_moved_is_found_after_a_failure() -> None:
    async def test() -> None:
        address, opened = ["a"], []

        async def resolve() -> str:
            return address[0]

        def connect(url: str) -> Named:
            opened.append(Named(url))
            return opened[-1]

        endpoint = Endpoint.moving(resolve, connect)
        assert await endpoint.store() is await endpoint.store()
        address[0] = "b"
        assert await endpoint.store() is opened[0]
        endpoint.failed(0.0, 1.0, Random(1))
        assert await endpoint.store() is opened[1]
        assert (opened[0].is_closed, opened[1].url) == (True, "b")
        endpoint.failed(0.0, 1.0, Random(1))
        assert await endpoint.store() is opened[1], "the same address, the same connections"
        await endpoint.close()
        assert opened[1].is_closed

    asyncio.run(test())


def test_local_ones_come_first_and_are_the_callers() -> None:
    async def test() -> None:
        far, near = Named("far"), Named("near")
        async with Endpoints([far, Endpoint(near, local=True)]) as endpoints:
            assert [await endpoint.store() for endpoint in endpoints] == [near, far]
            assert (len(endpoints.local), len(endpoints.remote)) == (1, 1)
        assert not far.is_closed
        assert not near.is_closed

    asyncio.run(test())


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
