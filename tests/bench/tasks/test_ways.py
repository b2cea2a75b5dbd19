"""The default quality is what a client fetches, and every way gives a cache of the context."""

from __future__ import annotations

import pytest
import torch

from kdn.bench.rivals.ours import Layered, cachegen
from kdn.bench.tasks.ways import DEFAULT, EXACT, HIGH, Ways, planned
from kdn.cache.tensors import KVCache
from kdn.delivery.client import deliver
from tests.delivery.world import World, make_world, run


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(5, last_tokens=96)


@pytest.mark.parametrize("enough", [0.0004, 0.002, 0.01, 0.05])
def test_as_many_levels_are_planned_as_a_delivery_fetches(world: World, enough: float) -> None:
    async def delivered() -> tuple[int, ...]:
        store = await world.store()
        return tuple((await deliver(world.request(enough_kld=enough), [store])).levels)

    found = planned(world.chunks, world.streams, world.expected_kld, enough)
    assert found == list(run(delivered()))


def test_what_is_better_costs_more(world: World) -> None:
    counts = [
        sum(planned(world.chunks, world.streams, world.expected_kld, enough))
        for enough in (0.05, 0.01, 0.002, 0.0001)
    ]
    assert counts == sorted(counts)
    assert len(world.chunks) <= counts[0] < counts[-1]


def test_every_way_gives_the_context_and_finer_ones_more_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(world.codec), "expected_kld", world.expected_kld)
    whole = KVCache(
        torch.cat([one.keys for one in world.caches], 1),
        torch.cat([one.values for one in world.caches], 1),
    )
    ways = Ways(
        Layered(world.codec),
        cachegen(make_world(2, "cachegen").codec),
        {DEFAULT: 0.01, HIGH: 0.002},
    )
    tokens = torch.cat([torch.as_tensor(one.tokens.astype("int64")) for one in world.chunks])
    found = list(ways.arrivals(tokens.numpy().astype("uint32"), whole))
    assert [EXACT, *(one.way for one in found)] == ways.labels
    by = {one.way: one for one in found}
    errors = [float((by[f"klt {n}"].cache.keys - whole.keys).abs().mean()) for n in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True)
    sizes = [by[f"cachegen {n}"].size_bytes for n in (1, 2, 3, 4)]
    assert sizes == sorted(sizes)
    finest = f"klt {world.codec.num_levels}"
    assert by["klt 1"].size_bytes < by[DEFAULT].size_bytes < by[HIGH].size_bytes
    assert by[HIGH].size_bytes <= by[finest].size_bytes
