"""What is looked up, how long vLLM waits for it, and how much is then loaded."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kdn.cache.keys import cut
from kdn.delivery.known import Known
from kdn.engines.vllm.scheduler import AWAY_S
from tests.engines.vllm_scheduling import BLOCK, SPACE, World, request


@pytest.mark.parametrize(
    ("num_tokens", "known", "local", "expected"),
    [
        (1000, 768, 0, 768),
        (1000, 768, 256, 512),
        (1000, 768, 768, 0),
        (1000, 768, 896, 0),
        (1000, 992, 0, 896),  # only whole blocks
        (1000, 0, 0, 0),
        (768, 768, 0, 640),  # the last token is computed, and with it its block
        (769, 768, 0, 768),
        (300, 112, 0, 0),  # less than a block
    ],
)
def test_how_much_is_loaded(num_tokens: int, known: int, local: int, expected: int) -> None:
    world = World()
    asked = request("r", num_tokens)
    world.arrive(asked, known)
    assert world.side.matched(asked, local) == (expected, expected > 0)


def test_a_lookup_is_never_waited_for() -> None:
    world = World(lookup_s=0.5)
    asked = request("r", 1000)
    world.arrive(asked, None)
    assert world.side.matched(asked, 0) == (None, False)
    assert world.step().waiting
    world.now_s += 0.9
    assert world.side.matched(asked, 0) == (None, False)
    world.now_s += 0.2
    assert world.side.matched(asked, 0) == (0, False)
    assert world.lookups[0].cancelled()
    assert world.side.counts["late"] == 1
    assert not world.step().waiting


def test_a_lookup_may_wait_in_its_queue() -> None:
    """Its patience begins when vLLM asks, not when the request arrives."""
    world = World(lookup_s=0.5)
    world.arrive(waiting := request("r", 1000), None)
    world.now_s += 100
    assert world.side.matched(waiting, 0) == (None, False)
    world.now_s += 0.9
    assert world.side.matched(waiting, 0) == (None, False)
    world.now_s += 0.2
    assert world.side.matched(waiting, 0) == (0, False)


def test_nobody_is_asked_for_a_while_after_a_late_answer() -> None:
    """But what this host holds is known all the time."""
    world = World(lookup_s=0.5)
    world.arrive(late := request("late", 1000), None)
    world.lookups[0].set_result(Known(tuple(cut(late.prompt_token_ids[:256], SPACE)), is_late=True))
    assert world.side.matched(late, 0) == (256, True)
    assert world.side.matched(late, 0) == (256, True)
    assert world.side.counts["late"] == 1
    world.arrive(second := request("second", 1000), 512)
    assert world.side.matched(second, 0) == (512, True)
    world.now_s += AWAY_S
    world.arrive(request("third", 1000), 768)
    assert world.limits_s == [0.5, 0.0, 0.5]


def test_a_failing_lookup_is_a_miss() -> None:
    world = World()
    world.side.arrived(asked := request("r", 1000))
    world.lookups[0].set_exception(ValueError("broken"))
    assert world.side.matched(asked, 0) == (0, False)


def test_what_has_no_name_is_left_alone() -> None:
    world = World()
    nowhere = SimpleNamespace(lora_name="a", lora_path="/nowhere", lora_int_id=1)
    for odd in (
        request("image", 1000, mm_features=[object()]),
        request("embeds", 1000, prompt_embeds=object()),
        request("setting", 1000, kv_transfer_params={"kdn": {"x": 1}}),
        request("lora", 1000, lora_request=nowhere),
    ):
        world.arrive(odd)
        assert world.side.matched(odd, 0) == (0, False)
        step = world.step(new=[(odd, list(range(8)), 0, 1000)])
        assert step.saves == ()
    assert world.lookups == []
    assert world.side.counts["refused"] == 4


def test_whatever_a_request_is_like_the_engine_goes_on() -> None:
    world = World()
    for number, odd in enumerate(
        ({"cache_salt": "\ud800"}, {"kv_transfer_params": {"kdn": {"quality": 10**5000}}})
    ):
        world.arrive(asked := request(f"odd {number}", 1000, **odd), 512)
        assert world.side.matched(asked, 0) == (0, False)
    assert world.side.counts["refused"] == 2


SKIPS = SimpleNamespace(skip_reading_prefix_cache=True, prompt_logprobs=1)


READS = SimpleNamespace(skip_reading_prefix_cache=False, prompt_logprobs=1)


@pytest.mark.parametrize(
    "more",
    [
        {"skip_reading_prefix_cache": True},
        {"skip_reading_prefix_cache": True, "sampling_params": SKIPS},
        {"sampling_params": SKIPS},
        {"pooling_params": SKIPS},
        {"skip_reading_prefix_cache": None, "sampling_params": None, "pooling_params": SKIPS},
        {"sampling_params": SimpleNamespace(prompt_logprobs=0)},  # before vLLM had the setting
        {"sampling_params": SimpleNamespace(prompt_logprob_token_ids=[1])},
    ],
)
def test_what_has_to_be_computed_is_not_looked_up(more: dict[str, Any]) -> None:
    """Here nobody drops a hit: what a scheduler of vLLM's is told, it does. What such a request
    computed is as good as any."""
    world = World()
    world.arrive(other := request("other", 1000), 768)
    assert world.side.matched(other, 0) == (768, True)
    world.arrive(asked := request("r", 1000, **more), 768)
    assert world.side.matched(asked, 0) == (0, False)
    asked.num_preemptions = 1
    assert world.side.matched(asked, 0) == (0, False)
    assert len(world.lookups) == 1
    assert world.side.counts["asked"] == 1
    [save] = world.step(new=[(asked, list(range(8)), 0, 1000)]).saves
    assert [chunk.start for chunk in save.chunks] == [0, 256, 512, 768]


def test_what_may_read_the_cache_does() -> None:
    world = World()
    for number, more in enumerate(
        ({"skip_reading_prefix_cache": False, "sampling_params": READS}, {"pooling_params": READS})
    ):
        world.arrive(asked := request(f"r{number}", 1000, **more), 768)
        assert world.side.matched(asked, 0) == (768, True)


def test_a_session_that_wants_its_prompts_log_probabilities_later() -> None:
    """vLLM replaces a session's parameters, and leaves what it took from the first ones."""
    world = World()
    world.arrive(asked := request("r", 1000, skip_reading_prefix_cache=False), 768)
    asked.sampling_params = SKIPS
    assert world.side.matched(asked, 0) == (0, False)


def test_finished_requests_leave_nothing() -> None:
    world = World()
    asked = request("r", 1000)
    world.arrive(asked, None)
    world.side.finished("r")
    assert world.lookups[0].cancelled()
    assert world.side.states == {}
    world.side.finished("r")


def test_an_idle_engine_waits_for_a_moment() -> None:
    """A lookup that is about to end is waited for, if there is nothing to compute: no step is lost.
    With something to compute nobody waits."""
    world = World()
    world.side._patience_s = 30.0
    asked = request("r", 1000)
    world.arrive(asked, None)
    known = Known(tuple(cut(asked.prompt_token_ids[:768], SPACE)))
    threading.Timer(0.05, lambda: world.lookups[0].set_result(known)).start()
    assert world.side.matched(asked, 0) == (768, True)
    world.step(new=[(asked, list(range(8)), 768, 232)])
    world.side._patience_s = 30.0
    other = request("other", 1000, first=5)
    world.arrive(other, None)
    assert world.side.matched(other, 0) == (None, False)
    world.lookups[1].set_result(Known())


def test_it_is_told_what_will_be_loaded_as_soon_as_vllm_says_what_it_holds() -> None:
    world = World(deadline_s=7.0)
    asked = request("r", 1000)
    world.arrive(asked, None)
    [prospect] = world.prospects
    assert (prospect.request_id, prospect.most, prospect.start) == ("r", 896, None)
    assert (prospect.deadline_s, prospect.block_tokens) == (7.0, BLOCK)
    world.side.matched(asked, 256)
    assert prospect.start == 256
    known = Known(tuple(cut(asked.prompt_token_ids[:992], SPACE)))
    assert prospect.chunks(known) == ((), 0)  # this host holds them
    streams: Any = dict.fromkeys((chunk.key for chunk in known.chunks), object())
    chunks, end = prospect.chunks(Known(known.chunks, streams))
    assert (chunks, end) == (known.chunks[1:], 896)
