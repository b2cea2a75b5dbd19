"""Names: versions, conditions, history, crashes, and deletion with what only a name used."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kdn.protocol.limits import MAX_MANIFEST_KEYS
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.node.harness import Running, key_of, tenant, with_node


def manifest(*numbers: int, **more: Any) -> bytes:
    chunks = [key_of(number).hex() for number in numbers]
    return json.dumps({"models": {"aa": {"profile": "bb", "chunks": chunks}}, **more}).encode()


async def put(node: Running, name: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    status, answered, said = await node.ask("PUT", f"/v1/names/{name}", body, **headers)
    told = json.loads(said)
    if status < 300:
        assert answered["ETag"] == f'"{told["etag"]}"'
    return status, told


def test_versions_and_history(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        first = await put(node, "handbook", manifest(1, text="ü"))
        second = await put(node, "handbook", manifest(1, 2))
        assert (first[0], first[1]["version"]) == (201, 1)
        assert (second[0], second[1]["version"]) == (200, 2)
        status, headers, body = await node.ask("GET", "/v1/names/handbook")
        assert (status, headers["Kdn-Version"], body) == (200, "2", manifest(1, 2))
        assert headers["ETag"] == f'"{second[1]["etag"]}"'
        assert headers["Content-Type"].startswith("application/json")
        old = await node.ask("GET", "/v1/names/handbook?version=1")
        assert (old[0], old[2]) == (200, manifest(1, text="ü"))
        assert (await node.ask("GET", "/v1/names/handbook?version=3"))[0] == 404
        assert (await node.ask("GET", "/v1/names/handbook?version=0"))[0] == 400
        same = await node.ask("GET", "/v1/names/handbook", If_None_Match=headers["ETag"])
        assert (same[0], same[2]) == (304, b"")
        history = json.loads((await node.ask("GET", "/v1/names/handbook/history"))[2])
        assert [v["version"] for v in history["versions"]] == [2, 1]
        assert [v["etag"] for v in history["versions"]] == [second[1]["etag"], first[1]["etag"]]
        assert history["versions"][0]["size_bytes"] == len(manifest(1, 2))
        assert (await node.ask("GET", "/v1/names/other/history"))[0] == 404

    with_node(tmp_path, test)


def test_conditions(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        assert (await put(node, "n", manifest(), If_Match="*"))[0] == 412
        status, first = await put(node, "n", manifest(), If_None_Match="*")
        assert status == 201
        status, refused = await put(node, "n", manifest(), If_None_Match="*")
        assert (status, refused["code"]) == (412, "precondition_failed")
        etag = f'"{first["etag"]}"'
        status, second = await put(node, "n", manifest(), If_Match=etag)
        assert (status, second["version"]) == (200, 2)
        assert second["etag"] != first["etag"]  # same contents, another version
        status, headers, _ = await node.ask("PUT", "/v1/names/n", manifest(), If_Match=etag)
        assert (status, headers["ETag"]) == (412, f'"{second["etag"]}"')
        assert (await node.ask("DELETE", "/v1/names/n", If_Match=etag))[0] == 412
        assert (await node.ask("GET", "/v1/names/n"))[0] == 200
        assert (await node.ask("DELETE", "/v1/names/n", If_Match="*"))[0] == 200

    with_node(tmp_path, test)


def test_of_many_conditional_updates_one_wins(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        _, first = await put(node, "n", manifest())
        etag = f'"{first["etag"]}"'
        answers = await asyncio.gather(
            *(put(node, "n", manifest(n), If_Match=etag) for n in range(10))
        )
        assert sorted(status for status, _ in answers) == [200] + [412] * 9

    with_node(tmp_path, test)


def test_list(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for name in ("b.2", "a", "b.10", "c", "b.1"):
            await put(node, name, manifest())
        await put(node, "a", manifest(1))
        found: list[str] = []
        after = ""
        while after is not None:
            query = f"?limit=2&after={after}"
            page = json.loads((await node.ask("GET", "/v1/names" + query))[2])
            found += [item["name"] for item in page["names"]]
            after = page["next"]
        assert found == ["a", "b.1", "b.10", "b.2", "c"]
        page = json.loads((await node.ask("GET", "/v1/names?prefix=b."))[2])
        assert [item["name"] for item in page["names"]] == ["b.1", "b.10", "b.2"]
        for bad in ("prefix=%20", "after=%ff", "prefix=" + "x" * 129):
            assert (await node.ask("GET", f"/v1/names?{bad}"))[0] == 400
        page = json.loads((await node.ask("GET", "/v1/names?prefix=a"))[2])
        assert page["names"][0]["version"] == 2

    with_node(tmp_path, test)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"x", b'{"models": []}', b'{"models": {"aa": 3}}', b'{"models": {"zz": {}}}',
     b'{"models": {"aa": {"chunks": "aa"}}}', b'{"models": {"aa": {"chunks": ["q"]}}}',
     b'{"models": {"aa": {"profile": 1}}}', b'{"a": Infinity}', b"\xff"],
)  # fmt: skip
def test_bad_manifests(tmp_path: Path, body: bytes) -> None:
    async def test(node: Running) -> None:
        status, said = await put(node, "n", body)
        assert (status, said["code"]) == (400, "bad_request")
        assert (await node.ask("GET", "/v1/names/n"))[0] == 404

    with_node(tmp_path, test)


@pytest.mark.parametrize("name", ["-a", ".a", "a b", "a%2fb", "x" * 129, "ä"])
def test_bad_names(tmp_path: Path, name: str) -> None:
    async def test(node: Running) -> None:
        for method in ("GET", "PUT", "DELETE"):
            assert (await node.ask(method, f"/v1/names/{name}", manifest()))[0] == 400

    with_node(tmp_path, test)


def test_deletion_with_chunks(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for number in (1, 2, 3, 4):
            await node.put_chunk(number)
        await put(node, "a", manifest(1, 2, 9))
        await put(node, "a", manifest(2, 3))  # 1 is used by an older version only
        await put(node, "b", manifest(3))
        await put(node, "b", manifest(4))  # 3 is used by an older version of b
        status, _, body = await node.ask("DELETE", "/v1/names/a?chunks=true")
        assert status == 200
        assert json.loads(body) == {
            "name": "a",
            "deleted": [key_of(1).hex(), key_of(2).hex()],
            "kept": [key_of(3).hex()],
            "missing": [key_of(9).hex()],
        }
        found = [(await node.ask("GET", f"/v1/chunks/{key_of(n).hex()}"))[0] for n in (1, 2, 3, 4)]
        assert found == [404, 404, 200, 200]
        assert (await node.ask("GET", "/v1/names/a"))[0] == 404
        assert (await node.ask("GET", "/v1/names/a/history"))[0] == 404
        assert (await node.ask("DELETE", "/v1/names/a?chunks=true"))[0] == 404
        status, _, body = await node.ask("DELETE", "/v1/names/b")
        assert json.loads(body) == {"name": "b", "deleted": [], "kept": [], "missing": []}
        assert (await node.ask("GET", f"/v1/chunks/{key_of(4).hex()}"))[0] == 200
        assert (await node.ask("DELETE", "/v1/names/b?chunks=maybe"))[0] in (400, 404)

    with_node(tmp_path, test)


def keys(number: int, first: int = 0) -> bytes:
    return manifest(*range(first, first + number))


def test_a_manifest_names_a_bounded_number_of_chunks(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        assert (await put(node, "n", keys(MAX_MANIFEST_KEYS)))[0] == 201
        status, said = await put(node, "n", keys(MAX_MANIFEST_KEYS + 1))
        assert (status, said["code"]) == (400, "bad_request")
        models = {f"{n:02x}": {"chunks": [key_of(n).hex()] * 4097} for n in range(2)}
        assert (await put(node, "n", json.dumps({"models": models}).encode()))[0] == 400

    with_node(tmp_path, test)


def test_a_tenants_names_are_bounded(tmp_path: Path) -> None:
    """In their number, their bytes and their chunks; old versions give way to new ones."""

    async def test(node: Running) -> None:
        async def put_as(token: str, name: str, body: bytes) -> int:
            status, _, said = await node.ask("PUT", f"/v1/names/{name}", body, token)
            assert status != 507 or json.loads(said)["code"] == "quota_exceeded"
            return status

        assert [await put_as("t", name, keys(40)) for name in "abcd"] == [201, 201, 201, 507]
        assert await put_as("o", "d", keys(40)) == 201
        assert await put_as("t", "a", keys(19, first=40)) == 200  # chunks: 59, 40, 40
        assert await put_as("t", "a", keys(40, first=20)) == 200  # its first version gave way
        history = json.loads((await node.ask("GET", "/v1/names/a/history", token="t"))[2])
        assert [about["version"] for about in history["versions"]] == [3, 2]
        assert await put_as("t", "a", keys(61)) == 507  # no version of it could
        assert (await node.ask("GET", "/v1/names/a", token="t"))[2] == keys(40, first=20)
        assert (await node.ask("DELETE", "/v1/names/b", token="t"))[0] == 200
        assert await put_as("t", "a", keys(61)) == 200
        assert await put_as("t", "d", b'{"x": "' + b"x" * 20_000 + b'"}') == 507
        assert await put_as("t", "d", b"{}") == 201
        totals = await node.node.depot.names.totals("t")
        assert (totals.names, totals.chunks) == (3, 101)

    settings = {"max_names": 3, "max_named_chunks": 139, "max_names_bytes": 20_000}
    with_node(tmp_path, test, tenant("t", "t", **settings), tenant("o", "o"))


class HangingStore(MemoryStore):
    """Deletes nothing and never says so."""

    async def delete(self, key: bytes) -> bool:
        await asyncio.sleep(1000)
        return True


def test_a_tenants_changes_wait_for_its_own_only(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for token in "ab":
            assert (await node.ask("PUT", "/v1/names/n", manifest(1), token))[0] == 201
        await node.put_chunk(1, token="a")
        slow = asyncio.create_task(node.ask("DELETE", "/v1/names/n?chunks=true", token="a"))
        while node.node.num_requests < 1:
            await asyncio.sleep(0.01)
        assert (await node.ask("PUT", "/v1/names/n", manifest(1), "b"))[0] == 200
        assert (await node.ask("DELETE", "/v1/names/n", token="b"))[0] == 200
        assert not slow.done()
        assert (await slow)[0] == 503

    tenants = (tenant("ann", "a"), tenant("bob", "b"))
    store = partial(HangingStore, 2**24, open_policy("lru"))
    with_node(tmp_path, test, *tenants, store=store, store_timeout_s=2.0)


def test_reading_names_has_a_deadline(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await put(node, "n", manifest(1))
        let_go = Event()
        node.node.depot.names._thread.submit(let_go.wait, 20)
        try:
            for path in ("/v1/names/n", "/v1/names", "/v1/names/n/history", "/v1/stats"):
                status, _, said = await node.ask("GET", path)
                assert (status, json.loads(said)["code"]) == (503, "store_error")
        finally:
            let_go.set()
        assert (await node.ask("GET", "/v1/names/n"))[0] == 200

    with_node(tmp_path, test, store_timeout_s=0.3)


class StubbornStore(MemoryStore):
    async def delete(self, key: bytes) -> bool:
        return True  # says so


def test_deletion_is_verified(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1)
        await put(node, "a", manifest(1))
        status, _, body = await node.ask("DELETE", "/v1/names/a?chunks=true")
        assert (status, json.loads(body)["code"]) == (503, "store_error")
        assert (await node.ask("GET", "/v1/names/a"))[0] == 200

    with_node(tmp_path, test, store=lambda: StubbornStore(2**24, open_policy("lru")))
