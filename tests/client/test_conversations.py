"""Questions that build on each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdn.client.asynchronous import AsyncClient
from tests.client.clients import TEXT, in_folder, own_answer, prompt_of


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_conversation_goes_on_elsewhere(family: str, tiny_model: Any, tmp_path: Path) -> None:
    settings = {"head_dim": 16, "sliding_window": 64} if family == "gemma2" else {}
    model = tiny_model(family, **settings)

    @in_folder(tmp_path, model)
    async def tokens(client: AsyncClient) -> list[int]:
        await client.learn("notes", TEXT)
        talk = client.converse("notes", max_new_tokens=40)
        first = talk.ask("one?")
        text = await first.read()
        assert text == own_answer(model, prompt_of(TEXT, "one?"), 40)
        second = talk.ask("two?")
        shown = f"\x01[user]{TEXT}\n\none?<end>[assistant]{text}<end>[user]two?<end>[assistant]"
        assert await second.read() == own_answer(model, [ord(c) for c in shown], 40)
        assert second.stats.known_tokens > first.stats.known_tokens
        assert second.stats.computed_tokens == len("<end>[user]two?<end>[assistant]") + 1
        for _ in range(2):
            await talk.ask("and then, what else is there to be said about it?" * 2).read()
        assert await client.flush(20)
        assert len(talk.tokens) > 1024
        return talk.tokens

    @in_folder(tmp_path, tiny_model(family, **settings))
    async def _(client: AsyncClient) -> None:
        loaded = await client.load(tokens)
        assert loaded.num_tokens >= 1024


def test_a_conversation_may_begin_with_nothing_learned(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        text = await client.converse(max_new_tokens=7).ask("hi").read()
        prompt = [ord(c) for c in "\x01[user]hi<end>[assistant]"]
        assert text == own_answer(client.engine.model, prompt, 7)
