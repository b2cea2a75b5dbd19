"""Deliveries of streams that are damaged, replaced or gone: what is in the cache is right."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kdn.bench.delivery.policies import cachegen
from kdn.codec.format import Bitstream
from kdn.delivery.flight import Limits
from kdn.delivery.plan import Fetch, Plan, Situation
from kdn.delivery.planner import default
from kdn.store.base import Store
from tests.delivery.checked import deliver_from
from tests.delivery.world import (
    Flaky,
    Proxy,
    World,
    level_major,
    make_world,
    put_stream,
)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(6, last_tokens=48)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_never_decoded(world: World, seed: int) -> None:
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores.append(Flaky(await world.store(), Random(seed), flip=0.02))
        return stores

    deliver_from(world, places)
    assert stores[0].seen["flip"]


def test_a_stream_damaged_in_the_store_is_left_to_the_model(world: World) -> None:
    bad = bytearray(world.streams[2])
    bad[Bitstream.parse(world.streams[2]).level_end(0) + 3] ^= 1

    class Damaged(Proxy):
        async def get(self, key: bytes, *args: Any, **named: Any) -> Any:
            span = await super().get(key, *args, **named)
            if key == world.chunks[2].key and span is not None:
                return replace(span, data=bytes(bad)[span.start : span.start + len(span.data)])
            return span

    async def places() -> list[Store]:
        return [Damaged(await world.store())]

    result = deliver_from(world, places)
    assert result.levels[2] == 1, "what verified may be used"
    assert result.levels[:2] + result.levels[3:] == (world.codec.num_levels,) * 5


def test_republished_bytes_start_again(world: World) -> None:
    """In the middle of the transfer chunk 1 is deleted and published with other bytes."""

    class Swapping(Flaky):
        swapped = False

        async def _read(self, number: int, ask: Any) -> Any:
            if ask.key == world.chunks[1].key and not self.swapped and ask.start > 1500:
                self.swapped = True
                await self.inner.delete(ask.key)
                await put_stream(self.inner, world.others[1])
            async for piece in super()._read(number, ask):
                yield piece

    stores: list[Swapping] = []

    async def places() -> list[Store]:
        stores.append(Swapping(await world.store(), Random(1)))
        return stores

    result = deliver_from(
        world,
        places,
        limits=Limits(first_window_bytes=4 << 10, min_request_bytes=1 << 10, window_s=0.0),
    )
    assert stores[0].swapped
    assert result.levels == world.all_levels
    assert result.stream_ids[1] == Bitstream.parse(world.others[1]).stream_id


def test_deleted_chunks_are_left_to_the_model(world: World) -> None:
    class Forgetting(Flaky):
        async def _read(self, number: int, ask: Any) -> Any:
            await self.inner.delete(world.chunks[3].key)
            async for piece in super()._read(number, ask):
                yield piece

    async def places() -> list[Store]:
        return [Forgetting(await world.store(), Random(1))]

    result = deliver_from(world, places)
    assert result.recompute == (3,)


def test_streams_of_two_publishers_never_meet(world: World) -> None:
    """Two nodes hold different streams under the same keys, and the first dies half-way."""
    stores: list[Flaky] = []

    async def places() -> list[Store]:
        stores[:] = [
            Flaky(await world.store(), Random(1), cut=0.15),
            Flaky(await world.store(world.others), Random(2)),
        ]
        return stores

    result = deliver_from(world, places, deadline_s=1.5)
    assert result.recompute == ()


@pytest.mark.parametrize("seed", range(12))
def test_all_faults_at_once_leave_a_right_cache(world: World, seed: int) -> None:
    """Two endpoints, one with other bytes for half of the chunks, all kinds of faults."""
    rng = Random(seed)
    odds = {name: rng.choice([0, 0.01, 0.05]) for name in ("cut", "stall", "flip", "vanish")}

    async def places() -> list[Store]:
        mixed = [*world.streams[:3], *world.others[3:]]
        return [
            Flaky(await world.store(), rng, rate=rng.choice([1e5, 1e6, 1e7]), **odds),
            Flaky(await world.store(mixed), rng, rate=rng.choice([1e5, 1e6]), **odds),
        ]

    policy = rng.choice([level_major, default, cachegen])
    deliver_from(world, places, deadline_s=rng.choice([0.1, 0.4, 0.8]), policy=policy, rng=rng)


def everything(situation: Situation) -> Plan:
    """All levels there are, though fewer would do."""
    offers = enumerate(situation.offers)
    fetches = [Fetch(number, len(offer.level_ends)) for number, offer in offers]
    return Plan(tuple(fetches), 0, 0.0, 0.0)


@pytest.mark.parametrize("policy", [default, everything], ids=["default", "everything"])
@pytest.mark.parametrize("enough_kld", [0.0, 0.03])
def test_streams_that_are_cut_after_the_lookup_are_used_as_they_are(
    world: World, policy: Any, enough_kld: float
) -> None:
    """They have fewer levels than what was planned of them. Who asked for more than is left keeps
    what has arrived."""
    kept = 2

    class Cutting(Proxy):
        is_cut = False

        async def read_into(self, *args: Any, **named: Any) -> None:
            if not self.is_cut:
                self.is_cut = True
                for stream in world.streams:
                    parsed = Bitstream.parse(stream)
                    short = stream[: parsed.level_end(kept - 1)]
                    await self.delete(parsed.info.chunk_key)
                    await self.put(
                        parsed.info.chunk_key, short, etag=parsed.stream_id,
                        checksum=xxh3_64_intdigest(short),
                    )  # fmt: skip
            await super().read_into(*args, **named)

    async def places() -> list[Store]:
        return [Cutting(await world.store())]

    result = deliver_from(world, places, policy=policy, enough_kld=enough_kld)
    assert max(result.levels) <= kept
    if enough_kld:
        assert set(result.levels) == {kept}
