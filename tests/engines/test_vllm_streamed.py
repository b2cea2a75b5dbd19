"""Sessions whose input is streamed, and whatever else changes under a request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdn.cache.keys import cut
from kdn.delivery.known import Known
from tests.engines.vllm_scheduling import SPACE, World, request


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
