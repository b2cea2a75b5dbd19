"""Nodes of one store, each a process: put at one, read at the other, and one is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kdn.bench.node_servers import Server, start_kdn
from kdn.places.places import Places, open_places
from tests.depot.test_names import store_url
from tests.node.harness import key_of, run
from tests.places.objects import put, read
from tests.places.test_places import manifest

Nodes = tuple[Server, Server]


@pytest.fixture(params=["redis", "s3"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    url = store_url(request, request.param, tmp_path)
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(start_kdn(tmp_path / name, {"store": url})) for name in "ab"
        )
        yield one, other


def test_nodes_of_one_store_answer_alike_and_outlive_each_other(nodes: Nodes) -> None:
    async def work() -> None:
        one, other = nodes
        async with open_places(one.url) as first, open_places(other.url) as second:
            chunk = await put(first.publish_to.store, 1)
            assert await read(second.publish_to.store, 1) == chunk
            assert await first.names.put("notes", manifest(1), None)
            assert not await second.names.put("notes", manifest(2), None)
            assert await manifest_at(second) == manifest(1)
            await put(second.publish_to.store, 2)
            one.process.kill()
            one.process.wait()
            assert await manifest_at(second) == manifest(1)
            assert await read(second.publish_to.store, 1) == chunk
        async with open_places(f"{one.url},{other.url}") as both:
            for number in range(3, 11):
                data = await put(both.publish_to.store, number)
                assert await read(both.publish_to.store, number) == data
            assert await manifest_at(both) == manifest(1)
            report = await both.names.delete("notes")
            assert report is not None
            assert report["deleted"] == [key_of(1).hex()]
            assert await read(both.publish_to.store, 1) is None

    run(work(), 60.0)


async def manifest_at(places: Places) -> object:
    named = await places.names.get("notes")
    return named.manifest if named else None
