"""What the worker is told to load, how well, and when nothing any more."""

from __future__ import annotations

import pickle
from typing import Any

from kdn.cache.keys import cut
from kdn.delivery.known import Known
from kdn.engines.vllm.messages import LoadReport
from tests.engines.vllm_scheduling import SPACE, World, load_of, request


def test_a_load_names_chunks_and_blocks() -> None:
    world = World(deadline_s=3, quality=0.02)
    asked = request("r", 1000)
    world.arrive(asked, 768)
    world.side.matched(asked, 384)
    world.side.allocated(asked, [7, 8, 9, 10, 11, 12, 13, 14], 384)
    [load] = world.step().loads
    assert (load.start, load.end) == (384, 768)
    assert [chunk.start for chunk in load.chunks] == [256, 512]  # 384 lies within the first
    assert load.block_ids[3] == 10
    assert (load.deadline_s, load.enough_kld) == (3.0, 0.02)
    assert world.step().loads == ()


def test_one_load_for_each_time_it_is_placed() -> None:
    """A load that failed is not tried again, or a broken cache could keep a request for ever."""
    world = World()
    asked = request("r", 1000)
    world.arrive(asked, 768)
    assert world.side.matched(asked, 0) == (768, True)
    assert world.side.matched(asked, 0) == (768, True)  # until there is room for it
    world.side.allocated(asked, list(range(8)), 768)
    assert world.side.matched(asked, 0) == (0, False)
    asked.num_preemptions = 1
    assert world.side.matched(asked, 0) == (None, False)  # it is looked up again
    world.lookups[1].set_result(Known(tuple(cut(asked.prompt_token_ids, SPACE))))
    assert world.side.matched(asked, 0) == (896, True)


def test_a_request_cannot_spoil_blocks_for_others() -> None:
    """vLLM's prefix cache hands on what it loaded, and its load holds a slot."""
    world = World(quality=0.01, deadline_s=3)
    wish = {"kv_transfer_params": {"kdn": {"quality": 3600, "deadline_s": 3600}}}
    assert loaded_by(world, request("r", 1000, **wish)) == (0.01, 3.0)
    assert loaded_by(world, request("s", 1000, cache_salt="mine", **wish)) == (0.01, 3.0)
    world = World(quality=0.01, deadline_s=3, allow_coarser=True)
    assert loaded_by(world, request("r", 1000, **wish)) == (0.01, 3.0)
    assert loaded_by(world, request("s", 1000, cache_salt="mine", **wish)) == (3600.0, 3.0)


def loaded_by(world: World, asked: Any) -> tuple[float, float]:
    load = load_of(world, asked)
    return load.enough_kld, load.deadline_s


def test_haste_does_not_make_blocks_coarser() -> None:
    """By a short deadline only coarse levels may have come: they are not for others."""
    wish = {"kv_transfer_params": {"kdn": {"deadline_s": 0.1}}}
    world = World(deadline_s=3)
    assert not load_of(world, request("plain", 1000)).strict
    assert load_of(world, request("hasty", 1000, **wish)).strict
    assert load_of(world, request("salted", 1000, cache_salt="mine", **wish)).strict
    world = World(deadline_s=3, allow_coarser=True)
    assert load_of(world, request("hasty", 1000, **wish)).strict
    assert not load_of(world, request("salted", 1000, cache_salt="mine", **wish)).strict


def test_the_key_of_seals_does_not_travel() -> None:
    """Steps may cross a network."""
    world = World()
    asked = request("r", 1000)
    world.arrive(asked, 512)
    world.side.matched(asked, 0)
    world.side.allocated(asked, list(range(8)), 512)
    step = world.step(new=[(asked, list(range(8)), 512, 488)])
    assert step.loads
    assert step.saves
    sent = pickle.dumps(step.with_seal_key(b""))
    assert SPACE.seal_key not in sent
    back = step.with_seal_key(b"").with_seal_key(SPACE.seal_key)
    assert [load.chunks[0].seal_key for load in back.loads] == [SPACE.seal_key]
    assert [c.key for c in back.saves[0].chunks] == [c.key for c in step.saves[0].chunks]


def test_after_a_reset_nothing_is_loaded_or_published() -> None:
    world = World()
    world.arrive(before := request("before", 1000), 768)
    world.side.stop()
    assert world.side.matched(before, 0) == (0, False)
    world.arrive(after := request("after", 1000), 768)
    assert world.side.matched(after, 0) == (0, False)
    assert len(world.lookups) == 1
    assert world.step(new=[(after, list(range(8)), 0, 1000)]).saves == ()


def test_after_a_reset_the_worker_is_told() -> None:
    world = World()
    assert not world.step().stopped
    world.side.stop()
    assert world.step().stopped


def test_other_weights_are_as_good_as_a_reset() -> None:
    world = World()
    world.arrive(before := request("before", 1000), 768)
    world.side.loaded(LoadReport(weights_changed=True))
    assert world.side.matched(before, 0) == (0, False)
    assert world.step(new=[(before, list(range(8)), 0, 1000)]).saves == ()
    world.arrive(after := request("after", 1000), 768)
    assert world.side.matched(after, 0) == (0, False)
    assert len(world.lookups) == 1
    assert world.side.counts["stopped"] == 1
