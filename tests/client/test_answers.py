"""Learning at one place, asking at another: what is loaded, what is computed, and that it is right.

Tiny random models with the lossless codec: whatever they answer, they must answer the same as the
model does from its own cache, token for token.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.cache.keys import cut
from kdn.client.asynchronous import AsyncClient
from kdn.engines.reading import new_cache, read
from kdn.errors import UnsupportedError
from tests.client.clients import QUESTION, TEXT, client_at, in_folder, own_answer, prompt_of
from tests.client.letters import Letters
from tests.conftest import LATENTS
from tests.node.harness import Running, with_node

MIXED_LATENTS = {
    **LATENTS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("mistral", {"sliding_window": 64}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16, "sliding_window": 64}),
    (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 300,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    ("phi", {}),
    ("deepseek_v3", MIXED_LATENTS),
]


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_another_instance_answers_as_the_first_would(
    family: str, settings: dict[str, Any], tiny_model: Any, tmp_path: Path
) -> None:
    model = tiny_model(family, **settings)
    temperature = 1.0 if family == "gemma3_text" else 0.0  # this one repeats itself
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 24, temperature)
    assert len(set(expected)) > 1

    async def test(node: Running) -> None:
        async with client_at(node.url, model) as client:
            learned = await client.learn("notes", TEXT)
            assert (learned.known_chunks, learned.new_chunks) == (0, 4)  # the tail in two lengths
            assert learned.computed_tokens == learned.num_tokens
        async with client_at(node.url, tiny_model(family, **settings)) as client:
            answer = client.ask("notes", QUESTION, max_new_tokens=24, temperature=temperature)
            assert await answer.read() == expected
            stats = answer.stats
            assert stats.known_tokens == learned.computed_tokens
            assert stats.known_tokens + stats.computed_tokens == len(prompt_of(TEXT, QUESTION))
            assert 1 < stats.new_tokens <= 24
            assert stats.fetched_bytes > 0 < stats.ttft_s
            assert not stats.troubles

    with_node(tmp_path, test)


def test_wrong_values_give_a_wrong_answer(tiny_model: Any, tmp_path: Path) -> None:
    """The negative control: what is loaded is what the answer comes from."""
    model = tiny_model("llama")
    right = own_answer(model, prompt_of(TEXT, QUESTION), 24)

    @in_folder(tmp_path, model)
    async def wrong(client: AsyncClient) -> str:
        tokens, _ = client.engine.prompts.learn(TEXT)
        past = new_cache(model)
        read(model, tokens[::-1], past)  # another context's values under this one's keys
        assert await client.publish(tokens, past) == 3
        assert await client.flush(20)
        await client.learn("notes", TEXT)
        answer = client.ask("notes", QUESTION, max_new_tokens=24)
        text = await answer.read()
        assert answer.stats.known_tokens > 0
        return text

    assert wrong != right


def test_learning_again_reads_only_what_is_new(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        first = await client.learn("notes", TEXT)
        again = await client.learn("notes", TEXT)
        assert (again.computed_tokens, again.known_chunks) == (0, first.new_chunks)
        longer = await client.learn("longer", TEXT + TEXT)
        assert (longer.known_chunks, longer.computed_tokens) == (
            2,
            longer.num_tokens - 512,
        )
        answer = client.ask("longer", QUESTION, max_new_tokens=20)
        expected = own_answer(client.engine.model, prompt_of(TEXT + TEXT, QUESTION), 20)
        assert await answer.read() == expected


def test_what_was_evicted_is_read_and_published_again(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        chunks = cut(client.engine.prompts.learn(TEXT)[0], client.session.namespace)
        store = client.session.places.publish_to.store
        assert await store.delete(chunks[1].key)
        answer = client.ask("notes", QUESTION, max_new_tokens=20)
        expected = own_answer(client.engine.model, prompt_of(TEXT, QUESTION), 20)
        assert await answer.read() == expected
        assert answer.stats.known_tokens == 256
        assert await client.flush(20)
        assert all(await store.lookup([chunk.key for chunk in chunks]))


def test_token_ids_are_continued_as_they_are(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = list(np.random.default_rng(2).integers(3, 128, 300))

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("ids", ids)
        expected = own_answer(model, [*ids, *map(ord, "abc")], 9)
        assert await client.ask("ids", "abc", max_new_tokens=9).read() == expected
        with pytest.raises(UnsupportedError, match="token ids"):
            await client.learn("odd", [0.5, 1.5])


def test_messages_take_the_form_of_the_chat_template(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        messages = [{"role": "system", "content": TEXT[:300]}]
        await client.learn("messages", messages)
        prompt = [ord(c) for c in f"\x01[system]{TEXT[:300]}<end>[user]abc<end>[assistant]"]
        expected = own_answer(model, prompt, 9)
        assert await client.ask("messages", "abc", max_new_tokens=9).read() == expected


def test_without_a_chat_template_text_is_plain(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")

    @in_folder(tmp_path, model, tokenizer=Letters(chat=False, bos=False))
    async def _(client: AsyncClient) -> None:
        await client.learn("plain", TEXT)
        prompt = [ord(c) for c in f"{TEXT}\n\nabc"]
        expected = own_answer(model, prompt, 9)
        assert await client.ask("plain", "abc", max_new_tokens=9).read() == expected
        with pytest.raises(UnsupportedError, match="chat template"):
            await client.learn("odd", [{"role": "user", "content": "hello"}])


def test_short_texts_have_a_chunk_of_their_length(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"), tokenizer=Letters(chat=False))
    async def _(client: AsyncClient) -> None:
        learned = await client.learn("short", "abc")
        assert (learned.num_tokens, learned.new_chunks) == (6, 1)
        answer = client.ask("short", "d", max_new_tokens=3)
        expected = own_answer(client.engine.model, [1, *map(ord, "abc\n\nd")], 3)
        assert await answer.read() == expected
        assert (answer.stats.known_tokens, answer.stats.computed_tokens) == (6, 1)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_batch_is_answered_as_its_questions_one_by_one(
    family: str, tiny_model: Any, tmp_path: Path
) -> None:
    model = tiny_model(family, **({"sliding_window": 64} if family == "mistral" else {}))
    questions = ["one?", "and what about two?", "?"]

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        answers = await client.ask_all("notes", questions, max_new_tokens=12)
        expected = [own_answer(model, prompt_of(TEXT, question), 12) for question in questions]
        assert answers == expected
        assert len(set(expected)) > 1
        assert client.metrics.known_tokens == 709
        assert await client.ask_all("notes", questions[:1], max_new_tokens=12) == expected[:1]


def test_a_node_that_is_away_costs_time_but_no_answer(tiny_model: Any, tmp_path: Path) -> None:
    """It still tells what the name stands for, but no chunk: the model reads them all."""
    model = tiny_model("llama")

    async def test(node: Running) -> None:
        async with client_at(node.url, model) as client:
            await client.learn("notes", TEXT)
            tokens = (await client.named("notes")).tokens
            await node.listening.node.depot.store.close()
            answer = client.ask("notes", QUESTION, max_new_tokens=12, deadline_s=0.4)
            assert await answer.read() == own_answer(model, prompt_of(TEXT, QUESTION), 12)
            assert answer.stats.known_tokens == 0
            assert answer.stats.computed_tokens > len(tokens)

    with_node(tmp_path, test)


def test_stopping_an_answer_leaves_the_client_usable(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        answer = client.ask("notes", QUESTION)
        await anext(answer)
        await answer.close()
        first, second = await asyncio.gather(
            *(client.ask("notes", QUESTION, max_new_tokens=9).read() for _ in range(2))
        )
        expected = own_answer(client.engine.model, prompt_of(TEXT, QUESTION), 9)
        assert first == second == expected
