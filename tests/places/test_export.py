"""What an export writes: that it is found again through any web server, that it grows and shrinks
with its place, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiohttp
import pytest
from xxhash import xxh3_64_intdigest

from kdn.bench.web_server import start_web
from kdn.codec.header import Header
from kdn.errors import ReadOnlyError, RefusedError, StoreError, UnsupportedError
from kdn.places.export import export
from kdn.places.export_folder import ExportFolder
from kdn.places.places import open_places
from kdn.session.exporting import STREAMS
from kdn.store.static_layout import chunk_path
from tests.node.harness import chunk_stream, key_of, run
from tests.places.exports import Chain, exported, manifest_of, needs_nginx


async def found(url: str, chain: Chain) -> list[int]:
    """Of a prompt's chunks by a client of its own."""
    async with open_places(url) as places:
        store = places.publish_to.store
        keys = [key_of(number) for number in chain]
        entries = await store.lookup(keys, head_bytes=4096)
        for entry in filter(None, entries):
            data = chunk_stream(entry.key, seed=int.from_bytes(entry.key))
            assert entry.size_bytes == len(data)
            assert data.startswith(entry.head)
            assert len(entry.head) > 100
        return [number for number, entry in zip(chain, entries, strict=True) if entry]


@needs_nginx
def test_one_request_answers_a_lookup_and_ranges_read_the_rest(tmp_path: Path) -> None:
    async def work() -> None:
        done = await exported(tmp_path / "a", tmp_path / "x", [range(1, 21)], {"n": range(1, 21)})
        assert (done.names, done.chunks, done.new_chunks) == (1, 20, 20)
        with start_web(tmp_path / "x", tmp_path / "web") as web:
            assert await found(web.url, range(1, 31)) == list(range(1, 21))
            asked = [line.split()[1] for line in web.requests()]
            assert sorted(asked) == ["/kdn/index/00/" + key_of(1).hex(), "/kdn/kdn-export.json"]
            async with open_places(web.url) as places:
                store = places.publish_to.store
                span = await store.get(key_of(7), 100, 4000)
                assert span is not None
                assert bytes(span.data) == chunk_stream(key_of(7), seed=7)[100:4000]
                assert await store.get(key_of(7), etag=b"other") is None
                assert await store.get(key_of(99)) is None
                assert [e.key async for e in store.list()] == [key_of(n) for n in range(1, 21)]
                named = await places.names.get("n")
                assert named is not None
                assert named.manifest == manifest_of(range(1, 21))
                assert [about.name async for about in places.names.list("")] == ["n"]
                assert await places.names.get("m") is None

    run(work())


@needs_nginx
def test_contexts_that_branch_are_found_from_every_beginning_and_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beginning of two chunks that 50 contexts share, one of them long; and a context that is
    longer than a page, with branches."""
    monkeypatch.setattr("kdn.places.export_index.CHAIN_CHUNKS", 250)
    shared = [[1, 2, 1000 + n] for n in range(50)]
    long, huge = [1, 2, *range(3000, 3050)], list(range(5000, 5300))
    side = [*huge[:200], 9001, 9002]

    async def work() -> None:
        await exported(tmp_path / "a", tmp_path / "x", [*shared, long, huge, side])
        with start_web(tmp_path / "x", tmp_path / "web") as web:
            assert await found(web.url, shared[40]) == shared[40]
            assert await found(web.url, [*long, 7]) == long
            assert await found(web.url, huge) == huge
            assert await found(web.url, side) == side
            assert await found(web.url, huge[270:]) == huge[270:]  # the rest is held elsewhere
            assert await found(web.url, [1, 2, 4]) == [1, 2]
            assert await found(web.url, [4, 1, 2]) == [1, 2]
            assert await found(web.url, [77, 78, 79, 80, 81]) == []
            before = len(web.requests())
            assert await found(web.url, huge[:30]) == huge[:30]
            [index] = [line for line in web.requests()[before:] if "index" in line]
            assert "206 bytes=0-65535" in index  # not all of a long page

    run(work())


@needs_nginx
def test_what_was_found_before_is_revalidated_and_led_on_from(tmp_path: Path) -> None:
    chains = [[1, *range(100 * n, 100 * n + 30)] for n in range(1, 5)]

    async def work() -> None:
        await exported(tmp_path / "a", tmp_path / "x", chains)
        with start_web(tmp_path / "x", tmp_path / "web") as web:
            async with open_places(web.url) as places:
                store = places.publish_to.store
                for chain in chains[:3]:
                    keys = [key_of(number) for number in chain]
                    assert None not in await store.lookup(keys)
            asked = [line.split()[1][-2:] for line in web.requests() if "index" in line]
            assert len(asked) == 4  # the shared first page once, and each context's own

    run(work())


@needs_nginx
def test_a_second_export_adds_and_updates_and_prune_removes(tmp_path: Path) -> None:
    a, x = tmp_path / "a", tmp_path / "x"

    async def work() -> None:
        await exported(a, x, [[1, 2, 3]], {"one": [1, 2, 3]})
        again = await exported(a, x)
        assert (again.new_chunks, again.chunks) == (0, 3)
        with start_web(x, tmp_path / "web") as web:
            more = await exported(a, x, [[1, 2, 4, 5]], {"two": [1, 2, 4, 5]}, names=["two"])
            assert (more.new_chunks, more.chunks, more.names) == (2, 5, 2)
            assert await found(web.url, [1, 2, 3]) == [1, 2, 3]
            assert await found(web.url, [1, 2, 4, 5]) == [1, 2, 4, 5]
            less = await exported(a, x, names=["o*"], prune=True)
            assert (less.chunks, less.names, less.pruned_files) == (3, 1, 5)
            assert await found(web.url, [1, 2, 4, 5]) == [1, 2]
            assert await found(web.url, [1, 2, 3]) == [1, 2, 3]
            async with open_places(web.url) as places:
                assert await places.names.get("two") is None
                assert [about.name async for about in places.names.list()] == ["one"]

    run(work())


def test_a_damaged_chunk_is_left_out_and_a_missing_one_told(tmp_path: Path) -> None:
    async def work() -> None:
        async with open_places(tmp_path / "a") as places:
            store = places.publish_to.store
            bad = bytearray(chunk_stream(key_of(2), seed=2))
            good = bytes(bad)
            bad[-1] ^= 1
            etag = Header.parse(good).stream_id
            data = bytes(bad)
            await store.put(key_of(2), data, etag=etag, checksum=xxh3_64_intdigest(data))
            await places.names.put("n", manifest_of([2, 3]), None)
            done = await export(places, tmp_path / "x", STREAMS)
        assert done.damaged == [key_of(2).hex()]
        assert done.missing == {"n": 1}
        assert done.chunks == 0
        assert not (tmp_path / "x" / chunk_path(key_of(2), etag)).exists()

    run(work())


def test_what_is_not_an_export_is_not_written_to(tmp_path: Path) -> None:
    def open_folder(path: Path) -> ExportFolder:
        return ExportFolder(path, STREAMS.header_bytes)

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UnsupportedError, match=r"letter\.txt"):
        open_folder(tmp_path / "mine")
    (tmp_path / "new").mkdir()
    root = tmp_path / "new" / "kdn-export.json"
    root.write_text(json.dumps({"format": "kdn export", "version": 2}))
    with pytest.raises(UnsupportedError, match="version 1"):
        open_folder(tmp_path / "new")
    first = open_folder(tmp_path / "x")
    with pytest.raises(StoreError, match="another process"):
        open_folder(tmp_path / "x")
    first.close()
    open_folder(tmp_path / "x").close()

    async def unknown() -> None:
        await exported(tmp_path / "a", tmp_path / "x", [[1]], names=["nothing"])

    with pytest.raises(StoreError, match="no name 'nothing'"):
        run(unknown())


@needs_nginx
def test_an_export_is_read_only_and_one_that_is_not_there_is_told(tmp_path: Path) -> None:
    async def work() -> None:
        await exported(tmp_path / "a", tmp_path / "x", [[1]], {"n": [1]})
        with start_web(tmp_path / "x", tmp_path / "web") as web:
            async with open_places([web.url, tmp_path / "own"]) as places:
                assert not places.publish_to.store.read_only
                named = await places.names.get("n")
                assert named is not None
                await places.names.change("n", lambda manifest: {**manifest, "more": 1})
                assert [about.version async for about in places.names.list()] == [1]
            async with open_places(web.url + "/kdn-export.json") as places:
                store = places.publish_to.store
                assert store.read_only
                with pytest.raises(ReadOnlyError):
                    await store.put(b"k", b"", etag=b"e", checksum=0)
                with pytest.raises(ReadOnlyError):
                    await store.delete(key_of(1))
                with pytest.raises(ReadOnlyError):
                    await places.names.delete("n")
                with pytest.raises(ReadOnlyError):
                    await places.names.put("n", {}, None)
            async with open_places(web.url + "/elsewhere") as places:
                with pytest.raises(RefusedError, match=r"no export here: no file kdn-export\.json"):
                    await places.publish_to.store.lookup([key_of(1)])

    run(work())


@needs_nginx
def test_the_settings_in_the_docs_serve_an_export(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    [server] = re.findall(r"```nginx\n(.*?)```", docs, re.DOTALL)

    async def headers(url: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, answer.headers.get("Cache-Control", "")

    async def work() -> None:
        await exported(tmp_path / "a", tmp_path / "x", [[1, 2]], {"n": [1, 2]})
        etag = Header.parse(chunk_stream(key_of(1), seed=1)).stream_id
        with start_web(tmp_path / "x", tmp_path / "web", server) as web:
            assert await found(web.url, [1, 2]) == [1, 2]
            assert await headers(f"{web.url}/names.json") == (200, "public, max-age=5")
            status, caching = await headers(f"{web.url}/{chunk_path(key_of(1), etag)}")
            assert (status, "immutable" in caching) == (200, True)
            assert (await headers(f"{web.url}/.lock"))[0] == 403

    run(work())
