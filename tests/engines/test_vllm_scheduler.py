"""The scheduler's side with made-up requests: what is loaded, what is published, what is not."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdn.cache.keys import Namespace, cut
from kdn.engines.vllm.identity import Identity
from kdn.engines.vllm.known import Known
from kdn.engines.vllm.messages import Loaded
from kdn.engines.vllm.scheduler import AWAY_S, SchedulerSide
from kdn.engines.vllm.settings import Settings

BLOCK = 128
SPACE = Namespace(b"model", b"profile")


class World:
    """A scheduler, a clock, and lookups that are answered when a test says so."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.lookups: list[Future[Known]] = []
        self.limits_s: list[float] = []
        self.side = SchedulerSide(
            Settings.parse({"url": "x", **settings}), Identity(SPACE), self.look_up, BLOCK,
            clock=lambda: self.now_s,
        )  # fmt: skip

    def look_up(
        self, tokens: Any, namespace: Namespace, quality: float, limit_s: float
    ) -> Future[Known]:
        self.limits_s.append(limit_s)
        self.lookups.append(Future())
        return self.lookups[-1]

    def arrive(self, request: Any, known: int | None = 0) -> None:
        """`known` tokens are known; None: no answer yet."""
        self.side.arrived(request)
        if known is not None and self.lookups and not self.lookups[-1].done():
            chunks = tuple(cut(request.prompt_token_ids[:known], SPACE))
            self.lookups[-1].set_result(Known(chunks))

    def step(self, *, new: Any = (), cached: Any = (), resumed: Any = ()) -> Any:
        """`new`: (request, blocks, computed, tokens); `cached`: (request, new blocks, tokens)."""
        entries = [*cached, *resumed]
        for r, _, computed, _ in new:
            r.num_computed_tokens = computed
        return self.side.step(
            SimpleNamespace(
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=r.request_id, block_ids=(b,), num_computed_tokens=c)
                    for r, b, c, _ in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[entry[0].request_id for entry in entries],
                    resumed_req_ids={entry[0].request_id for entry in resumed},
                    new_block_ids=[(entry[1],) for entry in entries],
                    num_computed_tokens=[entry[0].num_computed_tokens for entry in entries],
                ),
                num_scheduled_tokens={
                    **{r.request_id: n for r, _, _, n in new},
                    **{entry[0].request_id: entry[2] for entry in entries},
                },
                total_num_scheduled_tokens=1,
            )
        )


def request(name: str, num_tokens: int, first: int = 0, **more: Any) -> Any:
    tokens = [first, *range(1, num_tokens)]
    return SimpleNamespace(
        **{
            "request_id": name, "prompt_token_ids": tokens, "all_token_ids": tokens,
            "num_tokens": num_tokens, "num_prompt_tokens": num_tokens, "num_computed_tokens": 0,
            "num_preemptions": 0, "kv_transfer_params": None, "mm_features": [],
            "prompt_embeds": None, "cache_salt": None, "lora_request": None,
            "sampling_params": None, "pooling_params": None, **more,
        }
    )  # fmt: skip


# loading


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


def test_nobody_is_asked_for_a_while_after_a_late_answer() -> None:
    """But what this host holds is known all the time."""
    world = World(lookup_s=0.5)
    world.arrive(late := request("late", 1000), None)
    world.lookups[0].set_result(Known(tuple(cut(late.prompt_token_ids[:256], SPACE)), late=True))
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
    assert world.side._contexts == {}
    world.side.finished("r")


# sessions whose input is streamed


def go_on(session: Any, num_tokens: int, *media: object) -> None:
    """As vLLM continues a session: in place, in the request that the connector knows."""
    session.prompt_token_ids = session.all_token_ids = list(range(num_tokens))
    session.num_tokens = session.num_prompt_tokens = num_tokens
    session.mm_features.extend(media)


def test_media_that_come_later_are_not_published() -> None:
    world = World()
    world.arrive(session := request("s", 300), 0)
    [save] = world.step(new=[(session, [0, 1, 2], 0, 300)]).saves
    assert [chunk.end for chunk in save.chunks] == [256, 288]
    session.num_computed_tokens = 300
    go_on(session, 1000, object())
    assert world.step(cached=[(session, [3, 4, 5, 6, 7], 700)]).saves == ()
    assert world.side.counts["refused"] == 1
    session.num_computed_tokens = 1000
    go_on(session, 1500)
    assert world.step(cached=[(session, [8, 9, 10, 11], 500)]).saves == ()
    assert world.side.counts["refused"] == 1


def test_media_that_come_later_are_not_loaded() -> None:
    """Not with an answer from before, nor is it asked again when the session is resumed."""
    world = World()
    world.arrive(session := request("s", 1000), 768)
    session.mm_features.append(object())
    assert world.side.matched(session, 0) == (0, False)
    session.num_preemptions = 1
    assert world.side.matched(session, 0) == (0, False)
    assert len(world.lookups) == 1


def test_a_session_that_goes_on_is_looked_up_again() -> None:
    """What was known of its beginning may not be how it goes on."""
    world = World()
    world.arrive(session := request("s", 600), 512)
    go_on(session, 1000)
    assert world.side.matched(session, 0) == (None, False)
    world.lookups[1].set_result(Known(tuple(cut(session.prompt_token_ids[:768], SPACE))))
    assert world.side.matched(session, 0) == (768, True)


@pytest.mark.parametrize("change", [{"cache_salt": "other"}, {"prompt_embeds": object()}])
def test_whatever_else_may_change(change: dict[str, Any]) -> None:
    world = World()
    world.arrive(asked := request("r", 1000, cache_salt="mine"), 768)
    vars(asked).update(change)
    assert world.side.matched(asked, 0) == (0, False)
    assert world.step(new=[(asked, list(range(8)), 0, 1000)]).saves == ()
    assert world.side.counts["refused"] == 1


def test_an_adapter_whose_files_change_under_a_request(tmp_path: Path) -> None:
    """Before vLLM has loaded it, perhaps: what was computed may be of either."""
    world = World()
    weights = tmp_path / "a.safetensors"
    weights.write_bytes(b"one")
    (tmp_path / "adapter_config.json").write_text("{}")
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path), lora_int_id=1)
    world.arrive(asked := request("r", 1000, lora_request=lora), 0)
    weights.write_bytes(b"two")
    assert world.step(new=[(asked, list(range(8)), 0, 1000)]).saves == ()
    assert world.side.counts["refused"] == 1


# what an operator has set


def test_a_request_cannot_spoil_blocks_for_others() -> None:
    """vLLM's prefix cache hands on what it loaded, and its load holds a slot."""
    world = World(quality=0.01, deadline_s=3)
    wish = {"kv_transfer_params": {"kdn": {"quality": 3600, "deadline_s": 3600}}}
    assert loaded_by(world, request("r", 1000, **wish)) == (0.01, 3.0)
    assert loaded_by(world, request("s", 1000, cache_salt="mine", **wish)) == (0.01, 3.0)
    world = World(quality=0.01, deadline_s=3, allow_coarser=True)
    assert loaded_by(world, request("r", 1000, **wish)) == (0.01, 3.0)
    assert loaded_by(world, request("s", 1000, cache_salt="mine", **wish)) == (3600.0, 3.0)


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


def loaded_by(world: World, asked: Any) -> tuple[float, float]:
    load = load_of(world, asked)
    return load.enough_kld, load.deadline_s


def load_of(world: World, asked: Any) -> Any:
    world.arrive(asked, 768)
    world.side.matched(asked, 0)
    world.side.allocated(asked, list(range(8)), 768)
    [load] = world.step().loads
    return load


# publishing


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
    world.side.loaded(Loaded({"r": 256}, {"r": 256}))
    [save] = world.step(new=[(asked, list(range(8, 16)), 256, 744)]).saves
    assert [(c.start, c.end) for c in save.chunks] == [(256, 512), (512, 768)]


def test_publishing_can_be_off() -> None:
    world = World(publish=False)
    asked = request("r", 1000)
    world.arrive(asked, 0)
    assert world.step(new=[(asked, list(range(8)), 0, 1000)]).saves == ()


# no generation loss


def loaded_with_losses(world: World, exact_until: int = 0, first_block: int = 0) -> Any:
    asked = request("lossy", 1000)
    world.arrive(asked, 512)
    world.side.matched(asked, 0)
    world.side.allocated(asked, list(range(first_block, first_block + 8)), 512)
    world.side.loaded(Loaded({"lossy": exact_until}))
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
    world.side._saved_keys.clear()
    world.arrive(again := request("again", 1000, first=77), 0)
    [save] = world.step(new=[(again, [*range(7), 30], 896, 104)]).saves
    assert len(save.chunks) == 4


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


def test_after_a_reset_nothing_is_loaded_or_published() -> None:
    world = World()
    world.arrive(before := request("before", 1000), 768)
    world.side.stop()
    assert world.side.matched(before, 0) == (0, False)
    world.arrive(after := request("after", 1000), 768)
    assert world.side.matched(after, 0) == (0, False)
    assert len(world.lookups) == 1
    assert world.step(new=[(after, list(range(8)), 0, 1000)]).saves == ()


def test_other_weights_are_as_good_as_a_reset() -> None:
    world = World()
    world.arrive(before := request("before", 1000), 768)
    world.side.loaded(Loaded(weights_changed=True))
    assert world.side.matched(before, 0) == (0, False)
    assert world.step(new=[(before, list(range(8)), 0, 1000)]).saves == ()
    world.arrive(after := request("after", 1000), 768)
    assert world.side.matched(after, 0) == (0, False)
    assert len(world.lookups) == 1
    assert world.side.counts["stopped"] == 1


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


def test_whatever_a_request_is_like_the_engine_goes_on() -> None:
    world = World()
    for number, odd in enumerate(
        ({"cache_salt": "\ud800"}, {"kv_transfer_params": {"kdn": {"quality": 10**5000}}})
    ):
        world.arrive(asked := request(f"odd {number}", 1000, **odd), 512)
        assert world.side.matched(asked, 0) == (0, False)
    assert world.side.counts["refused"] == 2


def test_after_a_reset_the_worker_is_told() -> None:
    world = World()
    assert not world.step().stopped
    world.side.stop()
    assert world.step().stopped
