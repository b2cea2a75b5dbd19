"""Objects over real sockets: ranges, conditions, verification, first writer wins."""

from __future__ import annotations

import asyncio
import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from kdn.codec.header import Header
from kdn.errors import NoSpaceError, StoreError
from kdn.protocol.frames import split
from kdn.store.base import Entry, Span
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.node.harness import Running, checksum, chunk_stream, key_of, tenant, with_node

KEY = key_of(1).hex()
URL = f"/v1/chunks/{KEY}"


def test_what_is_put_is_read(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        parent = key_of(9).hex()
        stream = await node.put_chunk(1, Kdn_Parent=parent, Kdn_Saved_Seconds="0.25")
        status, headers, body = await node.ask("GET", URL)
        assert (status, body) == (200, stream)
        assert headers["ETag"] == f'"{Header.parse(stream).stream_id.hex()}"'
        assert headers["Content-Length"] == str(len(stream))
        assert headers["Accept-Ranges"] == "bytes"
        assert headers["Kdn-Checksum"] == checksum(stream)
        assert headers["Kdn-Parent"] == parent
        assert float(headers["Kdn-Saved-Seconds"]) == 0.25
        head_status, head, nothing = await node.ask("HEAD", URL)
        assert (head_status, nothing) == (200, b"")
        for name in ("ETag", "Content-Length", "Kdn-Parent", "Accept-Ranges"):
            assert head[name] == headers[name]

    with_node(tmp_path, test)


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-99", 10, 100),
        ("bytes=4000-", 4000, None),
        ("bytes=-7", -7, None),
        ("bytes=-999999", 0, None),
        ("bytes=100-99999999999", 100, None),
    ],
)
def test_a_range(tmp_path: Path, asked: str, start: int, end: int | None) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1)
        expected = stream[start:end]
        status, headers, body = await node.ask("GET", URL, Range=asked)
        assert (status, body) == (206, expected)
        first = start % len(stream)
        last = first + len(expected) - 1
        assert headers["Content-Range"] == f"bytes {first}-{last}/{len(stream)}"
        assert headers["Kdn-Checksum"] == checksum(expected)
        status, headers, body = await node.ask("HEAD", URL, Range=asked)
        assert (status, body, headers["Content-Length"]) == (206, b"", str(len(expected)))

    with_node(tmp_path, test)


@pytest.mark.parametrize(
    "asked", ["bytes=5-4", "bytes=a-b", "lines=0-1", "bytes=0-1,3-4", "bytes=-"]
)
def test_a_range_that_makes_no_sense_is_ignored(tmp_path: Path, asked: str) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1)
        status, _, body = await node.ask("GET", URL, Range=asked)
        assert (status, body) == (200, stream)

    with_node(tmp_path, test)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("asked", ["bytes=999999-", "bytes=-0", "bytes=999999-9999999"])
def test_a_range_beyond_the_end(tmp_path: Path, asked: str, method: str) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1)
        status, headers, body = await node.ask(method, URL, Range=asked)
        assert status == 416
        assert headers["Content-Range"] == f"bytes */{len(stream)}"
        assert method == "HEAD" or json.loads(body)["code"] == "range_not_satisfiable"

    with_node(tmp_path, test)


def test_if_range(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1)
        etag = f'"{Header.parse(stream).stream_id.hex()}"'
        same = await node.ask("GET", URL, Range="bytes=3-4", If_Range=etag)
        assert (same[0], same[2]) == (206, stream[3:5])
        other = await node.ask("GET", URL, Range="bytes=3-4", If_Range=f'"{"0" * 32}"')
        assert (other[0], other[2]) == (200, stream)
        unsatisfiable = await node.ask("GET", URL, Range="bytes=99999-", If_Range='"00"')
        assert unsatisfiable[0] == 200
        fresh = await node.ask("GET", URL, If_None_Match=etag)
        assert (fresh[0], fresh[2], fresh[1]["ETag"]) == (304, b"", etag)

    with_node(tmp_path, test)


def test_a_large_object_in_many_frames(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1, 3_500_000)
        status, headers, body = await node.ask("GET", URL)
        assert (status, body == stream) == (200, True)
        assert "Kdn-Checksum" not in headers  # beyond 1 MiB
        _, _, body = await node.ask("GET", URL, Range="bytes=1000000-2999999")
        assert body == stream[1_000_000:3_000_000]

    with_node(tmp_path, test, frame_bytes=65536)


def test_a_put_is_idempotent_and_the_first_writer_wins(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1)
        etag = Header.parse(stream).stream_id.hex()
        other = chunk_stream(key_of(1), seed=99)
        for body in (stream, other):
            status, headers, said = await node.ask("PUT", URL, body, Kdn_Checksum=checksum(body))
            assert (status, headers["ETag"]) == (200, f'"{etag}"')
            hints = {"parent": None, "saved_s": 0.0}
            expected = {"key": KEY, "etag": etag, "size_bytes": len(stream), **hints}
            assert json.loads(said) == expected
        assert (await node.ask("GET", URL))[2] == stream

    with_node(tmp_path, test)


async def replace(
    node: Running, body: bytes, etag: str, token: str | None = None
) -> tuple[int, str, dict[str, Any]]:
    """(status, the ETag told, the JSON told)."""
    sent = {"Kdn_Checksum": checksum(body), "If_Match": etag}
    status, headers, said = await node.ask("PUT", URL, body, token, **sent)
    return status, headers.get("ETag", ""), json.loads(said)


def test_an_object_gives_way_to_one_that_names_it(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        old = await node.put_chunk(1)
        good, other = (chunk_stream(key_of(1), seed=seed) for seed in (8, 9))
        etags = [f'"{Header.parse(stream).stream_id.hex()}"' for stream in (old, good, other)]
        status, told, said = await replace(node, good, etags[2])
        assert (status, told, said["code"]) == (412, etags[0], "precondition_failed")
        assert said["object"] == {
            "key": KEY, "etag": etags[0][1:-1], "size_bytes": len(old), "parent": None,
            "saved_s": 0.0,
        }  # fmt: skip
        assert (await node.ask("GET", URL))[2] == old
        assert (await replace(node, good, etags[0]))[:2] == (200, etags[1])
        assert (await node.ask("GET", URL))[2] == good
        assert (await replace(node, good, etags[0]))[:2] == (200, etags[1])  # asked twice
        assert (await replace(node, other, etags[0]))[:2] == (412, etags[1])
        assert (await node.ask("DELETE", URL))[0] == 204
        assert (await replace(node, other, etags[0]))[:2] == (201, etags[2])
        for bad in ("*", etags[0][1:-1], f"W/{etags[0]}", f"{etags[0]}, {etags[1]}", '"xy"'):
            assert (await replace(node, good, bad))[0] == 400
        broken = good[:-1] + bytes([good[-1] ^ 1])
        assert (await replace(node, broken, etags[2]))[0] == 422
        assert (await node.ask("GET", URL))[2] == other

    with_node(tmp_path, test)


def test_a_replacement_counts_by_how_much_more_it_takes(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        old = await node.put_chunk(1, 6000, token="t")
        etag = f'"{Header.parse(old).stream_id.hex()}"'
        large, small = (chunk_stream(key_of(1), size, seed=8) for size in (12_000, 7000))
        assert (await replace(node, large, etag, "t"))[0] == 507
        assert (await replace(node, small, etag, "t"))[0] == 200
        stats = json.loads((await node.ask("GET", "/v1/stats", token="t"))[2])
        assert (stats["objects"], stats["size_bytes"]) == (1, len(small))
        await node.put_chunk(2, 2000, token="t")  # and what is left can be used
        body = chunk_stream(key_of(3), 2000)
        url = f"/v1/chunks/{key_of(3).hex()}"
        assert (await node.ask("PUT", url, body, "t", Kdn_Checksum=checksum(body)))[0] == 507

    with_node(tmp_path, test, tenant("t", "t", quota_bytes=10_000))


class PausingStore(MemoryStore):
    """Waits in the middle of a large object until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(2**28, open_policy("lru"))
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def get(self, key: bytes, start: int = 0, *rest: Any, **more: Any) -> Span | None:
        if start:
            self.reached.set()
            await self.go_on.wait()
        return await super().get(key, start, *rest, **more)


def test_a_reader_of_a_replaced_object_gets_no_mix(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        old = await node.put_chunk(1, 3 * 2**20)
        body = json.dumps({"spans": [{"key": KEY}]}).encode()
        reading = asyncio.create_task(node.ask("POST", "/v1/read", body))
        await node.node.depot.store.reached.wait()
        new = chunk_stream(key_of(1), 3 * 2**20, seed=8)
        etag = f'"{Header.parse(old).stream_id.hex()}"'
        assert (await replace(node, new, etag))[0] == 200
        node.node.depot.store.go_on.set()
        found = list(split((await reading)[2]))
        assert [frame.status for frame, _ in found] == [200, 410, 410, 410]
        assert {frame.etag for frame, _ in found} == {Header.parse(old).stream_id}
        assert bytes(found[0][1]) == old[: 2**20]

    with_node(tmp_path, test, store=PausingStore)


def test_of_many_writers_at_once_one_created_it(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        same = chunk_stream(key_of(1))
        bodies = [same if i % 2 else chunk_stream(key_of(1), seed=i) for i in range(12)]
        answers = await asyncio.gather(
            *(node.ask("PUT", URL, body, Kdn_Checksum=checksum(body)) for body in bodies)
        )
        assert sorted(status for status, _, _ in answers) == [200] * 11 + [201]
        assert len({headers["ETag"] for _, headers, _ in answers}) == 1
        assert (await node.ask("GET", URL))[2] in bodies

    with_node(tmp_path, test, store=lambda: HesitantStore(2**28, open_policy("lru")))


class HesitantStore(MemoryStore):
    """Lets others run in the middle of everything, as a disk does."""

    async def put_entry(self, *args: Any, **more: Any) -> Entry:
        await asyncio.sleep(0.01)
        return await super().put_entry(*args, **more)

    async def lookup(self, *keys: Any, **more: Any) -> list[Entry | None]:
        found = await super().lookup(*keys, **more)
        await asyncio.sleep(0.01)
        return found


STREAM = chunk_stream(key_of(1))
DAMAGED = STREAM[:-1] + bytes([STREAM[-1] ^ 1])


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (STREAM, {"Kdn_Checksum": "0" * 16}, 422, "checksum_mismatch"),
        (STREAM, {}, 400, "bad_request"),
        (STREAM, {"Kdn_Checksum": "12"}, 400, "bad_request"),
        (STREAM, {"Kdn_Checksum": "zz"}, 400, "bad_request"),
        (DAMAGED, {"Kdn_Checksum": checksum(DAMAGED)}, 422, "checksum_mismatch"),
        (STREAM[:-1], {"Kdn_Checksum": checksum(STREAM[:-1])}, 422, "format_error"),
        (STREAM + b"x", {"Kdn_Checksum": checksum(STREAM + b"x")}, 422, "format_error"),
        (b"", {"Kdn_Checksum": checksum(b"")}, 422, "format_error"),
        (b"hello", {"Kdn_Checksum": checksum(b"hello")}, 422, "format_error"),
        (STREAM, {"Kdn_Checksum": checksum(STREAM), "Kdn_Etag": "00"}, 422, "mismatch"),
        (STREAM, {"Kdn_Checksum": checksum(STREAM), "Kdn_Parent": "xy"}, 400, "bad_request"),
        (STREAM, {"Kdn_Checksum": checksum(STREAM), "Kdn_Saved_Seconds": "-1"}, 400, "bad_request"),
        (
            STREAM,
            {"Kdn_Checksum": checksum(STREAM), "Kdn_Saved_Seconds": "nan"},
            400,
            "bad_request",
        ),
        (
            STREAM,
            {"Kdn_Checksum": checksum(STREAM), "Content_Encoding": "gzip"},
            400,
            "bad_request",
        ),
    ],
)
def test_a_put_that_is_refused(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async def test(node: Running) -> None:
        found, _, said = await node.ask("PUT", URL, body, **headers)
        assert (found, json.loads(said)["code"]) == (status, code)
        assert (await node.ask("GET", URL))[0] == 404

    with_node(tmp_path, test)


def test_another_chunks_stream_is_refused(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        body = chunk_stream(key_of(2))
        status, _, said = await node.ask("PUT", URL, body, Kdn_Checksum=checksum(body))
        assert (status, json.loads(said)["code"]) == (422, "mismatch")
        assert (await node.ask("GET", URL))[0] == 404

    with_node(tmp_path, test)


def test_too_large_and_without_length(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        body = chunk_stream(key_of(1), 3000)
        status, _, said = await node.ask("PUT", URL, body, Kdn_Checksum=checksum(body))
        assert (status, json.loads(said)["code"]) == (413, "too_large")

        async def parts() -> Any:
            yield body

        async with node.session.put(node.url + URL, data=parts()) as answer:
            # Read in the order of refusal: headers come first.
            assert answer.status == 400
        sent = {"Kdn-Checksum": checksum(body)}
        async with node.session.put(node.url + URL, data=parts(), headers=sent) as answer:
            assert (answer.status, (await answer.json())["code"]) == (411, "length_required")

    with_node(tmp_path, test, max_chunk_bytes=2000)


@pytest.mark.parametrize("key", ["0", "ABCD", "xyz", "00" * 49, "%20", "00%2f00"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_bad_key(tmp_path: Path, key: str, method: str) -> None:
    async def test(node: Running) -> None:
        status, _, body = await node.ask(method, f"/v1/chunks/{key}")
        assert (status, json.loads(body)["code"]) == (400, "bad_request")

    with_node(tmp_path, test)


def test_delete(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1)
        assert (await node.ask("DELETE", URL))[0] == 204
        assert (await node.ask("GET", URL))[0] == 404
        status, _, body = await node.ask("DELETE", URL)
        assert (status, json.loads(body)["code"]) == (404, "not_found")

    with_node(tmp_path, test)


def test_profiles_are_named_by_their_content(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        body = b"any profile" * 1000
        name = blake2b(body, digest_size=16).hexdigest()
        url = f"/v1/profiles/{name}"
        status, headers, _ = await node.ask("PUT", url, body, Kdn_Checksum=checksum(body))
        assert (status, headers["ETag"]) == (201, f'"{name}"')
        assert (await node.ask("GET", url))[2] == body
        assert (await node.ask("GET", f"/v1/chunks/{name}"))[0] == 404
        wrong = f"/v1/profiles/{'0' * 32}"
        status, _, said = await node.ask("PUT", wrong, body, Kdn_Checksum=checksum(body))
        assert (status, json.loads(said)["code"]) == (422, "mismatch")
        assert (await node.ask("PUT", "/v1/profiles/00", body))[0] == 400
        large = b"x" * 20001
        name = blake2b(large, digest_size=16).hexdigest()
        answer = await node.ask("PUT", f"/v1/profiles/{name}", large, Kdn_Checksum=checksum(large))
        assert answer[0] == 413

    with_node(tmp_path, test, max_profile_bytes=20000)


def test_objects_are_opaque(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        url = "/v1/objects/0102ff"
        sent = {"Kdn_Checksum": checksum(b"anything"), "Kdn_Etag": "abcd"}
        assert (await node.ask("PUT", url, b"anything", **sent))[0] == 201
        status, headers, body = await node.ask("GET", url)
        assert (status, headers["ETag"], body) == (200, '"abcd"', b"anything")
        del sent["Kdn_Etag"]
        assert (await node.ask("PUT", "/v1/objects/03", b"anything", **sent))[0] == 400
        sent = {"Kdn_Checksum": checksum(b""), "Kdn_Etag": "ab"}
        assert (await node.ask("PUT", "/v1/objects/04", b"", **sent))[0] == 201
        status, headers, body = await node.ask("GET", "/v1/objects/04")
        assert (status, body, headers["Content-Length"]) == (200, b"", "0")

    with_node(tmp_path, test)


def test_lists_are_paged_in_order(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        sizes = {}
        for number in (5, 3, 260, 1, 4):
            sizes[key_of(number).hex()] = len(await node.put_chunk(number, 100 + number))
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            query = "?limit=2" + (f"&after={after}" if after else "")
            page = json.loads((await node.ask("GET", "/v1/chunks" + query))[2])
            found += page["objects"]
            after = page["next"]
            if after is None:
                break
        assert [item["key"] for item in found] == sorted(sizes)
        assert {item["key"]: item["size_bytes"] for item in found} == sizes
        prefix = key_of(260).hex()[:30]
        page = json.loads((await node.ask("GET", f"/v1/chunks?prefix={prefix}"))[2])
        assert [item["key"] for item in page["objects"]] == [key_of(260).hex()]
        for bad in ("limit=0", "limit=x", "limit=1001", "prefix=q", "after=0"):
            assert (await node.ask("GET", f"/v1/chunks?{bad}"))[0] == 400
        stats = json.loads((await node.ask("GET", "/v1/stats"))[2])
        held = {"objects": 5, "size_bytes": sum(sizes.values()), "quota_bytes": 0}
        assert stats == {**held, "waiting_objects": 0, "waiting_bytes": 0}

    with_node(tmp_path, test)


class BrokenStore(MemoryStore):
    """Fails in the way it is told."""

    def __init__(self, *, get: Exception | None = None, put: Exception | None = None):
        super().__init__(2**28, open_policy("lru"))
        self.get_error, self.put_error, self.gets_left = get, put, 1

    async def put_entry(self, *args: Any, **more: Any) -> Entry:
        if self.put_error:
            raise self.put_error
        return await super().put_entry(*args, **more)

    async def get(self, key: bytes, *span: Any, **more: Any) -> Span | None:
        self.gets_left -= 1
        if self.gets_left < 0 and self.get_error:
            raise self.get_error
        return await super().get(key, *span, **more) if self.gets_left >= 0 else None


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(NoSpaceError("full"), 507, "no_space"), (StoreError("gone"), 503, "store_error")],
)
def test_a_store_that_refuses(tmp_path: Path, error: Exception, status: int, code: str) -> None:
    async def test(node: Running) -> None:
        found, _, body = await node.ask("PUT", URL, STREAM, Kdn_Checksum=checksum(STREAM))
        assert (found, json.loads(body)["code"]) == (status, code)

    with_node(tmp_path, test, store=lambda: BrokenStore(put=error))


def test_an_object_lost_in_the_middle_is_cut_not_filled(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1, 3_000_000)
        with pytest.raises(Exception, match="payload"):
            await node.ask("GET", URL)
        assert (await node.ask("GET", "/healthz"))[0] == 200

    with_node(tmp_path, test, store=BrokenStore)
