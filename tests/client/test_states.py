"""Models with recurrent layers: keys and values in chunks, states where chunks end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from kdn.bench.node_servers import start_kdn
from kdn.cache.keys import cut
from kdn.cache.states import State, StateLayout
from kdn.client.asynchronous import AsyncClient
from kdn.client.learning import chunks_to_learn
from kdn.codec.header import Header
from kdn.engines.reading import new_cache, read
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError
from tests.client.clients import (
    QUESTION,
    RUN_S,
    TEXT,
    client_at,
    in_folder,
    own_answer,
    prompt_of,
)
from tests.engines.family_models import build
from tests.node.harness import run
from tests.session.calibrated import calibrate_here

TEXT_TOKENS = [ord(letter) for letter in f"\x01[user]{TEXT}"]
TOKENS = [int(one) for one in np.random.default_rng(1).integers(3, 128, 900)]
"""Three full chunks and a tail of 128."""


@pytest.fixture(scope="module")
def model() -> Any:
    return build("qwen3_next")


def test_an_answer_goes_on_from_a_stored_state(model: Any, tmp_path: Path) -> None:
    wanted = own_answer(model, prompt_of(TEXT, QUESTION), 12)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        learned = await client.learn("notes", TEXT)
        assert learned.computed_tokens == learned.num_tokens

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        again = await client.learn("notes", TEXT)
        assert (again.new_chunks, again.computed_tokens) == (0, 0)
        answer = client.ask("notes", QUESTION, max_new_tokens=12)
        assert await answer.read() == wanted
        assert answer.stats.known_tokens == again.num_tokens
        assert answer.stats.computed_tokens == answer.stats.prompt_tokens - again.num_tokens
        several = await client.ask_all("notes", [QUESTION, QUESTION], max_new_tokens=12)
        assert several == [wanted, wanted]


def test_a_mamba_hybrid_does_so_too(tmp_path: Path) -> None:
    model = build("nemotron_h")
    wanted = own_answer(model, prompt_of(TEXT, QUESTION), 12)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        learned = await client.learn("notes", TEXT)
        answer = client.ask("notes", QUESTION, max_new_tokens=12)
        assert await answer.read() == wanted
        assert answer.stats.known_tokens == learned.num_tokens


def test_klt_carries_the_attention_layers(model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    calibrate_here(spec_of(model))

    @in_folder(tmp_path / "place", model, codec="klt")
    async def _(client: AsyncClient) -> None:
        learned = await client.learn("notes", TEXT)
        answer = client.ask("notes", QUESTION, max_new_tokens=4)
        await answer.read()
        assert answer.stats.known_tokens == learned.num_tokens
        coarse = await client.load(TEXT_TOKENS, quality=0.1)
        fine = await client.load(TEXT_TOKENS, quality="exact")
        assert coarse.num_tokens == fine.num_tokens == len(TEXT_TOKENS) // 16 * 16
        assert coarse.cache is not None
        assert fine.cache is not None
        assert coarse.exact_until == 0
        assert not (coarse.cache.keys == fine.cache.keys).all()
        assert coarse.state is not None
        assert fine.state is not None
        for one, other in zip(coarse.state.tensors, fine.state.tensors, strict=True):
            assert (one == other).all()  # states have no levels
        past = coarse.past_key_values
        read(model, [5] * 16, past)
        assert await client.publish([*TEXT_TOKENS, 5], past, after=coarse) == 0


@pytest.mark.parametrize(("spacing", "resumed"), [(1, 512), (2, 512), (4, 0)])
def test_spacing_says_where_another_text_can_branch_off(
    model: Any, tmp_path: Path, spacing: int, resumed: int
) -> None:
    @in_folder(tmp_path, model, state_spacing=spacing)
    async def _(client: AsyncClient) -> None:
        await client.learn("ids", TOKENS)
        assert (await client.load(TOKENS)).num_tokens == 896
        loaded = await client.load([*TOKENS[:600], *[9] * 300])
        assert loaded.num_tokens == resumed
        if resumed:
            past, own = loaded.past_key_values, new_cache(model)
            rest = [*TOKENS[resumed:600], *[9] * 50]
            found, wanted = read(model, rest, past), read(model, [*TOKENS[:resumed], *rest], own)
            assert found.argmax() == wanted.argmax()
            assert (found - wanted).norm() < 1e-4 * wanted.norm()
        assert (await client.load(TOKENS[:200])).num_tokens == 0  # before the first state


def test_a_longer_text_goes_on_from_the_last_state(model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, model, state_spacing=2)
    async def _(client: AsyncClient) -> None:
        await client.learn("short", TOKENS[:600])
        longer = await client.learn("long", TOKENS)
        assert longer.computed_tokens == len(TOKENS) - 512
        assert (await client.load(TOKENS)).num_tokens == 896


def test_no_state_is_a_miss(model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, model, state_spacing=1)
    async def _(client: AsyncClient) -> None:
        await client.learn("ids", TOKENS)
        assert client.contexts.resuming is not None
        states, store = client.contexts.resuming.states, client.session.places.publish_to.store
        chunks = chunks_to_learn(TOKENS, client.session.namespace)
        for chunk in chunks[2:]:
            await store.delete(states.key_of(chunk))
        assert (await client.load(TOKENS)).num_tokens == 512
        for chunk in chunks:
            await store.delete(states.key_of(chunk))
        nothing = await client.load(TOKENS)
        assert (nothing.num_tokens, nothing.past_key_values) == (0, None)
        again = await client.learn("ids", TOKENS)  # it is read once more
        assert again.computed_tokens == len(TOKENS)
        assert (await client.load(TOKENS)).num_tokens == 896


def test_a_missing_chunk_leads_to_an_earlier_state(model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, model, state_spacing=1)
    async def _(client: AsyncClient) -> None:
        await client.learn("ids", TOKENS)
        chunks = cut(TOKENS, client.session.namespace)
        await client.session.places.publish_to.store.delete(chunks[1].key)
        assert (await client.load(TOKENS)).num_tokens == 256


@pytest.mark.parametrize(("lost", "resumed"), [(1, 256), (0, 0)])
def test_a_chunk_that_does_not_come_is_read_after_an_earlier_state(
    model: Any, tmp_path: Path, lost: int, resumed: int
) -> None:
    """The state of the end is there, but not all that leads to it."""
    wanted = own_answer(model, prompt_of(TEXT, QUESTION), 8)

    @in_folder(tmp_path, model, state_spacing=1)
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        chunks = (await client.named("notes")).cut(client.session.namespace)
        store = client.session.places.publish_to.store
        assert await store.delete(chunks[lost].key)
        answer = client.ask("notes", QUESTION, max_new_tokens=8)
        assert await answer.read() == wanted
        assert answer.stats.known_tokens == resumed
        assert await client.flush(20)  # it was read, and published again
        answer = client.ask("notes", QUESTION, max_new_tokens=8)
        assert await answer.read() == wanted
        assert answer.stats.known_tokens == chunks[-1].end


def test_callers_publish_the_state_of_a_cache(model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        past = new_cache(model)
        read(model, TOKENS[:300], past)
        await client.publish(TOKENS[:300], past)  # no chunk ends there
        assert await client.flush(20)
        assert (await client.load(TOKENS)).num_tokens == 0
        past = new_cache(model)
        read(model, TOKENS[:320], past)
        await client.publish(TOKENS[:320], past)
        assert await client.flush(20)
        loaded = await client.load(TOKENS)
        assert loaded.num_tokens == 320
        assert loaded.cache is not None
        with pytest.raises(UnsupportedError, match="lacks the states"):
            await client.publish(TOKENS[:320], loaded.cache)


def test_a_conversation_goes_on_elsewhere(model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        talk = client.converse("notes", max_new_tokens=40)
        await talk.ask(QUESTION).read()
        assert await client.flush(20)
        said = talk.tokens
        loaded = await client.load([*said, 5, 6, 7])
        assert len(said) - 17 <= loaded.num_tokens <= len(said)
        past, own = loaded.past_key_values, new_cache(model)
        found, wanted = (
            read(model, [*said[loaded.num_tokens :], 5], past),
            read(model, [*said, 5], own),
        )
        assert (found - wanted).norm() < 1e-4 * wanted.norm()


def test_joins_are_refused(model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("one", TEXT)
        await client.learn("two", TEXT[::-1])
        with pytest.raises(UnsupportedError, match="recurrent layers"):
            await client.ask(["one", "two"], QUESTION).read()


def test_forged_and_damaged_states_are_misses(model: Any, tmp_path: Path) -> None:
    """And the next who computes them puts right ones in their place."""

    @in_folder(tmp_path, model, state_spacing=1)
    async def _(client: AsyncClient) -> None:
        await client.learn("ids", TOKENS)
        assert client.contexts.resuming is not None
        states, store = client.contexts.resuming.states, client.session.places.publish_to.store
        tail, last, *_ = reversed(chunks_to_learn(TOKENS, client.session.namespace)[:-1])
        loaded = await client.load(TOKENS)
        assert loaded.state is not None
        assert loaded.num_tokens == tail.end
        other = states.layout.chunk_of(tail).with_seal_key(bytes(32))
        forged = states.codec.encode(other, loaded.state)
        await replace_with(store, states.key_of(tail), forged)
        assert (await client.load(TOKENS)).num_tokens == last.end
        smaller = StateLayout(states.layout.parts[:-1])
        wrong = replace(states.codec, layout=smaller).encode(
            states.layout.chunk_of(last), State(smaller, loaded.state.tensors[:-1])
        )
        await replace_with(store, states.key_of(last), wrong)
        assert (await client.load(TOKENS)).num_tokens == last.start

    @in_folder(tmp_path, model, state_spacing=1)
    async def _(client: AsyncClient) -> None:
        assert (await client.learn("ids", TOKENS)).computed_tokens
        assert (await client.load(TOKENS)).num_tokens == len(TOKENS) // 16 * 16
        _, last, *_ = reversed(chunks_to_learn(TOKENS, client.session.namespace)[:-1])
        assert (await client.load(TOKENS[: last.end])).num_tokens == last.end


async def replace_with(store: Any, key: bytes, data: bytes) -> None:
    """As somebody with access to the store could."""
    assert await store.delete(key)
    etag = Header.parse(data).stream_id
    await store.put(key, data, etag=etag, checksum=xxh3_64_intdigest(data))


def test_a_node_keeps_states_for_others(model: Any, tmp_path: Path) -> None:
    """It checks them as it checks chunks, and a name that goes takes them with it."""
    wanted = own_answer(model, prompt_of(TEXT, QUESTION), 8)

    async def learn(url: str) -> None:
        async with client_at(url, model) as client:
            await client.learn("notes", TEXT)

    async def ask(url: str) -> None:
        async with client_at(url, model) as client:
            answer = client.ask("notes", QUESTION, max_new_tokens=8)
            assert await answer.read() == wanted
            assert answer.stats.known_tokens > 700
            learned = (await client.named("notes")).tokens
            assert await client.forget("notes")
            assert (await client.load(TEXT_TOKENS)).num_tokens == 0
            assert client.contexts.resuming is not None
            chunks = chunks_to_learn(learned, client.session.namespace)
            keys = client.contexts.resuming.keys_of(chunks)
            store = client.session.places.publish_to.store
            assert await store.lookup(keys) == [None] * len(keys)

    with start_kdn(tmp_path / "node", {}) as node:
        run(learn(node.url), RUN_S)
        run(ask(node.url), RUN_S)


def test_states_of_other_dtypes(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    half = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()

    @in_folder(tmp_path / "place", half, state_spacing=1)
    async def _(client: AsyncClient) -> None:
        await client.learn("ids", TOKENS)
        loaded = await client.load(TOKENS)
        assert loaded.num_tokens == 896
        past, own = loaded.past_key_values, new_cache(half)
        read(half, TOKENS[:896], own)
        assert torch.equal(read(half, TOKENS[896:], past), read(half, TOKENS[896:], own))
