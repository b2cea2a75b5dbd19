"""Answers that are stopped, cancelled or fail in the middle leave nothing wrong behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.client.asynchronous import AsyncClient
from kdn.engines.reading import new_cache, read
from kdn.errors import MismatchError
from tests.client.clients import TEXT, in_folder, own_answer


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_question_that_is_cancelled_is_read_or_not_but_never_half(
    family: str, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the conversation publishes afterwards is what the model itself would compute."""
    model = tiny_model(family, **({"sliding_window": 64} if family == "mistral" else {}))

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        talk = client.converse(max_new_tokens=7)
        await talk.ask(TEXT[:200]).read()
        reading, forward = asyncio.Event(), type(model).forward
        loop = asyncio.get_running_loop()

        def slow(self: Any, *arguments: Any, **options: Any) -> Any:
            loop.call_soon_threadsafe(reading.set)
            return forward(self, *arguments, **options)

        monkeypatch.setattr(type(model), "forward", slow)
        asking = asyncio.create_task(talk.ask("never mind" * 9).read())
        await reading.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        monkeypatch.undo()
        said = talk.tokens
        answer = await talk.ask(TEXT[200:400]).read()
        prompt = talk.tokens[: len(talk.tokens) - len(answer)]
        assert prompt[: len(said)] == said
        assert answer == own_answer(model, prompt, 7)
        assert await client.flush(10.0)
        loaded = await client.load(talk.tokens)
        assert loaded.num_tokens >= 256
        assert loaded.past_key_values is not None
        own, theirs = new_cache(model), loaded.past_key_values
        read(model, talk.tokens[: loaded.num_tokens], own)
        for mine, found in zip(own.layers, theirs.layers, strict=True):
            size = min(mine.keys.shape[2], found.keys.shape[2])
            # Read in other pieces, so not bit by bit; another token's values are far off.
            assert torch.allclose(mine.keys[:, :, -size:], found.keys[:, :, -size:], atol=1e-3)


def test_a_conversation_that_failed_halfway_does_not_go_on(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        talk = client.converse(max_new_tokens=3)
        await talk.ask("one?").read()

        def fails(*arguments: Any, **options: Any) -> Any:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(model.model.layers[2], "forward", fails)
        other = client.converse(max_new_tokens=3)
        for conversation, question in ((talk, "two?"), (other, TEXT[:400])):
            with pytest.raises(RuntimeError, match="out of memory"):
                await conversation.ask(question).read()
        monkeypatch.undo()
        assert await client.flush(10.0)  # of the first answer, what was published
        before = replace(client.session.publisher.counts)
        for conversation in (talk, other):  # of the second, the first layers hold a whole chunk
            with pytest.raises(MismatchError, match="begin anew"):
                await conversation.ask("three?").read()
        assert await client.flush(10.0)
        assert client.session.publisher.counts == before
        await client.converse(max_new_tokens=3).ask("one?").read()
