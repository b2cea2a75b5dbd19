"""What a client asks of a node, counted by the node: one lookup a request, one put a chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.client.clients import QUESTION, TEXT, client_at
from tests.node.harness import Running, settled, with_node

LOOKUP = ("POST", "/v1/lookup")
READ = ("POST", "/v1/read")
PUT = ("PUT", "/v1/{collection}/{key}")
GET_NAME = ("GET", "/v1/names/{name}")
PUT_NAME = ("PUT", "/v1/names/{name}")


async def counted(node: Running, work: Any) -> dict[tuple[str, str], int]:
    """What the node was asked meanwhile."""
    before = await settled(node)
    await work
    after = await settled(node)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    return {name: count for name, count in grown.items() if count}


def test_one_lookup_a_request_and_one_put_a_chunk(tiny_model: Any, tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        async with client_at(node.url, tiny_model("llama")) as client:
            learned = await counted(node, client.learn("notes", TEXT))
            # One lookup and one put are for its only anchor: the text repeats itself.
            assert learned == {LOOKUP: 2, PUT: 4 + 1, GET_NAME: 1, PUT_NAME: 1}
            again = await counted(node, client.learn("notes", TEXT))
            assert again == {LOOKUP: 2, GET_NAME: 1, PUT_NAME: 1}
        async with client_at(node.url, tiny_model("llama")) as client:
            answer = client.ask("notes", QUESTION, max_new_tokens=2)
            asked = await counted(node, answer.read())
            assert answer.stats.known_tokens == 709
            assert asked.pop(READ) >= 1
            assert asked == {LOOKUP: 1, GET_NAME: 1}
            tokens, _ = client.engine.prompts.learn(TEXT)
            # Two full chunks, then a tail that is not where this prompt would have its own.
            loaded = await counted(node, client.load([*tokens, *tokens[:80]]))
            assert loaded.pop(READ) >= 1
            assert loaded == {LOOKUP: 1}
            assert await counted(node, client.load([9] * 600)) == {LOOKUP: 1}
            longer = await counted(node, client.learn("longer", TEXT + TEXT))
            assert longer.pop(READ) >= 1
            assert longer == {LOOKUP: 2, PUT: 5 + 1, GET_NAME: 1, PUT_NAME: 1}

    with_node(tmp_path, test)
