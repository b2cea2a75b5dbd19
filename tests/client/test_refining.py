"""A first answer from a coarse cache, which becomes the fine one while the answer goes on.

The real model reads a fixed text and answers over a slow link. The client's own audits tell how far
off its caches are: they hold every answer against what the model would have said by itself.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kdn.client.answers import Answer
from kdn.client.asynchronous import AsyncClient
from kdn.delivery.request import enough_levels
from kdn.node.server import listen, open_node
from kdn.session.quality import QUALITIES
from tests.node.harness import config_for, run

TEXT = (Path(__file__).parent / "tides.txt").read_text()
QUESTION = "Tell me the whole story of the tide table."
NUM_ANSWER = 48
SLOW = 600_000
"""Bits a second: the coarsest level of the text takes one or two seconds, the default quality more
than the deadline by far, on any machine."""
DEADLINE_S = 4.0


async def read_slowly(answer: Answer, goal: int) -> None:
    """As somebody who reads at the link's pace, until all levels are there."""
    assert await anext(answer)
    assert not answer.stats.refined_chunks, "the first token waits for nothing"
    assert 0 < min(answer.stats.levels) < goal
    async for _ in answer:
        if min(answer.stats.levels) < goal:
            await asyncio.sleep(0.5)


@pytest.mark.model
def test_a_coarse_cache_becomes_the_fine_one_while_the_answer_goes_on(
    smollm2: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2[0].generation_config, "eos_token_id", None)  # it goes on
    coarse, refined = klds(smollm2, tmp_path)
    assert coarse > 0.02
    assert refined < coarse / 3


def klds(pair: tuple[Any, Any], folder: Path) -> tuple[float, float]:
    """Of an answer from the coarsest level, and of one whose cache became finer."""

    def client_at(where: Any) -> AsyncClient:
        return AsyncClient(where, model=pair, recompute=False, audit_share=1.0)

    async def coarse_kld(url: str) -> float:
        """It also compiles the decoder, for which no deadline shall wait."""
        async with client_at(url) as client:
            kld = client.session.codec.expected_kld[0]
            answer = client.ask("tides", QUESTION, quality=kld, max_new_tokens=NUM_ANSWER)
            await answer.read()
        assert set(answer.stats.levels) == {1}
        assert (client.metrics.audits, answer.stats.refined_chunks) == (1, 0)
        return client.metrics.audit_kld

    async def refined_kld(url: str) -> float:
        async with client_at(url) as client:
            goal = enough_levels(client.session.codec.expected_kld, QUALITIES["default"])
            answer = client.ask(
                "tides", QUESTION, quality="default", deadline_s=DEADLINE_S,
                max_new_tokens=NUM_ANSWER,
            )  # fmt: skip
            await read_slowly(answer, goal)
        assert min(answer.stats.levels) >= goal
        assert 0 < answer.stats.refined_chunks <= len(answer.stats.levels)
        assert answer.stats.refined_bytes > 0
        assert client.metrics.audits == 1
        return client.metrics.audit_kld

    async def test() -> tuple[float, float]:
        async with client_at(folder / "data") as client:
            await client.learn("tides", TEXT)
        config = config_for(folder / "data", egress_bits_per_s=SLOW)
        async with open_node(config) as node, listen(config, node) as listening:
            return await coarse_kld(listening.url), await refined_kld(listening.url)

    both: tuple[float, float] = run(test(), 180.0)
    return both
