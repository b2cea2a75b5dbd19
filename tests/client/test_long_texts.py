"""Models whose keys depend on the length of the text once it is long: dynamic NTK and longrope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.client.asynchronous import AsyncClient
from kdn.engines.checkpoint import spec_of_checkpoint
from kdn.engines.reading import forward, new_cache, read
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError
from tests.client.clients import QUESTION, TEXT, in_folder, own_answer, prompt_of

BORDER = 800
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "max_position_embeddings": BORDER,
}
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.25] * 8,
        "long_factor": [4.0] * 8,
    },
    "original_max_position_embeddings": BORDER,
    "max_position_embeddings": 4 * BORDER,
}
KINDS = [("llama", DYNAMIC, BORDER - 1), ("phi3", LONGROPE, BORDER)]


@pytest.fixture(params=KINDS, ids=["dynamic", "longrope"])
def model_and_limit(request: Any, tiny_model: Any) -> tuple[Any, int]:
    family, settings, limit = request.param
    extra = {"sliding_window": None} if family == "phi3" else {}
    return tiny_model(family, **settings, **extra), limit


def test_up_to_the_border_keys_are_those_of_positions(model_and_limit: tuple[Any, int]) -> None:
    """Read alone, or among as many tokens as are allowed; with one more they are others."""
    model, limit = model_and_limit
    assert spec_of(model).max_tokens == limit

    def keys_within(num_tokens: int) -> torch.Tensor:
        past = new_cache(model)
        forward(model, [3 + n % 100 for n in range(num_tokens)], past)
        keys: torch.Tensor = past.layers[0].keys[:, :, :300]
        return keys

    alone = keys_within(300)
    assert torch.allclose(keys_within(limit), alone, atol=1e-5)
    assert not torch.allclose(keys_within(BORDER + 1), alone, atol=1e-2)
    assert torch.allclose(keys_within(limit), alone, atol=1e-5)  # after a longer one, too
    assert spec_of(model).max_tokens == limit


def test_answers_below_the_border_and_refusals_above(
    model_and_limit: tuple[Any, int], tmp_path: Path
) -> None:
    model, limit = model_and_limit
    wanted = own_answer(model, prompt_of(TEXT, QUESTION), 6)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        learned = await client.learn("notes", TEXT)
        answer = client.ask("notes", QUESTION, max_new_tokens=6)
        assert await answer.read() == wanted
        assert answer.stats.known_tokens == learned.num_tokens
        tokens, _ = client.engine.prompts.learn(TEXT)
        assert (await client.load(tokens)).num_tokens == len(tokens) // 16 * 16
        longer = [*tokens, *[5] * (BORDER + 1 - len(tokens))]
        assert (await client.load(longer)).num_tokens == 0
        for refused in (client.ask("notes", "x" * 100).read(), client.learn("more", 2 * TEXT)):
            with pytest.raises(UnsupportedError, match=f"at most {limit:,} tokens"):
                await refused
        past = new_cache(model)
        read(model, longer, past)
        with pytest.raises(UnsupportedError, match=f"at most {limit:,} tokens"):
            await client.publish(longer, past)


def test_a_conversation_publishes_nothing_beyond_the_border(
    model_and_limit: tuple[Any, int], tmp_path: Path
) -> None:
    model, _ = model_and_limit
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # it does not stop

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        talk = client.converse("notes", max_new_tokens=100)
        await talk.ask(QUESTION).read()  # goes on beyond it
        assert await client.flush(20)
        assert len(talk.tokens) > BORDER
        known = await client.session.know(talk.tokens)
        assert known.end <= BORDER


def test_engines_that_compute_keys_themselves_refuse_them(
    model_and_limit: tuple[Any, int], tmp_path: Path
) -> None:
    model_and_limit[0].save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="depend on the total length"):
        spec_of_checkpoint(tmp_path)
