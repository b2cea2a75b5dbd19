"""A model that has changed since it was connected neither loads nor publishes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.cache.tensors import KVCache
from kdn.delivery.sending import Counts
from kdn.errors import MismatchError, UnsupportedError
from tests.client.clients import QUESTION, TEXT, client_at, own_answer, prompt_of
from tests.engines.lora import attach
from tests.node.harness import run


def test_another_adapter_never_gets_this_models_cache(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    prompt = prompt_of(TEXT, QUESTION)

    async def test() -> None:
        async with client_at(tmp_path, model) as client:
            await client.learn("notes", TEXT)
            talk = client.converse("notes")
            await talk.ask(QUESTION).read()
            said = talk.tokens
            adapters = attach("stand-in", model)
            calls = [
                lambda: client.ask("notes", QUESTION).read(),
                lambda: client.ask_all("notes", [QUESTION]),
                lambda: talk.ask(QUESTION).read(),
                lambda: client.learn("more", TEXT[:400]),
                lambda: client.load(prompt),
                lambda: client.publish(prompt, KVCache(*(torch.zeros(4, 16, 2, 16),) * 2)),
            ]
            for switch in (lambda: adapters.set_adapter("two"), adapters.disable):
                switch()
                for call in calls:
                    with pytest.raises(UnsupportedError, match="has an adapter"):
                        await call()
            adapters.set_adapter("two")
            adapters.merge_and_unload()
            for call in calls:
                with pytest.raises(MismatchError, match="connect again"):
                    await call()
            assert talk.tokens == said
        async with client_at(tmp_path, model) as client:
            assert (await client.load(prompt)).num_tokens == 0
            await client.learn("notes", TEXT)
            answer = await client.ask("notes", QUESTION, max_new_tokens=9).read()
            assert answer == own_answer(model, prompt, 9)

    run(test())


def test_a_model_trained_while_it_reads_publishes_nothing(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")

    async def test() -> None:
        async with client_at(tmp_path, model) as client:
            forward = type(model).forward

            def trains(self: Any, *arguments: Any, **options: Any) -> Any:
                self.lm_head.weight.data *= 1.01
                return forward(self, *arguments, **options)

            monkeypatch.setattr(type(model), "forward", trains)
            with pytest.raises(MismatchError, match="connect again"):
                await client.learn("notes", TEXT)
            assert client.session.publisher.counts == Counts()

    run(test())
