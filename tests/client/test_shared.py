"""What is learned into a store is asked about there, and through any node in front of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdn.bench.node_servers import start_kdn
from tests.client.clients import QUESTION, TEXT, client_at, own_answer, prompt_of
from tests.depot.test_names import store_url
from tests.node.harness import run


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_learn_at_a_store_and_ask_there_and_at_a_node(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Any
) -> None:
    url, model = store_url(request, kind, tmp_path), tiny_model("llama")
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 8)

    async def ask(where: str) -> None:
        async with client_at(where, model) as client:
            answer = client.ask("notes", QUESTION, max_new_tokens=8)
            assert await answer.read() == expected
            assert answer.stats.known_tokens >= 512

    async def learn() -> None:
        async with client_at(url, model) as client:
            assert (await client.learn("notes", TEXT)).new_chunks == 4
            assert (await client.learn("notes", TEXT)).new_chunks == 0

    run(learn())
    run(ask(url))
    with start_kdn(tmp_path / "node", {"store": url}) as node:
        run(ask(node.url))
