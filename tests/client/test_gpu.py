"""`kdn.connect` with a model on a GPU: the same answers, from memory that the decoder wrote to.

The real model is not fetched: it is where kdn keeps it, or in the folder that `KDN_SMOLLM2` names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import kdn
from kdn.cache.folder import cache_folder
from kdn.client.answers import Stats
from kdn.client.asynchronous import AsyncClient
from kdn.client.contexts import Options
from kdn.client.learning import chunks_to_learn
from kdn.engines.generating import Sampling
from kdn.engines.models import load_model
from kdn.engines.transformers import spec_of
from tests.client import test_refining
from tests.client.clients import QUESTION, TEXT, client_at, own_answer, prompt_of
from tests.client.letters import Letters
from tests.node.harness import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STORY = test_refining.TEXT


@pytest.fixture(scope="module")
def folder() -> Path:
    """Of the real model."""
    known = [Path(os.environ["KDN_SMOLLM2"])] if "KDN_SMOLLM2" in os.environ else []
    known += sorted((cache_folder() / "models").glob("smollm2-*"))
    for one in known:
        if (one / "config.json").is_file():
            return one
    pytest.skip("needs a checkpoint of SmolLM2 (KDN_SMOLLM2)")


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Any, Any]:
    model, tokenizer = load_model(folder, torch.bfloat16, "cuda")
    model.generation_config.eos_token_id = None  # it goes on
    return model, tokenizer


async def own(client: AsyncClient, name: str, question: str, count: int) -> str:
    """What the model answers without kdn, reading the same pieces."""
    engine, contexts = client.engine, client.contexts
    found = await client.named(name)
    tokens = found.tokens
    context = engine.new_context()
    await contexts.read(context, tokens, chunks_to_learn(tokens, engine.namespace))
    prompt = [*tokens, *engine.prompts.ask(question, found.style)]
    options = Options(sampling=Sampling(count))
    said = client.turn(context, prompt, options, Stats(), client.now_s())
    return "".join([piece async for piece in said])


def test_exactly_the_same_answers(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama").to("cuda")
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 9)

    async def test() -> None:
        async with client_at(tmp_path, model) as client:
            await client.learn("notes", TEXT)
        async with client_at(tmp_path, model, recompute=True) as client:
            assert client.engine.by_rows
            answer = client.ask("notes", QUESTION, max_new_tokens=9)
            assert await answer.read() == expected
            loaded = await client.load(prompt_of(TEXT, QUESTION))
            assert loaded.cache is not None
            assert (loaded.num_tokens, loaded.cache.keys.is_cuda) == (704, True)
            assert await client.ask_all("notes", [QUESTION] * 2, max_new_tokens=9) == [expected] * 2

    run(test())


def test_layers_with_windows(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("gemma2", head_dim=16, sliding_window=32).to("cuda")
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 9)

    async def test() -> None:
        async with client_at(tmp_path, model) as client:
            await client.learn("notes", TEXT)
            assert await client.ask("notes", QUESTION, max_new_tokens=9).read() == expected

    run(test())


def test_what_a_cpu_learned_a_gpu_knows(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 9)

    async def learn() -> None:
        async with client_at(tmp_path, model) as client:
            await client.learn("notes", TEXT)

    async def ask() -> None:
        async with client_at(tmp_path, model.to("cuda")) as client:
            answer = client.ask("notes", QUESTION, max_new_tokens=9)
            assert await answer.read() == expected
            assert answer.stats.known_tokens == 709

    run(learn())
    run(ask())


def test_a_models_own_cache_is_published(tiny_model: Any, tmp_path: Path) -> None:
    """Also one that was computed in a stream of the caller's. The model does not read along: it
    would round otherwise than it did when it read the whole prompt at once."""
    model, prompt = tiny_model("llama").to("cuda"), prompt_of(TEXT, QUESTION)
    settings = {"codec": "exact", "recompute": False}
    with kdn.connect(tmp_path, model=(model, Letters()), **settings) as client:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            ids = torch.tensor([prompt], device="cuda")
            past = model(ids, use_cache=True).past_key_values
            assert client.publish(prompt, past)
        assert client.flush()
        loaded = client.load(prompt)
        assert loaded.cache is not None
        stream.synchronize()
        for layer in range(4):
            own = past.layers[layer].keys[0].transpose(0, 1)[: loaded.num_tokens]
            assert torch.equal(loaded.cache.keys[layer], own), layer


def test_names_are_those_of_the_cpu(pair: tuple[Any, Any], folder: Path) -> None:
    assert spec_of(pair[0]) == spec_of(load_model(folder)[0])


@pytest.mark.parametrize("codec", ["exact", "klt"])
def test_smollm2_in_bfloat16(codec: str, pair: tuple[Any, Any], tmp_path: Path) -> None:
    question = test_refining.QUESTION

    async def test() -> None:
        async with AsyncClient(tmp_path, model=pair, codec=codec) as client:
            await client.learn("tides", STORY)
        settings = {"codec": codec, "quality": "high", "audit_share": 1.0}
        async with AsyncClient(tmp_path, model=pair, **settings) as client:
            answer = client.ask("tides", question, max_new_tokens=24)
            text = await answer.read()
            assert not answer.stats.troubles
            # On a fast GPU the model may well have read it before it was delivered.
            tokens = (await client.named("tides")).tokens
            assert (await client.load(tokens)).num_tokens > 256
            if codec == "exact":
                assert text == await own(client, "tides", question, 24)
        assert client.metrics.audits == 1
        if codec == "klt":
            assert client.metrics.audit_kld < 0.05

    run(test(), 300.0)


def test_a_coarse_cache_becomes_finer(pair: tuple[Any, Any], tmp_path: Path) -> None:
    coarse, refined = test_refining.klds(pair, tmp_path)
    assert refined < coarse / 2


def test_memory_is_given_back(pair: tuple[Any, Any], tmp_path: Path) -> None:
    with kdn.connect(tmp_path, model=pair) as client:
        client.learn("tides", STORY)
        held = []
        for _ in range(6):
            client.ask("tides", "Who wrote the tide table?", max_new_tokens=4).read()
            held.append(torch.cuda.memory_allocated())
        assert held[-1] <= held[1]
