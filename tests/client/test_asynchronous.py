"""Learning at one place, asking at another: what is loaded, what is computed, and that it is right.

Tiny random models with the lossless codec: whatever they answer, they must answer the same as the
model does from its own cache, token for token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import cut
from kdn.cache.tensors import KVCache
from kdn.client import asynchronous
from kdn.client.asynchronous import AsyncClient
from kdn.delivery.parcel import Parcel
from kdn.delivery.sending import Counts
from kdn.engines.generating import Sampling, generate
from kdn.engines.reading import new_cache, read
from kdn.errors import KdnError, MismatchError, StoreError, UnsupportedError
from kdn.store.base import Entry, Hints
from tests.client.letters import Letters
from tests.delivery.world import Proxy
from tests.engines.lora import attach
from tests.node.harness import Running, run, tenant, with_node

TEXT = "".join(chr(97 + i * i % 23 + i % 3) for i in range(700))
QUESTION = "what comes next?"
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
]


def client_at(where: Any, model: Any, **settings: Any) -> AsyncClient:
    settings = {"codec": "exact", "recompute": False, **settings}
    return AsyncClient(where, model=(model, settings.pop("tokenizer", Letters())), **settings)


def own_answer(model: Any, prompt: list[int], count: int, temperature: float = 0.0) -> str:
    """Without kdn: the model reads all and goes on."""
    past = new_cache(model)
    logits = read(model, prompt, past)
    tokens = list(generate(model, logits, past, Sampling(count, temperature)))
    return Letters().decode(tokens)


def prompt_of(text: str, question: str) -> list[int]:
    shown = f"\x01[user]{text}\n\n{question}<end>[assistant]"
    return [ord(letter) for letter in shown]


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
            assert (learned.known_chunks, learned.new_chunks) == (0, 3)
            assert learned.computed_tokens == learned.num_tokens // 16 * 16
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


def in_folder(folder: Path, model: Any, **settings: Any) -> Callable[..., Any]:
    """Run a test with a client of its own on a folder."""

    def decorate(test: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        async def work() -> Any:
            async with client_at(folder, model, **settings) as client:
                return await test(client)

        return run(work())

    return decorate


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
            longer.num_tokens // 16 * 16 - 512,
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


def test_load_finds_the_longest_beginning(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        tokens, _ = client.engine.prompts.learn(TEXT)
        await client.learn("notes", TEXT)
        covered = len(tokens) // 16 * 16
        loaded = await client.load([*tokens, 5, 6, 7])
        assert loaded.num_tokens == covered  # two chunks, and a tail that is not the prompt's own
        past, own = loaded.past_key_values, new_cache(model)
        read(model, tokens[:covered], own)
        assert past is not None
        for mine, theirs in zip(own.layers, past.layers, strict=True):
            assert (mine.keys == theirs.keys).all()
            assert (mine.values == theirs.values).all()
        nothing = await client.load([9] * 300)
        assert (nothing.num_tokens, nothing.cache, nothing.past_key_values) == (0, None, None)
        half = await client.load([*tokens[:300], *[9] * 300])
        assert half.num_tokens == 256


def test_publish_and_load_by_hand(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    tokens = list(np.random.default_rng(1).integers(3, 128, 600))

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        past = new_cache(model)
        read(model, tokens[:300], past)
        assert await client.publish(tokens[:300], past) == 2
        assert await client.flush(20)
        loaded = await client.load(tokens)
        assert loaded.num_tokens == 288
        more = loaded.past_key_values
        assert more is not None
        read(model, tokens[288:], more)
        assert await client.publish(tokens, more, after=loaded) == 2  # [256, 512) and a tail
        assert await client.flush(20)
        assert (await client.load(tokens)).num_tokens == 592


def test_nothing_is_published_on_top_of_losses(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    tokens = list(np.random.default_rng(1).integers(3, 128, 600))

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        past = new_cache(model)
        read(model, tokens, past)
        await client.publish(tokens[:256], past)
        assert await client.flush(20)
        loaded = await client.load(tokens)
        assert loaded.delivered is not None
        object.__setattr__(
            loaded.delivered, "expected_kld", (0.1, 0.0)
        )  # as if one of two had come
        assert await client.publish(tokens, past, after=loaded) == 0


def test_a_window_that_has_passed_is_not_published(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=64)
    tokens = list(np.random.default_rng(1).integers(3, 128, 512))

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        past = new_cache(model)
        read(model, tokens, past)
        assert await client.publish(tokens, past) == 1  # of the first, its layers hold nothing
        assert await client.flush(20)
        assert (await client.load(tokens)).num_tokens == 0


def test_names(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        with pytest.raises(StoreError, match="no name 'notes'"):
            await client.ask("notes", "?").read()
        await client.learn("notes", TEXT)
        assert await client.forget("notes")
        assert not await client.forget("notes")
        store = client.session.places.publish_to.store
        assert [entry async for entry in store.list()] == []

    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)

    @in_folder(tmp_path, tiny_model("qwen2"))
    async def _(client: AsyncClient) -> None:
        with pytest.raises(MismatchError, match="another model"):
            await client.ask("notes", "?").read()
        await client.learn("notes", TEXT)  # both models share the name from now on
        await client.ask("notes", "?", max_new_tokens=1).read()

    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        answer = client.ask("notes", QUESTION, max_new_tokens=1)
        await answer.read()
        assert answer.stats.known_tokens > 600


def test_secrets_keep_chunks_apart(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"), secret=b"ours")
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)

    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        tokens, _ = client.engine.prompts.learn(TEXT)
        assert (await client.load(tokens)).num_tokens == 0


def test_token_ids_messages_and_plain_text(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = list(np.random.default_rng(2).integers(3, 128, 300))

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("ids", ids)
        expected = own_answer(model, [*ids, *map(ord, "abc")], 9)
        assert await client.ask("ids", "abc", max_new_tokens=9).read() == expected
        messages = [{"role": "system", "content": TEXT[:300]}]
        await client.learn("messages", messages)
        prompt = [ord(c) for c in f"\x01[system]{TEXT[:300]}<end>[user]abc<end>[assistant]"]
        expected = own_answer(model, prompt, 9)
        assert await client.ask("messages", "abc", max_new_tokens=9).read() == expected
        with pytest.raises(UnsupportedError, match="token ids"):
            await client.learn("odd", [0.5, 1.5])

    @in_folder(tmp_path, model, tokenizer=Letters(chat=False, bos=False))
    async def _(client: AsyncClient) -> None:
        await client.learn("plain", TEXT)
        prompt = [ord(c) for c in f"{TEXT}\n\nabc"]
        expected = own_answer(model, prompt, 9)
        assert await client.ask("plain", "abc", max_new_tokens=9).read() == expected
        with pytest.raises(UnsupportedError, match="chat template"):
            await client.learn("odd", messages_of("hello"))


def messages_of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_short_texts_work_without_chunks(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"), tokenizer=Letters(chat=False))
    async def _(client: AsyncClient) -> None:
        learned = await client.learn("short", "abc")
        assert (learned.num_tokens, learned.new_chunks) == (6, 0)
        answer = client.ask("short", "d", max_new_tokens=3)
        expected = own_answer(client.engine.model, [1, *map(ord, "abc\n\nd")], 3)
        assert await answer.read() == expected
        assert (answer.stats.known_tokens, answer.stats.computed_tokens) == (0, 7)


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


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_batch_of_questions(family: str, tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model(family, **({"sliding_window": 64} if family == "mistral" else {}))
    questions = ["one?", "and what about two?", "?"]

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        answers = await client.ask_all("notes", questions, max_new_tokens=12)
        expected = [own_answer(model, prompt_of(TEXT, question), 12) for question in questions]
        assert answers == expected
        assert len(set(expected)) > 1
        assert client.metrics.known_tokens == 704
        assert await client.ask_all("notes", questions[:1], max_new_tokens=12) == expected[:1]


def test_a_conversation_about_nothing(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        text = await client.converse(max_new_tokens=7).ask("hi").read()
        prompt = [ord(c) for c in "\x01[user]hi<end>[assistant]"]
        assert text == own_answer(client.engine.model, prompt, 7)


def test_a_node_that_is_away_costs_time_but_no_answer(tiny_model: Any, tmp_path: Path) -> None:
    """With the name at hand (in a folder) the chunks are read by the model."""
    model = tiny_model("llama")

    async def test(node: Running) -> None:
        async with client_at(node.url, model) as client:
            await client.learn("notes", TEXT)
            tokens, options = (await client.named("notes"))[0], client.ask("notes", QUESTION)
            await options.close()
            await node.listening.node.depot.store.close()
            answer = client.ask("notes", QUESTION, max_new_tokens=12, deadline_s=0.4)
            assert await answer.read() == own_answer(model, prompt_of(TEXT, QUESTION), 12)
            assert answer.stats.known_tokens == 0
            assert answer.stats.computed_tokens > len(tokens)

    with_node(tmp_path, test)


def test_tokens_of_tenants(tiny_model: Any, tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama"), token="wrong") as client:
            with pytest.raises(KdnError, match="401"):
                await client.learn("notes", TEXT)
        async with client_at(node.url, tiny_model("llama"), token="right") as client:
            await client.learn("notes", TEXT)

    with_node(tmp_path, test, tenant("t", "right"))


def test_a_token_that_may_only_read_learns_nothing(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asynchronous, "FLUSH_S", 20.0)

    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama"), token="reader") as client:
            with pytest.raises(StoreError, match=r"refused: .*403 forbidden: this token may read"):
                await client.learn("notes", TEXT)
            assert client.session.publisher.counts.failures == 0

    with_node(tmp_path, test, tenant("t", "reader", "read_tokens"))


def test_learning_fails_only_for_chunks_of_its_own(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for what other processes left in the spool, nor for what was refused before."""

    class Picky(Proxy):
        refusals = 0

        async def put(self, key: bytes, *args: Any, **named: Any) -> Entry:
            if key == b"theirs":
                self.refusals += 1
                raise StoreError("never this one")
            return await super().put(key, *args, **named)

    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama")) as client:
            publisher = client.session.publisher
            place = client.session.places.publish_to
            place.store = picky = Picky(place.store)
            spool = publisher._spool
            assert spool is not None
            spool.add(Parcel(b"theirs", b"e", b"data", Hints()))
            publisher._sender.refuse(b"earlier", StoreError("quota"))
            await client.learn("notes", TEXT)
            assert picky.refusals
            assert b"theirs" in spool

    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(asynchronous, "FLUSH_S", 10.0)
    with_node(tmp_path, test)


def test_what_a_full_node_says_is_what_learning_says(tiny_model: Any, tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama"), token="t") as client:
            for _ in range(2):
                with pytest.raises(StoreError, match=r"refused: .*507 quota_exceeded"):
                    await client.learn("notes", TEXT)

    with_node(tmp_path, test, tenant("t", "t", quota_bytes=1000))


def test_audits_are_counted(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"), audit_share=1.0)
    async def metrics(client: AsyncClient) -> Any:
        await client.learn("notes", TEXT)
        await client.ask("notes", QUESTION, max_new_tokens=10).read()
        return client.metrics

    assert (metrics.answers, metrics.audits, metrics.audited_tokens) == (1, 1, 10)
    assert metrics.audit_kld < 1e-6  # nothing was lost

    @in_folder(tmp_path, tiny_model("llama"), audit_share=0.5, rng=Random(0))
    async def half(client: AsyncClient) -> Any:
        for _ in range(8):
            await client.ask("notes", QUESTION, max_new_tokens=1).read()
        return client.metrics

    assert 0 < half.audits < 8 == half.answers


def test_an_audit_that_fails_is_counted_and_harms_nobody(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("kdn.client.audit.divergences", broken)

    @in_folder(tmp_path, tiny_model("llama"), audit_share=1.0)
    async def metrics(client: AsyncClient) -> Any:
        await client.learn("notes", TEXT)
        await client.ask("notes", QUESTION, max_new_tokens=2).read()
        return client.metrics

    assert (metrics.audits, metrics.failed_audits) == (0, 1)


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


def test_what_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedError, match="quality"):
        AsyncClient("x", quality="perfect")
    with pytest.raises(UnsupportedError, match="quality"):
        AsyncClient("x", quality=-1.0)


def test_a_model_without_profile(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))

    async def work() -> None:
        async with client_at(tmp_path / "folder", tiny_model("llama"), codec="klt"):
            pass

    with pytest.raises(UnsupportedError, match="kdn calibrate"):
        run(work())
