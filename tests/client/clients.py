"""Clients of tiny random models with the lossless codec, and what the models answer without kdn."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from kdn.client.asynchronous import AsyncClient
from kdn.engines.generating import Sampling, generate
from kdn.engines.reading import new_cache, read
from tests.client.letters import Letters
from tests.node.harness import run

TEXT = "".join(chr(97 + i * i % 23 + i % 3) for i in range(700))
QUESTION = "what comes next?"
RUN_S = 180.0
"""For a test, on a busy machine that has to compile kernels first, too."""


def client_at(where: Any, model: Any, **settings: Any) -> AsyncClient:
    settings = {"codec": "exact", "recompute": False, **settings}
    return AsyncClient(where, model=(model, settings.pop("tokenizer", Letters())), **settings)


def in_folder(folder: Path, model: Any, **settings: Any) -> Callable[..., Any]:
    """Run a test with a client of its own on a folder."""

    def decorate(test: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        async def work() -> Any:
            async with client_at(folder, model, **settings) as client:
                return await test(client)

        return run(work(), RUN_S)

    return decorate


def own_answer(model: Any, prompt: list[int], count: int, temperature: float = 0.0) -> str:
    """Without kdn: the model reads all and goes on."""
    past = new_cache(model)
    logits = read(model, prompt, past)
    tokens = list(generate(model, logits, past, Sampling(count, temperature)))
    return Letters().decode(tokens)


def prompt_of(text: str, question: str) -> list[int]:
    shown = f"\x01[user]{text}\n\n{question}<end>[assistant]"
    return [ord(letter) for letter in shown]
