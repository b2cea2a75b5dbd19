"""Places from strings: folders, nodes, both; and that a folder is what a node would serve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kdn.errors import StoreError, UnsupportedError
from kdn.node.server import listen, open_node
from kdn.places.places import open_places
from kdn.store.base import Hints
from tests.node.harness import (
    Running,
    config_for,
    key_of,
    run,
    tenant,
    with_node,
)
from tests.places.objects import put, read


def test_what_a_folder_holds_is_what_a_node_serves(tmp_path: Path) -> None:
    async def work() -> None:
        async with open_places(tmp_path / "knowledge") as places:
            assert [endpoint.local for endpoint in places.endpoints] == [True]
            chunks = places.publish_to.store
            first = await put(chunks, 1)
            await put(chunks, 2, parent=key_of(1))
            [entry] = await chunks.lookup([key_of(2)])
            assert entry is not None
            assert (entry.key, entry.hints) == (key_of(2), Hints(key_of(1), 2.0))
            assert [e.key async for e in chunks.list()] == [key_of(1), key_of(2)]
            assert await read(places.profiles[0], 1) is None  # another collection
            assert await places.names.put("notes", manifest(1, 2), None)
        config = config_for(tmp_path / "knowledge")
        async with (
            open_node(config) as node,
            listen(config, node) as listening,
            open_places(listening.url) as places,
        ):
            assert await read(places.publish_to.store, 1) == first
            named = await places.names.get("notes")
            assert named is not None
            assert named.manifest == manifest(1, 2)

    run(work())


def manifest(*numbers: int) -> dict[str, object]:
    return {"models": {"00" * 16: {"chunks": [key_of(n).hex() for n in numbers]}}}


def test_the_first_node_takes_what_is_new_and_folders_are_asked_first(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        where = ["http://127.0.0.1:9", node.url, tmp_path / "local"]
        async with open_places(where[1:]) as places:
            assert [endpoint.name for endpoint in places.endpoints] == [
                str(tmp_path / "local"),
                node.url,
            ]
            assert places.publish_to.name == node.url
        async with open_places(where) as places:  # one that is away does not keep it from opening
            assert places.publish_to.name == "http://127.0.0.1:9"
            with pytest.raises(StoreError):
                await places.names.get("notes")

    with_node(tmp_path / "node", test)


def test_tokens_reach_nodes(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        async with open_places(node.url, token="wrong") as places:
            with pytest.raises(StoreError, match="401"):
                await put(places.publish_to.store, 1)
            with pytest.raises(StoreError, match="401"):
                await places.names.get("notes")
        async with open_places(node.url, token="right", client="me") as places:
            data = await put(places.publish_to.store, 1)
            assert await read(places.publish_to.store, 1) == data
            assert await places.names.get("notes") is None

    with_node(tmp_path, test, tenant("t", "right"))


def test_stores_and_names_of_a_node_share_its_connections(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.ask("GET", "/healthz")
        async with open_places(node.url) as places:
            data = await put(places.publish_to.store, 1)
            assert await read(places.publish_to.store, 1) == data
            assert await read(places.profiles[0], 1) is None
            assert await places.names.put("notes", manifest(1), None)
            assert [about.name async for about in places.names.list()] == ["notes"]
            shown = (await node.ask("GET", "/metrics"))[2].decode()
            assert "kdn_connections 2.0" in shown, "this test's own, and one more"

    with_node(tmp_path, test)


def test_nothing_is_refused_by_name() -> None:
    async def work() -> None:
        async with open_places([]):
            pass

    with pytest.raises(UnsupportedError, match="found none"):
        run(work())


def test_neither_torch_nor_numba_is_needed() -> None:
    """A node is up at once, on a machine that has neither."""
    imports = "import sys, kdn.places.places, kdn.node.server"
    code = f"{imports}; print(sorted({{'numba', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
