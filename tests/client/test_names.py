"""Names of what was learned, and who may use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdn.client.asynchronous import AsyncClient
from kdn.errors import KdnError, MismatchError, StoreError
from tests.client.clients import QUESTION, TEXT, client_at, in_folder
from tests.node.harness import Running, tenant, with_node


def test_a_name_that_nobody_gave_is_an_error(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        with pytest.raises(StoreError, match="no name 'notes'"):
            await client.ask("notes", "?").read()


def test_a_forgotten_name_takes_its_chunks_along(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        store = client.session.places.publish_to.store
        await client.learn("notes", TEXT)
        assert len([entry async for entry in store.list()]) == 4
        assert await client.forget("notes")
        assert not await client.forget("notes")
        assert [entry async for entry in store.list()] == []


def test_a_name_that_another_model_learned_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)

    @in_folder(tmp_path, tiny_model("qwen2"))
    async def _(client: AsyncClient) -> None:
        with pytest.raises(MismatchError, match="another model"):
            await client.ask("notes", "?").read()


def test_models_that_learned_the_same_name_share_it(tiny_model: Any, tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):

        @in_folder(tmp_path, tiny_model(family))
        async def _(client: AsyncClient) -> None:
            await client.learn("notes", TEXT)

    for family in ("llama", "qwen2"):

        @in_folder(tmp_path, tiny_model(family))
        async def _(client: AsyncClient) -> None:
            answer = client.ask("notes", QUESTION, max_new_tokens=1)
            await answer.read()
            assert answer.stats.known_tokens == 709


def test_secrets_keep_chunks_apart(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"), secret=b"ours")
    async def _(client: AsyncClient) -> None:
        await client.learn("notes", TEXT)

    @in_folder(tmp_path, tiny_model("llama"))
    async def _(client: AsyncClient) -> None:
        tokens, _ = client.engine.prompts.learn(TEXT)
        assert (await client.load(tokens)).num_tokens == 0


def test_a_node_takes_only_the_tokens_of_its_tenants(tiny_model: Any, tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama"), token="wrong") as client:
            with pytest.raises(KdnError, match="401"):
                await client.learn("notes", TEXT)
        async with client_at(node.url, tiny_model("llama"), token="right") as client:
            await client.learn("notes", TEXT)

    with_node(tmp_path, test, tenant("t", "right"))
