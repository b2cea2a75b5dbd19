"""Which chunks are published, and that none is on top of losses."""

from __future__ import annotations

from typing import Any

import pytest

from kdn.cache.keys import cut
from kdn.engines.vllm.messages import LoadReport
from tests.engines.vllm_scheduling import SPACE, World, request


def test_chunks_are_published_as_they_are_completed() -> None:
    """Prefill in three steps; the tail with the last one; then one more chunk while decoding."""
    world = World()
    asked = request("r", 1000)
    world.arrive(asked, 0)
    [save] = world.step(new=[(asked, [0, 1, 2, 3], 0, 512)]).saves
    assert [(c.start, c.end) for c in save.chunks] == [(0, 256), (256, 512)]
    assert save.block_ids == (0, 1, 2, 3)
    asked.num_computed_tokens = 512
    assert world.step(cached=[(asked, [4], 100)]).saves == ()
    asked.num_computed_tokens = 612
    [save] = world.step(cached=[(asked, [5, 6, 7], 388)]).saves
    assert [(c.start, c.end) for c in save.chunks] == [(512, 768), (768, 992)]
    assert save.block_ids == tuple(range(8))
    for position in range(1000, 1030):
        asked.num_computed_tokens = position
        asked.num_tokens = position + 1
        asked.all_token_ids = list(range(position + 1))
        asked.all_token_ids[0] = 0
        saves = world.step(cached=[(asked, [], 1)]).saves
        assert [c.end for save in saves for c in save.chunks] == (
            [1024] if position == 1023 else []
        )


def test_keys_are_those_of_the_prompt() -> None:
    world = World()
    asked = request("r", 700)
    world.arrive(asked, 0)
    [save] = world.step(new=[(asked, list(range(6)), 0, 700)]).saves
    assert [c.key for c in save.chunks] == [c.key for c in cut(asked.prompt_token_ids, SPACE)]


def test_tokens_without_an_id_are_not_published() -> None:
    """vLLM plans steps before the tokens of earlier ones are known."""
    world = World()
    asked = request("r", 510)
    world.arrive(asked, 0)
    world.step(new=[(asked, list(range(4)), 0, 510)])
    asked.num_computed_tokens = 511
    asked.num_tokens = 511
    assert world.step(cached=[(asked, [], 1)]).saves == ()


def test_what_is_known_is_not_published_again() -> None:
    world = World()
    asked = request("r", 1000)
    world.arrive(asked, 512)
    [save] = world.step(new=[(asked, list(range(8)), 0, 1000)]).saves
    assert [(c.start, c.end) for c in save.chunks] == [(512, 768), (768, 992)]
    world.arrive(again := request("again", 1000), 512)
    assert world.step(new=[(again, list(range(8)), 0, 1000)]).saves == ()


def test_what_was_known_and_did_not_load_is_offered_again() -> None:
    """It may be a stream that nobody can use: it must not keep a right one away for ever."""
    world = World()
    world.arrive(first := request("first", 1000), 0)
    world.step(new=[(first, list(range(8)), 0, 1000)])  # published once, and forged since
    asked = request("r", 1000)
    world.arrive(asked, 768)
    world.side.matched(asked, 0)
    world.side.allocated(asked, list(range(8, 16)), 768)
    world.side.loaded(LoadReport({"r": 256}, {"r": 256}))
    [save] = world.step(new=[(asked, list(range(8, 16)), 256, 744)]).saves
    assert [(c.start, c.end) for c in save.chunks] == [(256, 512), (512, 768)]


def test_publishing_can_be_off() -> None:
    world = World(publish=False)
    asked = request("r", 1000)
    world.arrive(asked, 0)
    assert world.step(new=[(asked, list(range(8)), 0, 1000)]).saves == ()


def loaded_with_losses(world: World, exact_until: int = 0, first_block: int = 0) -> Any:
    asked = request("lossy", 1000)
    world.arrive(asked, 512)
    world.side.matched(asked, 0)
    world.side.allocated(asked, list(range(first_block, first_block + 8)), 512)
    world.side.loaded(LoadReport({"lossy": exact_until}))
    return asked


def test_nothing_is_published_on_top_of_losses() -> None:
    world = World()
    asked = loaded_with_losses(world)
    assert world.step(new=[(asked, list(range(8)), 512, 488)]).saves == ()
    assert world.side.counts["lossy"] == 2


def test_what_was_loaded_exactly_is_as_good_as_computed() -> None:
    world = World()
    asked = loaded_with_losses(world, exact_until=512)
    [save] = world.step(new=[(asked, list(range(8)), 512, 488)]).saves
    assert [c.start for c in save.chunks] == [512, 768]


def test_blocks_keep_their_losses_in_the_prefix_cache() -> None:
    """Another request that shares only the first block, and so no chunk, is no better."""
    world = World()
    world.step(new=[(loaded_with_losses(world), list(range(8)), 512, 488)])
    world.side.finished("lossy")
    tokens = [0, *range(1, 128), *range(5000, 5800)]
    other = request("other", len(tokens), prompt_token_ids=tokens, all_token_ids=tokens)
    world.arrive(other, 0)
    assert world.step(new=[(other, [0, 20, 21, 22, 23, 24, 25, 26], 128, 800)]).saves == ()
    # What it computed is marked as well.
    world.side.finished("other")
    world.arrive(third := request("third", 928, prompt_token_ids=tokens, all_token_ids=tokens), 0)
    assert world.step(new=[(third, [0, 20, 21, 22, 23, 24, 25, 27], 896, 32)]).saves == ()


def test_a_block_given_out_anew_is_the_models_own() -> None:
    world = World()
    world.step(new=[(loaded_with_losses(world), list(range(8)), 512, 488)])
    world.side.finished("lossy")
    world.arrive(fresh := request("fresh", 1000, first=77), 0)
    [save] = world.step(new=[(fresh, list(range(8)), 0, 1000)]).saves
    assert len(save.chunks) == 4
    world.side.finished("fresh")
    world.side._saving._saved_keys.clear()
    world.arrive(again := request("again", 1000, first=77), 0)
    [save] = world.step(new=[(again, [*range(7), 30], 896, 104)]).saves
    assert len(save.chunks) == 4


def test_nothing_is_published_on_top_of_what_another_connector_brought() -> None:
    """It may be anything: what kdn has loaded with losses, kept elsewhere and loaded again."""
    world = World()
    world.arrive(asked := request("r", 1000), 0)
    world.side.matched(asked, 256)
    [save] = world.step(new=[(asked, list(range(8)), 512, 488)], brought=True).saves
    assert [chunk.end for chunk in save.chunks] == [256]
    world.side.finished("r")
    # Its blocks are in vLLM's prefix cache now, those that were computed on top among them.
    world.arrive(other := request("other", 1100), 0)
    world.side._saving._saved_keys.clear()
    [save] = world.step(new=[(other, [*range(7), *range(20, 22)], 896, 204)]).saves
    assert [chunk.end for chunk in save.chunks] == [256]


def test_who_shares_blocks_with_it_in_the_same_step_is_no_better() -> None:
    """A request that comes back counts before one that is new, whatever vLLM lists first."""
    world = World()
    world.arrive(asked := request("r", 1000), 0)
    world.side.matched(asked, 0)
    world.step(new=[(asked, list(range(8)), 0, 100)])
    asked.num_preemptions, asked.num_computed_tokens = 1, 512
    world.side.matched(asked, 0)
    world.arrive(other := request("other", 1000), 0)
    world.side.matched(other, 512)
    step = world.step(
        new=[(other, [*range(30, 34), *range(40, 44)], 512, 488)],
        resumed=[(asked, [*range(30, 34), *range(50, 54)], 488)],
        brought=True,
    )
    assert step.saves == ()


def test_what_the_model_computed_before_a_session_goes_on_is_its_own() -> None:
    world = World()
    world.arrive(asked := request("r", 1000), 0)
    world.side.matched(asked, 0)
    world.step(new=[(asked, list(range(8)), 0, 600)])
    [save] = world.step(new=[(asked, list(range(8)), 600, 400)], brought=True).saves
    assert [chunk.end for chunk in save.chunks][-1] == 992


def test_a_preempted_request_begins_again() -> None:
    """Its blocks are others, and the first of them may hold losses now."""
    world = World()
    asked = request("r", 1000)
    world.arrive(asked, 0)
    assert len(world.step(new=[(asked, list(range(8)), 0, 512)]).saves) == 1
    lossy = loaded_with_losses(world, first_block=10)
    world.step(new=[(lossy, list(range(10, 18)), 512, 1)])
    asked.num_preemptions, asked.num_computed_tokens = 1, 256
    [save] = world.step(resumed=[(asked, [0, 1, *range(30, 36)], 744)]).saves
    assert [c.start for c in save.chunks] == [512, 768]
    assert save.block_ids == (0, 1, *range(30, 36))
    asked.num_preemptions, asked.num_computed_tokens = 2, 512
    asked.num_tokens = 1100
    asked.all_token_ids = asked.prompt_token_ids + [5] * 100
    assert world.step(resumed=[(asked, [10, 11, 12, 13, *range(40, 45)], 588)]).saves == ()
    assert world.side.counts["lossy"] == 1


def test_what_found_no_room_is_saved_by_a_later_step() -> None:
    """But not at once, and what was saved is not saved again."""
    world = World()
    asked = request("r", 1000)
    world.arrive(asked, 0)
    [save] = world.step(new=[(asked, list(range(8)), 0, 1000)]).saves
    left = {chunk.key: chunk.start for chunk in save.chunks[2:]}
    world.side.loaded(LoadReport(unsaved={"r": left}))
    asked.num_computed_tokens, asked.num_tokens = 1000, 1001
    assert world.step(cached=[(asked, [], 1)]).saves == ()
    world.now_s += 1.0
    [again] = world.step(cached=[(asked, [], 1)]).saves
    assert [chunk.key for chunk in again.chunks] == [chunk.key for chunk in save.chunks[2:]]
    assert again.chunks[-1].end == 992  # the tail is among them
    assert world.step(cached=[(asked, [], 1)]).saves == ()
    world.side.finished("r")
    assert world.side.counts["unpublished_chunks"] == 0


def test_what_never_found_room_is_counted() -> None:
    world = World()
    asked = request("r", 600)
    world.arrive(asked, 0)
    [save] = world.step(new=[(asked, list(range(8)), 0, 600)]).saves
    report = LoadReport(unsaved={"r": {chunk.key: chunk.start for chunk in save.chunks[1:]}})
    assert report
    world.side.loaded(report)
    world.side.finished("r")
    assert world.side.counts["unpublished_chunks"] == 2
    world.side.loaded(report)  # it has ended meanwhile
    assert world.side.counts["unpublished_chunks"] == 4


def test_ranks_report_together_what_found_no_room() -> None:
    some, others = {"a": {b"1": 0}, "b": {b"2": 256}}, {"b": {b"3": 512}}
    joined = LoadReport(unsaved=some).joined(LoadReport(unsaved=others))
    assert joined.unsaved == {"a": {b"1": 0}, "b": {b"2": 256, b"3": 512}}


def test_drafts_are_never_published() -> None:
    """vLLM plans steps with draft tokens, of which some are not accepted: they count as computed
    until it knows. Only tokens of the answer are published, and only once they were computed."""
    world = World()
    asked = request("r", 500)
    world.arrive(asked, 0)
    [save] = world.step(new=[(asked, list(range(6)), 0, 500)]).saves
    assert [chunk.end for chunk in save.chunks] == [256, 496]
    answer = [*asked.all_token_ids]
    # The step after next is planned before the results of the last one are known: with four drafts
    # of which two were accepted, it takes five tokens for computed where it will be three.
    for known, computed in ((501, 500), (504, 505), (507, 508), (510, 511), (511, 515)):
        answer += [900 + position for position in range(len(answer), known)]
        asked.all_token_ids, asked.num_tokens = list(answer), known
        asked.num_computed_tokens = computed
        assert world.step(cached=[(asked, [], 5)]).saves == ()
    answer += [900 + position for position in range(511, 514)]
    asked.all_token_ids, asked.num_tokens, asked.num_computed_tokens = answer, 514, 512
    [save] = world.step(cached=[(asked, [], 5)]).saves
    assert [chunk.end for chunk in save.chunks] == [512]
    assert save.chunks[0].key == cut(answer[:512], SPACE)[-1].key


@pytest.mark.parametrize(
    ("num_tokens", "learn", "ends"),
    [
        (300, False, [256, 288]),
        (300, True, [256, 288, 300]),  # as others look for it, and as it is
        (304, True, [256, 304]),
        (256, True, [256]),
        (10, False, []),
        (10, True, [10]),
    ],
)
def test_a_piece_is_published_to_its_last_token(
    num_tokens: int, learn: bool, ends: list[int]
) -> None:
    world = World()
    asked = request("r", num_tokens, kv_transfer_params={"kdn": {"learn": learn}})
    world.arrive(asked)
    saves = world.step(new=[(asked, [0, 1, 2], 0, num_tokens)]).saves
    assert [chunk.end for save in saves for chunk in save.chunks] == ends
