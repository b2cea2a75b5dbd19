"""One place of several nodes: found by its URLs, and changes of names whose answers were lost."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from kdn.errors import UnavailableError, UnsupportedError
from kdn.places.places import checked_places, open_places
from kdn.store.many_nodes import ManyNodesStore
from tests.node.harness import run
from tests.store.clusters import QUICK, Cluster, cluster


def lose_an_answer(nodes: Cluster) -> None:
    """Of each node the next one: it did what it was asked, and says nothing."""
    for gate in nodes.gates:
        gate.cut_after_bytes = 0


def lose_none(nodes: Cluster) -> None:
    for gate in nodes.gates:
        gate.cut_after_bytes = None


def test_several_urls_are_one_endpoint(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 2) as nodes, open_places(nodes.urls, limits=QUICK) as places:
            [endpoint] = places.endpoints
            assert endpoint.name == nodes.urls
            assert isinstance(endpoint.store, ManyNodesStore)
            await places.names.change("name", lambda _: {"text": "one"})
            found = await places.names.get("name")
            assert found is not None
            assert found.manifest == {"text": "one"}
            assert [about.name async for about in places.names.list()] == ["name"]

    run(work())


def test_urls_that_cannot_be_are_refused_when_opening() -> None:
    assert checked_places("http://a:1,http://b:1") == ["http://a:1,http://b:1"]
    for wrong in ("http://a:1,ftp://b", "http://a:1,http://:2", "http://a,http://u:p@b"):
        with pytest.raises(UnsupportedError):
            checked_places(wrong)


@pytest.mark.parametrize("number", [1, 3])
def test_a_change_whose_answer_was_lost_happened_once(tmp_path: Path, number: int) -> None:
    async def work() -> None:
        urls = cluster(tmp_path, number)
        async with urls as nodes, open_places(nodes.urls, limits=QUICK) as places:
            names, after = places.names, None
            for version in range(1, 9):
                assert await names.get("warm") is None  # connections that are kept
                lose_an_answer(nodes)
                manifest = {"version": version}
                if number == 1:  # nobody else to ask: it may say that it does not know
                    with suppress(UnavailableError):
                        assert await names.put("name", manifest, after)
                else:
                    assert await names.put("name", manifest, after)
                lose_none(nodes)
                history = await names.history("name")
                assert [about.version for about in history] == list(range(version, 0, -1))
                found = await names.get("name")
                assert found is not None
                assert found.manifest == manifest
                after = found.etag

    run(work())


def test_who_comes_second_learns_it_even_if_the_bytes_are_as_long(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 2) as nodes, open_places(nodes.urls, limits=QUICK) as places:
            names = places.names
            assert await names.put("name", {"by": "a"}, None)
            assert not await names.put("name", {"by": "b"}, None)
            first = await names.get("name")
            assert first is not None
            assert await names.put("name", {"by": "c"}, first.etag)
            assert await names.put("name", {"by": "d"}, (await names.history("name"))[0].etag)
            assert not await names.put("name", {"by": "e"}, first.etag)
            assert not await names.put("name", {"by": "f"}, "0" * 32)
            found = await names.get("name")
            assert found is not None
            assert (found.manifest, found.version) == ({"by": "d"}, 3)

    run(work())


def test_a_deletion_whose_answer_was_lost_deletes_nothing_newer(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 3) as nodes, open_places(nodes.urls, limits=QUICK) as places:
            names = places.names
            assert await names.delete("name") is None
            assert await names.put("name", {"by": "a"}, None)
            await names.history("name")
            lose_an_answer(nodes)
            report = await names.delete("name")
            lose_none(nodes)
            assert report == {"deleted": [], "kept": [], "missing": []}
            assert await names.get("name") is None
            assert await names.put("name", {"by": "b"}, None)

    run(work())
