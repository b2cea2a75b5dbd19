"""What cannot be joined, and what somebody has changed: a named error, or plain reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdn.blend.pieces import check_joinable
from kdn.client.asynchronous import AsyncClient
from kdn.client.naming import give_name
from kdn.engines.prompts import CHAT
from kdn.engines.transformers import spec_of
from kdn.errors import (
    AuthenticityError,
    FormatError,
    KdnError,
    MismatchError,
    StoreError,
    UnsupportedError,
)
from kdn.places.manifests import Entry, entry_of, with_entry
from kdn.session import seams as finding
from tests.client.clients import QUESTION, TEXT, client_at, in_folder, own_answer, prompt_of
from tests.client.joins import NAMES, TEXTS, by_hand, join_of, learn_all, off_by
from tests.node.harness import Running, tenant, with_node


async def change(client: AsyncClient, name: str, **changes: Any) -> None:
    """What a holder of the secret, which may be everybody, writes into a manifest."""
    names, seal_key = client.session.places.names, client.session.namespace.seal_key
    model = client.engine.spec.fingerprint

    def changed(manifest: Any) -> Any:
        entry = entry_of(manifest, name, model, seal_key)
        assert entry is not None
        told: Entry = {k: v for k, v in {**entry, **changes}.items() if v is not None}
        return with_entry(manifest, name, model, told, seal_key)

    await names.change(name, changed)


def test_names_that_are_not_there(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        for work in (
            client.join([*NAMES, "missing"]),
            client.ask(["missing", *NAMES], QUESTION).read(),
            client.ask_all(["missing"], [QUESTION]),
            client.converse(["rules", "missing"]).ask(QUESTION).read(),
        ):
            with pytest.raises(StoreError, match="no name 'missing'"):
                await work


def test_names_of_other_tenants(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")

    async def test(node: Running) -> None:
        async with client_at(node.url, model, token="theirs") as client:
            await learn_all(client)
        async with client_at(node.url, model, token="ours") as client:
            await client.learn("own", TEXT[:50])
            with pytest.raises(StoreError, match="no name 'rules'"):
                await client.join(["own", "rules"])

    with_node(tmp_path, test, tenant("t", "theirs"), tenant("o", "ours"))


def test_another_secret_and_another_model(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)

    @in_folder(tmp_path, tiny_model("llama"), secret=b"ours")
    async def _(client: AsyncClient) -> None:
        await client.learn("own", TEXT[:50])
        with pytest.raises(AuthenticityError, match="no holder of this secret"):
            await client.join(["own", "rules"])

    @in_folder(tmp_path, tiny_model("qwen2"))
    async def _(client: AsyncClient) -> None:
        await client.learn("own", TEXT[:50])
        with pytest.raises(MismatchError, match="'rules' was learned with another model"):
            await client.join(["own", "rules"])


def test_heads_that_differ(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        await client.learn("brief", TEXT[:90], head="be brief")
        for names in (["rules", "brief"], ["brief", "rules"]):
            with pytest.raises(MismatchError, match="behind another head"):
                await client.join(names)
        with pytest.raises(UnsupportedError, match="only a text"):
            await client.learn("ids", [5] * 40, head="be brief")


def test_what_has_no_head_or_nothing_behind_it(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        await client.learn("ids", [5] * 40)
        with pytest.raises(MismatchError, match="'ids' cannot be joined"):
            await client.join(["rules", "ids"])
        begin = client.engine.prompts.begin()
        await give_name(client.session, "empty", begin, CHAT, [], len(begin))
        with pytest.raises(MismatchError, match="'empty' cannot be joined: it is empty"):
            await client.join(["rules", "empty"])
        await client.learn("also", [*begin, *[5] * 40])  # ids that begin as texts do
        with pytest.raises(MismatchError, match="not asked about as"):
            await client.join(["rules", "also"])
        assert (await client.join(["also", "also"])).num_tokens == len(begin) + 80


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"head": -1}, FormatError),
        ({"head": 10**9}, FormatError),
        ({"head": True}, FormatError),
        ({"head": "7"}, FormatError),
        ({"head": 3}, MismatchError),
        ({"head": 8}, MismatchError),
        ({"tokens": [1, 2, 10**9]}, KdnError),
        ({"tokens": [-1] * 30}, KdnError),
        ({"tokens": []}, KdnError),
        ({"tokens": "abc"}, FormatError),
        ({"style": "plain"}, MismatchError),
    ],
)
def test_manifests_that_say_something_else(
    changes: dict[str, Any], error: type[Exception], tiny_model: Any, tmp_path: Path
) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        await change(client, "report", **changes)
        with pytest.raises(error):
            await client.join(NAMES)


def test_a_token_that_was_changed_is_read(tiny_model: Any, tmp_path: Path) -> None:
    """Its chunks have other names then, and nobody knows them; what the manifest calls its chunks
    does not count."""
    model = tiny_model("llama")

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        tokens = (await client.named("report")).tokens
        tokens[40] = (tokens[40] + 1) % 128
        await change(client, "report", tokens=tokens)
        found = await client.join(NAMES)
        join = await join_of(client)
        assert found.tokens == join.tokens.tolist()
        assert found.stats.computed_tokens == join.pieces[1].num_own
        assert found.stats.moved_tokens == join.pieces[2].num_own


def test_what_was_learned_before_heads_were_noted(tiny_model: Any, tmp_path: Path) -> None:
    """Its tail was stored up to a multiple of 16 tokens: the rest is read."""
    model = tiny_model("llama")
    expected = own_answer(model, prompt_of(TEXTS["faq"], QUESTION), 12)

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        join = await join_of(client)
        store = client.session.places.publish_to.store
        for name, piece in zip(NAMES, join.pieces, strict=True):
            listed = sorted((await client.named(name)).keys)
            whole = piece.chunks[-1].key
            assert await store.delete(whole)
            old = [key for key in listed if key != whole.hex()]
            await change(client, name, head=None, chunks=old)
        answer = client.ask("faq", QUESTION, max_new_tokens=12)
        assert await answer.read() == expected
        assert answer.stats.known_tokens == len(join.pieces[2].tokens) // 16 * 16
        found = await client.join(NAMES)
        assert found.tokens == join.tokens.tolist()
        assert found.stats.known_tokens == 256 + 256 - 7, "one full chunk of the first and the last"
        assert found.cache is not None
        assert off_by(found.cache.slice(0, 256), by_hand(model, join).slice(0, 256)) < 1e-3


def test_more_than_the_model_reads(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama", max_position_embeddings=600))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        with pytest.raises(UnsupportedError, match=r"713 tokens together.*at most 600"):
            await client.join(NAMES)
        two = ["rules", "faq"]  # 591 tokens
        assert (await client.join(two)).num_tokens == 591
        for work in (
            client.ask(two, QUESTION).read(),
            client.ask_all(two, [QUESTION]),
            client.converse(two).ask(QUESTION).read(),
        ):
            with pytest.raises(UnsupportedError, match="at most 600"):
                await work


def test_a_conversation_whose_first_question_was_too_long_can_begin_anew(
    tiny_model: Any, tmp_path: Path
) -> None:
    """The next one is the first, and no follow-up of what nobody asked."""

    @in_folder(tmp_path, tiny_model("llama", max_position_embeddings=612))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        two = ["rules", "faq"]  # 591 tokens
        expected = await client.ask(two, "?", max_new_tokens=2).read()
        talk = client.converse(two, max_new_tokens=2)
        with pytest.raises(UnsupportedError, match="at most 612"):
            await talk.ask(QUESTION).read()
        answer = talk.ask("?")
        assert await answer.read() == expected
        assert answer.stats.prompt_tokens == 591 + len("?<end>[assistant]")


def test_models_that_cannot_be_joined(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("mistral", sliding_window=64))
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        with pytest.raises(UnsupportedError, match="sliding window"):
            await client.join(NAMES)

    with pytest.raises(UnsupportedError, match="RoPE"):
        check_joinable(spec_of(tiny_model("gpt2", n_embd=64, n_layer=2, n_head=4)))


def test_seams_that_cannot_be_had(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are moved and not repaired, the answer says so, and the next join tries again."""
    model = tiny_model("llama")
    tries = 0

    async def broken(*_: Any) -> None:
        nonlocal tries
        tries += 1
        raise FormatError("expected kdn seams")

    monkeypatch.setattr("kdn.client.joining.find_seams", broken)
    assert finding.find_seams is not broken

    @in_folder(tmp_path, model)
    async def _(client: AsyncClient) -> None:
        await learn_all(client)
        for _ in range(2):
            found = await client.join(NAMES)
            assert found.stats.troubles == ("nothing is repaired: expected kdn seams",)
            assert (found.stats.moved_tokens, found.stats.repaired_tokens) == (404, 0)
        assert tries == 2
