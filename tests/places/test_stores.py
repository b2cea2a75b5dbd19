"""The URL of a store as a place: a depot without a node, open to many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kdn.errors import UnsupportedError
from kdn.node.server import listen, open_node
from kdn.places.places import checked_places, is_folder, open_places
from kdn.store.opening import without_password
from kdn.store.streaming import Ask, Collected
from tests.depot.test_names import store_url
from tests.node.harness import config_for, key_of, run
from tests.places.objects import put, read
from tests.places.test_places import manifest


@pytest.fixture(params=["redis", "cluster", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url(request, request.param, tmp_path)


def test_what_a_store_holds_is_what_a_node_serves(tmp_path: Path, url: str) -> None:
    async def work() -> None:
        async with open_places(url) as places, open_places(url) as same:
            assert [endpoint.local for endpoint in places.endpoints] == [False]
            chunks = places.publish_to.store
            first = await put(chunks, 1)
            second = await put(chunks, 2, parent=key_of(1))
            assert await places.names.put("notes", manifest(1, 2), None)
            assert not await same.names.put("notes", manifest(1, 2), None)
            assert await read(same.publish_to.store, 1) == first
            assert [e.key async for e in chunks.list()] == [key_of(1), key_of(2)]
            assert await read(places.profiles[0], 1) is None, "another collection"
            entries = [one for one in await chunks.lookup([key_of(1), key_of(2)]) if one]
            received = Collected(2)
            asks = [Ask(one.key, 3, one.size_bytes, one.etag) for one in entries]
            await same.publish_to.store.read_into(asks, received)
            assert received.found == [first[3:], second[3:]]
        config = config_for(tmp_path / "data")
        config = replace(config, node=replace(config.node, store=url, disk_bytes=0))
        async with (
            open_node(config) as node,
            listen(config, node) as listening,
            open_places(listening.url) as places,
        ):
            assert await read(places.publish_to.store, 1) == first
            named = await places.names.get("notes")
            assert named is not None
            assert named.manifest == manifest(1, 2)
            await places.names.delete("notes")
        async with open_places([url, tmp_path / "folder"]) as places:
            assert places.publish_to.name == without_password(url)
            assert await places.names.get("notes") is None
            assert await read(places.publish_to.store, 1) is None

    run(work())


@pytest.mark.parametrize(
    "url",
    ["redis://", "redis://h:0", "s3://", "s3://u:p@b/x", "file://rel/x", "redis://h?no=1"],
)
def test_what_is_no_url_of_a_store(url: str) -> None:
    with pytest.raises(UnsupportedError):
        checked_places(url)


def test_which_places_are_folders() -> None:
    assert is_folder("knowledge")
    assert is_folder(Path("s3:/b"))
    assert not any(map(is_folder, ["http://h:1", "s3://b/p", "redis+cluster://a:1,b:2"]))


def test_a_password_is_not_shown() -> None:
    assert without_password("redis://:secret@h:1/0?wait=1") == "redis://h:1/0?wait=1"
    assert without_password("redis+cluster://u:p@ss,w@a:1,b:2") == "redis+cluster://a:1,b:2"
    assert without_password("s3://b/p@q") == "s3://b/p@q"
