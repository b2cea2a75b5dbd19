"""A first answer from a coarse cache, which becomes the fine one while the answer goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdn.client.answers import Stats
from kdn.client.asynchronous import AsyncClient
from kdn.client.audit import kld
from kdn.client.contexts import Options
from kdn.client.engine import Context
from kdn.engines.generating import Sampling
from kdn.engines.reading import forward, new_cache, read
from kdn.node.server import listen, open_node
from tests.node.harness import config_for, run

TEXT = Path(__file__).parents[2] / "README.md"
NUM_TOKENS, NUM_SCORED = 512, 128
SLOW = 800_000
"""Bits a second: two chunks of SmolLM2 come at their coarsest level in half a second, as good as
the default quality asks for in four or five."""


def divergence(client: AsyncClient, context: Context, text: list[int]) -> float:
    """From the model's own reading, over the tokens that follow the context in the text."""
    model = client.engine.model
    own, scored = new_cache(model), text[NUM_TOKENS : NUM_TOKENS + NUM_SCORED]
    read(model, text[:NUM_TOKENS], own)
    held = context.num_tokens
    assert held == NUM_TOKENS
    found = kld(*(forward(model, scored, past, every=True) for past in (own, context.past)))
    context.past.crop(held - context.num_tokens)
    return float(found.mean())


def test_a_coarse_cache_becomes_the_fine_one_while_the_answer_goes_on(
    smollm2: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = smollm2
    text = tokenizer(TEXT.read_text()).input_ids
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)  # it goes on

    async def learn() -> None:
        async with AsyncClient(tmp_path / "data", model=smollm2, recompute=False) as client:
            await client.learn("manual", text[:NUM_TOKENS])

    async def ask(url: str) -> tuple[float, float]:
        async with AsyncClient(url, model=smollm2, recompute=False) as client:
            stats, options = Stats(), Options("default", 2.0, Sampling(256))
            context = await client.contexts.load(text[:NUM_TOKENS], options, stats)
            coarse, first = divergence(client, context, text), stats.levels
            goal = 1 + next(
                i for i, one in enumerate(client.session.codec.expected_kld) if one <= 0.0035
            )
            assert 0 < min(first) < goal
            prompt = text[: NUM_TOKENS + 8]
            answer = client.turn(context, prompt, options, stats, client.now_s())
            async for _ in answer:
                if min(stats.levels) >= goal:
                    break
            await answer.aclose()
            assert min(stats.levels) >= goal > 0 < stats.refined_chunks <= 2
            assert stats.new_tokens > 1, "the first token did not wait for it"
            context.past.crop(NUM_TOKENS - context.num_tokens)
            return coarse, divergence(client, context, text)

    async def ask_slowly() -> tuple[float, float]:
        config = config_for(tmp_path / "data", egress_bits_per_s=SLOW)
        async with open_node(config) as node, listen(config, node) as listening:
            return await ask(listening.url)

    run(learn(), 120.0)
    coarse, fine = run(ask_slowly(), 120.0)
    assert fine < 0.01 < coarse
    assert fine < coarse / 2
