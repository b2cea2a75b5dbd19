"""What a node says loading would take: what it knows from the beginning on, by level and rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdn.codec.header import Header
from kdn.errors import RefusedError
from kdn.node.rates import Rates
from kdn.store.http import HttpStore
from kdn.store.node_client import NodeClient
from kdn.store.node_estimate import Estimate, Part, estimate
from tests.node.harness import Running, chunk_stream, key_of, tenant, with_node


def ends_of(*numbers: int, **more: Any) -> list[int]:
    """Of all levels, summed over chunks."""
    every = [Header.parse(chunk_stream(key_of(n), **more)).level_ends for n in numbers]
    return [sum(sizes) for sizes in zip(*every, strict=True)]


async def asked(node: Running, numbers: list[int], **more: Any) -> Estimate:
    client = NodeClient(node.url)
    try:
        return await estimate(client, [key_of(number) for number in numbers], **more)
    finally:
        await client.close()


async def told(node: Running, body: Any, **more: Any) -> tuple[int, Any]:
    status, _, answer = await node.ask("POST", "/v1/estimate", json.dumps(body).encode(), **more)
    return status, json.loads(answer)


def test_the_longest_known_beginning_counts(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for number in (1, 2, 4):
            await node.put_chunk(number)
        found = await asked(node, [1, 2, 3, 4], rate_bytes_per_s=1000.0)
        sizes = ends_of(1, 2)
        assert found.known == 2
        assert found.whole == Part(sizes[-1], sizes[-1] / 1000)
        assert found.levels == tuple(Part(size, size / 1000) for size in sizes)
        assert found.rate_bytes_per_s == 1000
        nothing = await asked(node, [3, 1])
        assert nothing == Estimate(0, Part(0, None), (), None)

    with_node(tmp_path, test)


def test_more_keys_than_are_looked_up_at_once(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for number in range(130):
            await node.put_chunk(number, size_bytes=300)
        assert (await asked(node, [*range(130), 500])).known == 130
        assert (await asked(node, [*range(100), 500, *range(100, 130)])).known == 100

    with_node(tmp_path, test)


def test_the_rate_is_what_the_client_has_taken_lately(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1, size_bytes=3 << 20)
        assert (await asked(node, [1])).rate_bytes_per_s is None
        reader = NodeClient(node.url, client="engine")
        store = HttpStore(reader, collection="chunks")
        for _ in range(3):
            assert await store.get(key_of(1)) is not None
        await store.close()
        own = await asked(node, [1], client="engine")
        others = await asked(node, [1])
        assert own.rate_bytes_per_s
        assert own.rate_bytes_per_s > 1e6
        assert own.whole.seconds == pytest.approx(own.whole.size_bytes / own.rate_bytes_per_s)
        assert others.rate_bytes_per_s == own.rate_bytes_per_s, "of the only client there is"

    with_node(tmp_path, test)


def test_an_egress_limit_bounds_it_and_is_shared(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1)
        assert (await asked(node, [1])).rate_bytes_per_s == 1e6
        node.listening.node.rates.sending = 3
        assert (await asked(node, [1])).rate_bytes_per_s == 250_000
        node.listening.node.rates.sending = 0

    with_node(tmp_path, test, egress_bits_per_s=8_000_000)


def test_it_needs_a_token_and_shows_no_other_tenants_chunks(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1, token="one")
        keys = {"keys": [key_of(1).hex()]}
        assert (await told(node, keys))[0] == 401
        assert (await told(node, keys, token="one"))[1]["known"] == 1
        assert (await told(node, keys, token="two"))[1]["known"] == 0

    with_node(tmp_path, test, tenant("a", "one"), tenant("b", "two"))


@pytest.mark.parametrize(
    "body",
    [
        {}, {"keys": []}, {"keys": ["zz"]}, {"keys": ["00"], "rate_bytes_per_s": 0},
        {"keys": ["00"], "rate_bytes_per_s": True}, {"keys": ["00"], "rate_bytes_per_s": "9"},
        {"keys": ["00"], "client": "no spaces"}, {"keys": ["00"], "client": 5},
        {"keys": ["00"], "more": 1}, {"keys": ["00"] * 4097}, {"keys": ["00"], "collection": "x"},
    ],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_refused(tmp_path: Path, body: Any) -> None:
    async def test(node: Running) -> None:
        assert (await told(node, body))[0] == 400

    with_node(tmp_path, test)


def test_the_client_raises_what_the_node_refuses(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        with pytest.raises(RefusedError):
            await asked(node, [1], rate_bytes_per_s=-1.0)

    with_node(tmp_path, test)


class TestRates:
    def test_a_client_counts_before_its_tenants_others_and_no_other_tenant_does(self) -> None:
        now_s = 0.0
        rates = Rates(lambda: now_s)
        for client, rate in (("x", 100.0), ("y", 300.0), ("z", 200.0)):
            rates.note(("a", client), 1 << 20, rate)
        rates.note(("b", "x"), 1 << 20, 9e9)
        assert rates.of("a", "y") == 300
        assert rates.of("a", "new") == 200
        assert rates.of("c", "x") is None
        rates.note(("a", "y"), 1 << 20, 100.0)
        assert rates.of("a", "y") == 200
        rates.note(("a", "y"), 100, 1.0)  # too little to tell
        rates.note(("a", "y"), 1 << 20, None)
        assert rates.of("a", "y") == 200
        now_s = 1000.0
        assert rates.of("a", "y") is None

    def test_invented_clients_take_no_memory(self) -> None:
        rates = Rates()
        for number in range(5000):
            rates.note(("a", str(number)), 1 << 20, 1.0)
        assert len(rates._seen) == 1024


def test_levels_are_what_a_reader_gets(tmp_path: Path) -> None:
    """A reader that goes by the estimate's levels gets exactly these bytes."""

    async def test(node: Running) -> None:
        stream = await node.put_chunk(1)
        first = (await asked(node, [1])).levels[0].size_bytes
        store = HttpStore(NodeClient(node.url), collection="chunks")
        span = await store.get(key_of(1), 0, first)
        assert span is not None
        assert bytes(span.data) == stream[:first]
        await store.close()

    with_node(tmp_path, test)
