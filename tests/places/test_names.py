"""Names at a node and in a folder do the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kdn.errors import StoreError, UnsupportedError
from kdn.places.names import Manifest, Names
from kdn.places.places import open_places
from tests.node.harness import Running, key_of, run, with_node
from tests.places.objects import put

Test = Callable[[Any], Awaitable[None]]


@pytest.fixture(params=["folder", "node"])
def with_places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Test], None]:
    def at_a_node(test: Test) -> None:
        async def work(node: Running) -> None:
            async with open_places(node.url) as places:
                await test(places)

        with_node(tmp_path, work)

    def in_a_folder(test: Test) -> None:
        async def work() -> None:
            async with open_places(tmp_path) as places:
                await test(places)

        run(work())

    return at_a_node if request.param == "node" else in_a_folder


def test_versions_follow_each_other(with_places: Callable[[Test], None]) -> None:
    async def test(places: Any) -> None:
        names: Names = places.names
        assert await names.get("notes") is None
        assert await names.put("notes", {"a": 1}, None)
        assert not await names.put("notes", {"a": 2}, None)  # there is one already
        first = await names.get("notes")
        assert first is not None
        assert (first.manifest, first.version) == ({"a": 1}, 1)
        assert await names.put("notes", {"a": 2}, first.etag)
        assert not await names.put("notes", {"a": 3}, first.etag)  # it is not the newest any more
        second = await names.get("notes")
        assert second is not None
        assert (second.manifest, second.version) == ({"a": 2}, 2)
        assert [(v.name, v.version, v.etag) for v in await names.history("notes")] == [
            ("notes", 2, second.etag),
            ("notes", 1, first.etag),
        ]
        assert await names.history("novel") == []
        assert await names.put("novel", {}, None)
        listed = [about async for about in names.list()]
        assert [(v.name, v.version, v.size_bytes) for v in listed] == [
            ("notes", 2, len(b'{"a":2}')),
            ("novel", 1, len(b"{}")),
        ]
        assert abs(listed[0].created_s - time.time()) < 3600
        assert [about.name async for about in names.list("nov")] == ["novel"]

    with_places(test)


def test_concurrent_changes_all_count(with_places: Callable[[Test], None]) -> None:
    async def test(places: Any) -> None:
        names: Names = places.names

        async def add(number: int) -> None:
            def update(manifest: Manifest) -> Manifest:
                return {**manifest, str(number): number}

            await names.change("notes", update)

        await asyncio.gather(*map(add, range(4)))
        found = await names.get("notes")
        assert found is not None
        assert found.manifest == {str(number): number for number in range(4)}

    with_places(test)


def test_a_name_takes_its_chunks_along(with_places: Callable[[Test], None]) -> None:
    async def test(places: Any) -> None:
        store = places.publish_to.store
        for number in (1, 2):
            await put(store, number)
        chunks = [key_of(number).hex() for number in (1, 2, 3)]
        await places.names.put("notes", {"models": {"00": {"chunks": chunks}}}, None)
        await places.names.put("other", {"models": {"00": {"chunks": chunks[1:2]}}}, None)
        report = await places.names.delete("notes")
        assert report == {"deleted": chunks[:1], "kept": chunks[1:2], "missing": chunks[2:]}
        assert [e is not None for e in await store.lookup([key_of(1), key_of(2)])] == [False, True]
        assert await places.names.delete("notes") is None

    with_places(test)


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 129])
def test_what_is_no_name(name: str, with_places: Callable[[Test], None]) -> None:
    async def test(places: Any) -> None:
        with pytest.raises(UnsupportedError, match="expected a name"):
            await places.names.get(name)

    with_places(test)


def test_a_conflict_that_never_ends(tmp_path: Path) -> None:
    async def work() -> None:
        async with open_places(tmp_path) as places:

            async def always_late(*_: object) -> bool:
                return False

            places.names.put = always_late  # type: ignore[method-assign]
            with pytest.raises(StoreError, match="others"):
                await places.names.change("notes", lambda manifest: manifest)

    run(work())
