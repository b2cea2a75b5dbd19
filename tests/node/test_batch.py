"""Batch lookup and read: one answer per question, in order, and a miss shifts nothing."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kdn.cache.keys import PUBLIC_SEAL_KEY
from kdn.codec.format import Section, write
from kdn.codec.header import Header
from kdn.errors import StoreError
from kdn.protocol.frames import Frame, split
from kdn.store.base import Span
from kdn.store.evict import open_policy
from kdn.store.memory import MemoryStore
from tests.node.harness import (
    Running,
    checksum,
    chunk_stream,
    connect,
    key_of,
    request,
    tenant,
    with_node,
)

MIB = 2**20


async def post(node: Running, path: str, body: Any, **more: Any) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, headers, answer = await node.ask("POST", path, data, **more)
    if status == 200:
        assert headers["Content-Type"] == "application/vnd.kdn.frames"
        assert int(headers["Content-Length"]) == len(answer)
    return status, answer


async def frames_of(node: Running, path: str, body: Any) -> list[tuple[Frame, bytes]]:
    status, answer = await post(node, path, body)
    assert status == 200, answer
    return [(frame, bytes(data)) for frame, data in split(answer)]


def test_lookup_brings_the_headers(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        streams = {n: await node.put_chunk(n) for n in (1, 2, 4)}
        keys = [key_of(n).hex() for n in (4, 3, 1, 1, 2)]
        found = await frames_of(node, "/v1/lookup", {"keys": keys})
        assert [f.number for f, _ in found] == [0, 1, 2, 3, 4]
        assert [f.key.hex() for f, _ in found] == keys
        assert [f.status for f, _ in found] == [200, 404, 200, 200, 200]
        for (frame, data), number in zip(found, (4, 3, 1, 1, 2), strict=True):
            assert frame.last
            if number == 3:
                assert (frame.etag, frame.object_bytes, data) == (b"", 0, b"")
                continue
            header = Header.parse(streams[number])
            assert data == streams[number][: header.size_bytes]
            assert frame.etag == header.stream_id
            assert frame.object_bytes == len(streams[number])

    with_node(tmp_path, test)


def test_lookup_with_head_bytes(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1, 500, Kdn_Parent="aa", Kdn_Saved_Seconds="2.5")
        for asked in (0, 10, 400, 65536):
            ((frame, data),) = await frames_of(
                node, "/v1/lookup", {"keys": [key_of(1).hex()], "head_bytes": asked}
            )
            assert (frame.status, data) == (200, stream[:asked])
            assert (frame.parent, frame.saved_s) == (b"\xaa", 2.5)

    with_node(tmp_path, test)


def test_lookup_of_a_long_header(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        info = Header.parse(chunk_stream(key_of(1), levels=1)).info
        stream = write(
            info, [Section(0, 0, group, b"x" * group) for group in range(1000)], PUBLIC_SEAL_KEY
        )
        url = f"/v1/chunks/{key_of(1).hex()}"
        assert (await node.ask("PUT", url, stream, Kdn_Checksum=checksum(stream)))[0] == 201
        ((_, data),) = await frames_of(node, "/v1/lookup", {"keys": [key_of(1).hex()]})
        assert len(data) > 8000
        assert data == stream[: Header.parse(stream).size_bytes]

    with_node(tmp_path, test)


def test_read_many_spans(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        one, two = await node.put_chunk(1), await node.put_chunk(2)
        k1, k2, k3 = (key_of(n).hex() for n in (1, 2, 3))
        etag = Header.parse(two).stream_id.hex()
        asked: list[tuple[dict[str, Any], int, bytes]] = [
            ({"key": k1}, 200, one),
            ({"key": k3}, 404, b""),
            ({"key": k2, "start": 5, "end": 9}, 200, two[5:9]),
            ({"key": k2, "start": 7, "etag": etag}, 200, two[7:]),
            ({"key": k2, "etag": "00"}, 412, b""),
            ({"key": k3, "start": 10, "end": 20}, 404, b""),
            ({"key": k1, "start": 10, "end": 10}, 200, b""),
            ({"key": k1, "start": 10**9}, 200, b""),
            ({"key": k1, "start": len(one) - 1, "end": 10**9}, 200, one[-1:]),
            ({"key": k1, "start": 0, "end": None, "etag": None}, 200, one),
        ]
        found = await frames_of(node, "/v1/read", {"spans": [span for span, _, _ in asked]})
        assert [frame.number for frame, _ in found] == list(range(len(asked)))
        for (frame, data), (span, status, expected) in zip(found, asked, strict=True):
            assert (frame.key.hex(), frame.status, data) == (span["key"], status, expected)
            assert frame.last
            if status == 200 and data:
                assert frame.start == span.get("start", 0)
        assert found[4][0].etag.hex() == etag

    with_node(tmp_path, test)


@pytest.mark.parametrize("frame_bytes", [0, 1000, 65536, 5 * MIB])
def test_long_spans_come_in_several_frames(tmp_path: Path, frame_bytes: int) -> None:
    async def test(node: Running) -> None:
        stream = await node.put_chunk(1, 2 * MIB + 100_000)
        key = key_of(1).hex()
        small = await node.put_chunk(2)
        spans = [{"key": key, "start": 1000}, {"key": key_of(2).hex()}]
        found = await frames_of(node, "/v1/read", {"spans": spans})
        assert [f.number for f, _ in found] == [0, 0, 0, 1]
        assert [f.last for f, _ in found] == [False, False, True, True]
        assert [f.start for f, _ in found] == [1000, 1000 + MIB, 1000 + 2 * MIB, 0]
        assert b"".join(data for _, data in found[:3]) == stream[1000:]
        assert found[3][1] == small

    with_node(tmp_path, test, frame_bytes=frame_bytes)


class LosingStore(MemoryStore):
    """Finds everything in a lookup, and forgets one object or fails, from one byte on."""

    def __init__(self, number: int, from_byte: int, error: Exception | None):
        super().__init__(2**28, open_policy("lru"))
        self.number, self.from_byte, self.error = number, from_byte, error

    async def get(self, key: bytes, start: int = 0, *end: Any, **more: Any) -> Span | None:
        if key.endswith(key_of(self.number)) and start >= self.from_byte:
            if self.error:
                raise self.error
            return None
        return await super().get(key, start, *end, **more)


@pytest.mark.parametrize(("error", "status"), [(None, 410), (StoreError("broken"), 503)])
@pytest.mark.parametrize("from_byte", [0, MIB])
def test_what_vanishes_is_padded_and_shifts_nothing(
    tmp_path: Path, error: Exception | None, status: int, from_byte: int
) -> None:
    async def test(node: Running) -> None:
        streams = [await node.put_chunk(n, 3 * MIB) for n in (1, 2, 3)]
        spans = [{"key": key_of(n).hex()} for n in (1, 2, 3)]
        found = await frames_of(node, "/v1/read", {"spans": spans})
        for index in (0, 2):
            got = [(f.status, d) for f, d in found if f.number == index]
            assert {s for s, _ in got} == {200}
            assert b"".join(d for _, d in got) == streams[index]
        lost = [(f, d) for f, d in found if f.number == 1]
        for frame, data in lost:
            expected = 200 if frame.start < from_byte else status
            assert frame.status == expected
            whole = streams[1][frame.start : frame.start + frame.length]
            assert data == (whole if expected == 200 else bytes(frame.length))
        assert sum(f.length for f, _ in lost) == len(streams[1])

    with_node(tmp_path, test, store=lambda: LosingStore(2, from_byte, error))


def test_other_collections(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for body, etag in ((b"1" * 9000, "01"), (b"2" * 9000, "01"), (b"3", "01")):
            sent = {"Kdn_Checksum": checksum(body), "Kdn_Etag": etag}
            assert (await node.ask("PUT", "/v1/objects/abcd", body, **sent))[0] == 201
            asked = {"collection": "objects", "spans": [{"key": "abcd"}]}
            ((frame, data),) = await frames_of(node, "/v1/read", asked)
            assert (frame.status, data, frame.etag) == (200, body, b"\x01")
            ((_, data),) = await frames_of(
                node, "/v1/lookup", {"collection": "objects", "keys": ["abcd"]}
            )
            assert data == b""
            assert (await node.ask("DELETE", "/v1/objects/abcd"))[0] == 204
        ((frame, _),) = await frames_of(node, "/v1/read", {"spans": [{"key": "abcd"}]})
        assert frame.status == 404

    with_node(tmp_path, test)


KEY = key_of(1).hex()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"nonsense", b"[]", b"{}", b"null", b"\xff\xfe", b'{"spans": [' + b"[" * 5000,
        b'{"spans": NaN}', b'{"spans": [], "spans": []}', '{"spans": []}'.encode("utf-16"),
        {"spans": []}, {"spans": {}}, {"spans": [3]}, {"spans": [{}]}, {"spans": [{"key": 5}]},
        {"spans": [{"key": "zz"}]}, {"spans": [{"key": KEY.upper() + "A"}]},
        {"spans": [{"key": KEY, "start": -1}]}, {"spans": [{"key": KEY, "start": None}]},
        {"spans": [{"key": KEY, "start": 5, "end": 4}]}, {"spans": [{"key": KEY, "start": True}]},
        {"spans": [{"key": KEY, "end": 1.5}]}, {"spans": [{"key": KEY, "end": 2**64}]},
        {"spans": [{"key": KEY, "etag": "0" * 66}]}, {"spans": [{"key": KEY, "other": 1}]},
        {"spans": [{"key": KEY}] * 4097}, {"spans": [{"key": KEY}], "collection": "names"},
        {"spans": [{"key": KEY}], "collection": ["chunks"]}, {"spans": [{"key": KEY}], "x": 1},
    ],
    ids=lambda body: str(body)[:30],
)  # fmt: skip
def test_bad_reads(tmp_path: Path, body: Any) -> None:
    async def test(node: Running) -> None:
        status, answer = await post(node, "/v1/read", body)
        assert (status, json.loads(answer)["code"]) == (400, "bad_request")

    with_node(tmp_path, test)


@pytest.mark.parametrize(
    "body",
    [{"keys": []}, {"keys": KEY}, {"keys": [KEY] * 4097}, {"keys": [KEY], "head_bytes": -1},
     {"keys": [KEY], "head_bytes": 65537}, {"keys": [KEY], "head_bytes": "1"}, {"keys": [None]}],
    ids=lambda body: str(body)[:30],
)  # fmt: skip
def test_bad_lookups(tmp_path: Path, body: Any) -> None:
    async def test(node: Running) -> None:
        assert (await post(node, "/v1/lookup", body))[0] == 400

    with_node(tmp_path, test)


def test_a_request_too_large(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        status, answer = await post(node, "/v1/read", b" " * (2 * MIB + 1))
        assert (status, json.loads(answer)["code"]) == (413, "too_large")
        full = {"spans": [{"key": KEY, "start": 10**15, "end": 10**16, "etag": KEY}] * 4096}
        assert (await post(node, "/v1/read", full))[0] == 200

    with_node(tmp_path, test)


def test_keys_times_head_bytes_is_bounded(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        for num_keys, head_bytes, status in (
            (256, 65536, 200), (257, 65536, 400), (4096, 4096, 200), (4096, 4097, 400),
            (4096, None, 200),
        ):  # fmt: skip
            asked = {"keys": [KEY] * num_keys, "head_bytes": head_bytes}
            assert (await post(node, "/v1/lookup", asked))[0] == status

    with_node(tmp_path, test)


def test_lookups_that_nobody_reads_take_bounded_memory(tmp_path: Path) -> None:
    """Of 40 MiB for answers 30 are what one tenant can have: one lookup of 16 MiB at a time. The
    other tenant is answered at once."""

    async def test(node: Running) -> None:
        for token in "ab":
            await node.put_chunk(1, 65536, token=token)
        asked = json.dumps({"keys": [key_of(1).hex()] * 255, "head_bytes": 65536}).encode()
        told = (f"Content-Length: {len(asked)}", "Authorization: Bearer a")
        tracemalloc.start()
        try:
            peers = [await connect(node) for _ in range(12)]
            for _, writer in peers:
                writer.transport.pause_reading()
                writer.write(request("/v1/lookup", *told, method="POST") + asked)
            while node.node.num_requests < 12:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            begin_s = time.monotonic()
            few = {"keys": [key_of(1).hex()] * 64, "head_bytes": 65536}
            assert (await post(node, "/v1/lookup", few, token="b"))[0] == 200
            assert time.monotonic() - begin_s < 4  # the others' lookups wait for 5
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 64 * MIB
        for _, writer in peers:
            writer.transport.abort()

    tenants = (tenant("ann", "a"), tenant("bob", "b"))
    with_node(tmp_path, test, *tenants, max_answers_bytes=40 * MIB, body_window_s=5.0)


def test_json_of_nothing_but_lists_is_refused(tmp_path: Path) -> None:
    """It would take 25 times its size."""

    async def test(node: Running) -> None:
        body = b'{"keys":[' + b"[]," * 600_000 + b"[]]}"
        tracemalloc.start()
        try:
            assert (await post(node, "/v1/lookup", body))[0] == 400
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 8 * len(body)

    with_node(tmp_path, test)
