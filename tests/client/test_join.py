"""Several names, one question: where pieces come to stand, and what is read where none is known.

Tiny random models with the lossless codec: a join must hold what the model computes for each piece
alone at its new positions, and what is missing must be what it reads on top of that.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import cut
from kdn.client.asynchronous import AsyncClient
from kdn.client.contexts import LEAST_S
from kdn.engines.generating import Sampling, generate
from kdn.engines.reading import forward, new_cache, read
from kdn.engines.transformers import from_dynamic_cache, to_dynamic_cache
from kdn.session.seams import share_seams
from tests.client.clients import QUESTION, TEXT, client_at, in_folder, own_answer, prompt_of
from tests.client.joins import (
    NAMES,
    TEXTS,
    SlowToRead,
    by_hand,
    join_of,
    learn_all,
    off_by,
    some_seams,
)
from tests.client.letters import Letters
from tests.client.test_rows import by_rows  # noqa: F401  (a fixture)
from tests.node.harness import Running, with_node

CLOSE = 1e-3
"""For rounding alone: models turn keys in float32. Values are of the size of 1."""


def answer_from(model: Any, cache: Any, question: str, count: int) -> str:
    past = to_dynamic_cache(cache, model.config)
    asked = [ord(letter) for letter in f"{question}<end>[assistant]"]
    logits = read(model, asked, past)
    return Letters().decode(list(generate(model, logits, past, Sampling(count))))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
def test_pieces_stand_where_the_model_would_have_read_them(
    family: str, tiny_model: Any, tmp_path: Path
) -> None:
    model = tiny_model(family, **({"head_dim": 16} if family == "qwen3" else {}))

    async def test(node: Running) -> None:
        async with client_at(node.url, model) as client:
            await learn_all(client)
        async with client_at(node.url, model) as client:
            join = await join_of(client)
            assert [piece.num_own for piece in join.pieces] == [302, 122, 282]
            wanted = by_hand(model, join)
            found = await client.join(NAMES)
            assert found.tokens == join.tokens.tolist()
            assert found.cache is not None
            assert off_by(found.cache, wanted) < CLOSE
            assert found.num_tokens == join.num_tokens == 7 + 302 + 122 + 282
            past = found.past_key_values
            assert past is not None
            assert past.get_seq_length() == found.num_tokens
            assert (found.stats.moved_tokens, found.stats.known_tokens) == (404, 713)
            assert found.stats.repaired_tokens == found.stats.computed_tokens == 0

            answer = client.ask(NAMES, QUESTION, max_new_tokens=12)
            assert await answer.read() == answer_from(model, wanted, QUESTION, 12)
            stats = answer.stats
            assert (stats.joined_pieces, stats.known_tokens, stats.moved_tokens) == (3, 713, 404)
            assert stats.computed_tokens == len(QUESTION) + len("<end>[assistant]")
            assert not stats.troubles
            assert (client.metrics.joins, client.metrics.moved_tokens) == (1, 404)

    with_node(tmp_path, test)


def test_the_order_counts(tiny_model: Any, tmp_path: Path) -> None:
    """The negative control: another order is another join."""
    model = tiny_model("llama")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        here, there = await client.join(NAMES), await client.join(NAMES[::-1])
        assert here.cache is not None
        assert there.cache is not None
        assert off_by(here.cache, there.cache) > 0.1
        assert off_by(there.cache, by_hand(model, await join_of(client, NAMES[::-1]))) < CLOSE


def test_one_piece_is_asked_about_as_ever(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = own_answer(model, prompt_of(TEXTS["rules"], QUESTION), 20)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        assert await client.ask("rules", QUESTION, max_new_tokens=20).read() == expected
        answer = client.ask(["rules"], QUESTION, max_new_tokens=20)
        assert await answer.read() == expected
        assert (answer.stats.joined_pieces, answer.stats.moved_tokens) == (1, 0)
        assert answer.stats.known_tokens == 309


@pytest.mark.usefixtures("by_rows")
def test_rows_hold_the_same(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        found = await client.join(NAMES)
        assert client.engine.by_rows
        assert found.cache is not None
        assert off_by(found.cache, by_hand(model, await join_of(client))) < CLOSE


def test_pieces_may_repeat_and_share_their_beginning(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    texts = {"long": TEXT[:520], "other": TEXT[:300] + TEXT[:99], "tiny": "a"}
    names = ["tiny", "long", "other", "long", "tiny"]

    @in_folder(tmp_path, model, recompute=True)  # a model that could read along changes nothing
    async def _(client: AsyncClient) -> None:
        await learn_all(client, texts)
        client.contexts.speeds = SlowToRead()
        join = await join_of(client, names)
        assert len(join.chunks) < sum(len(piece.chunks) for piece in join.pieces)
        found = await client.join(names)
        assert found.cache is not None
        assert off_by(found.cache, by_hand(model, join)) < CLOSE


def test_what_is_missing_is_read_behind_what_stands_before(tiny_model: Any, tmp_path: Path) -> None:
    """A chunk in the middle of a piece, and a whole piece."""
    model = tiny_model("llama")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        join = await join_of(client)
        store = client.session.places.publish_to.store
        gone = [join.pieces[0].chunks[1], *join.pieces[1].chunks]
        for chunk in gone:
            assert await store.delete(chunk.key)
        parts = by_hand(model, join)
        tokens, first, last = join.tokens, 256, join.starts[2]
        past = to_dynamic_cache(parts.slice(0, first), model.config)
        forward(model, tokens[first:last], past)
        with torch.inference_mode():
            for layer in range(parts.num_layers):
                rest = parts.slice(last, join.num_tokens)
                keys, values = (t[layer].transpose(0, 1)[None] for t in (rest.keys, rest.values))
                past.update(keys, values, layer)
        found = await client.join(NAMES)
        assert found.cache is not None
        assert off_by(found.cache, from_dynamic_cache(past)) < CLOSE
        assert found.stats.computed_tokens == last - first
        assert found.stats.moved_tokens == join.pieces[2].num_own


@pytest.mark.parametrize("recompute", [False, True])
def test_if_nothing_is_known_the_text_is_read(
    recompute: bool, tiny_model: Any, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    prompt = prompt_of("\n\n".join(TEXTS.values()), QUESTION)
    expected = own_answer(model, prompt, 20)

    @in_folder(tmp_path, model, recompute=recompute)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        store = client.session.places.publish_to.store
        for entry in [entry async for entry in store.list()]:
            await store.delete(entry.key)
        answer = client.ask(NAMES, QUESTION, max_new_tokens=20)
        assert await answer.read() == expected
        stats = answer.stats
        assert (stats.known_tokens, stats.computed_tokens) == (0, len(prompt))
        assert await client.ask_all(NAMES, [QUESTION], max_new_tokens=20) == [expected]
        assert not [entry async for entry in store.list()], "a join is published by nobody"


def test_a_place_that_says_nothing_costs_its_deadline(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = own_answer(model, prompt_of("\n\n".join(TEXTS.values()), QUESTION), 12)

    async def test(node: Running) -> None:
        async with client_at(node.url, model) as client:
            await learn_all(client)
            await node.listening.node.depot.store.close()
            began_s = client.now_s()
            answer = client.ask(NAMES, QUESTION, max_new_tokens=12, deadline_s=0.4)
            assert await answer.read() == expected
            assert answer.stats.known_tokens == 0
            assert client.now_s() - began_s < 5

    with_node(tmp_path, test)


def deadlines_left(monkeypatch: pytest.MonkeyPatch, finder: Any, loader: Any) -> list[float | None]:
    """Makes finding names take 0.2 s. What is left at each load, to be filled."""
    named, load, left = finder.named, loader.load, []

    async def slowly(*given: Any) -> Any:
        await asyncio.sleep(0.2)
        return await named(*given)

    async def loads(*given: Any) -> Any:
        left.append(given[-2].deadline_s)  # options, and then stats
        return await load(*given)

    monkeypatch.setattr(finder, "named", slowly)
    monkeypatch.setattr(loader, "load", loads)
    return left


def test_finding_names_takes_of_the_deadline(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama")) as client:
            await learn_all(client)
            left = deadlines_left(monkeypatch, client.joins, client.joins)
            await client.join(NAMES, deadline_s=60)
            await client.ask(NAMES, QUESTION, max_new_tokens=1, deadline_s=0.1).read()
            await client.join(NAMES)
            assert 0 < left[0] <= 59.8
            assert left[1:] == [LEAST_S, None]

    with_node(tmp_path, test)


def test_so_does_finding_one_name(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama")) as client:
            await learn_all(client)
            left = deadlines_left(monkeypatch, client, client.contexts)
            for deadline_s in (60, 0.1, None):
                given = {} if deadline_s is None else {"deadline_s": deadline_s}
                await client.ask(NAMES[0], QUESTION, max_new_tokens=1, **given).read()
            assert 0 < left[0] <= 59.8
            assert left[1:] == [LEAST_S, None]

    with_node(tmp_path, test)


def test_the_model_reads_along_what_it_would_read(tiny_model: Any, tmp_path: Path) -> None:
    """All that it has read from the front is the full reading's, with the gap between pieces."""
    model = tiny_model("llama")

    class Slow:
        """As if everything but reading took its time."""

        def decode_s(self, num_tokens: int, levels: int) -> float:
            return 1000.0

        def prefill_s(self, start: int, end: int) -> float:
            return 1e-3 * (end - start)

    @in_folder(tmp_path, model, recompute=True)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        join = await join_of(client)
        await client.session.places.publish_to.store.delete(join.pieces[1].chunks[0].key)
        client.contexts.speeds = Slow()
        found = await client.join(NAMES)
        own = new_cache(model)
        read(model, join.tokens, own)
        assert found.cache is not None
        assert off_by(found.cache, from_dynamic_cache(own)) < CLOSE
        assert (found.stats.known_tokens, found.stats.computed_tokens) == (0, join.num_tokens)


def test_a_conversation_goes_on_from_a_join_and_publishes_nothing(
    tiny_model: Any, tmp_path: Path
) -> None:
    model = tiny_model("llama")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        store = client.session.places.publish_to.store
        before = {entry.key async for entry in store.list()}
        talk = client.converse(NAMES, max_new_tokens=150)
        first = talk.ask(QUESTION)
        said = await first.read()
        alone = await client.ask(NAMES, QUESTION, max_new_tokens=150).read()
        assert said == alone
        second = talk.ask("and then?")
        await second.read()
        assert second.stats.known_tokens > 713 + 100
        assert len(talk.tokens) > 713 + 256, "a chunk has become whole since"

        joined = await client.join(NAMES)
        past = joined.past_key_values
        assert past is not None
        more = list(np.random.default_rng(1).integers(3, 128, 600))
        read(model, more, past)
        assert await client.publish([*joined.tokens, *more], past, after=joined) == 0
        assert await client.flush(20)
        assert {entry.key async for entry in store.list()} == before


def test_questions_are_answered_as_a_batch(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    questions = ["one?", "and what about two?"]

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        one_by_one = [await client.ask(NAMES, q, max_new_tokens=9).read() for q in questions]
        assert await client.ask_all(NAMES, questions, max_new_tokens=9) == one_by_one
        assert len(set(one_by_one)) == 2


def test_seams_repair_what_moves(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama")

    @in_folder(tmp_path / "data", model)
    async def seams(client: AsyncClient) -> Any:
        await learn_all(client)
        seams = some_seams(client.engine.spec)
        await share_seams(client.session, seams, "")
        assert (await client.join(NAMES[:1])).stats.repaired_tokens == 0, "nothing moves"
        return seams

    @in_folder(tmp_path / "data", model)
    async def _(client: AsyncClient) -> None:
        join = await join_of(client)
        wanted = by_hand(model, join, seams, client.engine.spec)
        assert off_by(wanted, by_hand(model, join)) > 0.1, "it makes a difference"
        found = await client.join(NAMES)
        assert found.cache is not None
        assert off_by(found.cache, wanted) < CLOSE
        assert found.stats.repaired_tokens == found.stats.moved_tokens == 404

    for tag in (None, "unheard-of"):

        @in_folder(tmp_path / "data", model, seams=tag)
        async def _(client: AsyncClient) -> None:
            found = await client.join(NAMES)
            assert found.cache is not None
            assert off_by(found.cache, by_hand(model, await join_of(client))) < CLOSE
            assert found.stats.repaired_tokens == 0


def test_what_was_learned_behind_another_head(tiny_model: Any, tmp_path: Path) -> None:
    """A system prompt is a head like any other: all pieces have it, or none."""
    model = tiny_model("llama")
    head = "be brief"

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await client.learn("one", TEXT[:100], head)
        await client.learn("two", TEXT[100:300], head=head)
        join = await join_of(client, ["one", "two"])
        shown = f"\x01[system]{head}<end>[user]{TEXT[:100]}\n\n{TEXT[100:300]}\n\n"
        assert join.tokens.tolist() == [ord(letter) for letter in shown]
        found = await client.join(["one", "two"])
        assert found.cache is not None
        assert off_by(found.cache, by_hand(model, join)) < CLOSE
        answer = client.ask("one", QUESTION, max_new_tokens=9)
        prompt = f"\x01[system]{head}<end>[user]{TEXT[:100]}\n\n{QUESTION}<end>[assistant]"
        assert await answer.read() == own_answer(model, [ord(c) for c in prompt], 9)
        assert answer.stats.known_tokens == len(join.pieces[0].tokens)


def test_engines_with_blocks_find_what_was_learned(tiny_model: Any, tmp_path: Path) -> None:
    """They look for tails at multiples of 16 tokens."""

    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)
        tokens = (await client.named("notes")).tokens
        known = await client.session.know([*tokens, 5, 6, 7] * 2)
        assert [chunk.end for chunk in known.chunks] == [256, 512, 704]
        found = await client.session.know_each(
            [*cut(tokens, client.engine.namespace, whole=True), *known.chunks]
        )
        assert len(found.chunks) == 6
