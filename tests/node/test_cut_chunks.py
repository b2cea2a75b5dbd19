"""Chunks without their finest levels at a node: put so, cut by it, told truthfully, made whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdn.codec.header import Header
from kdn.protocol.frames import split
from kdn.store.base import Entry, Span
from kdn.store.evict import open_policy
from kdn.store.http import HttpStore
from kdn.store.memory import MemoryStore
from kdn.store.node_client import NodeClient
from kdn.store.node_estimate import estimate
from kdn.store.streaming import Ask, Collected
from tests.node.harness import Running, checksum, chunk_stream, key_of, tenant, with_node

KEY = key_of(1)
URL = f"/v1/chunks/{KEY.hex()}"
STREAM = chunk_stream(KEY, 30_000)
ENDS = Header.parse(STREAM).level_ends
ETAG = Header.parse(STREAM).stream_id


async def put(node: Running, data: bytes, **headers: str) -> tuple[int, dict[str, object]]:
    status, _, body = await node.ask("PUT", URL, data, Kdn_Checksum=checksum(data), **headers)
    return status, json.loads(body)


async def looked_up(node: Running) -> tuple[int, bytes, bytes]:
    """Size, etag and head of the chunk, as a batch lookup tells."""
    question = json.dumps({"keys": [KEY.hex()]}).encode()
    _, _, body = await node.ask("POST", "/v1/lookup", question)
    [(frame, data)] = split(body)
    return frame.object_bytes, frame.etag, bytes(data)


@pytest.mark.parametrize("levels", [1, 2])
def test_the_first_levels_of_a_stream_are_a_chunk(tmp_path: Path, levels: int) -> None:
    async def test(node: Running) -> None:
        short = STREAM[: ENDS[levels - 1]]
        status, told = await put(node, short)
        assert (status, told["size_bytes"], told["etag"]) == (201, len(short), ETAG.hex())
        head = STREAM[: Header.parse(STREAM).size_bytes]
        assert await looked_up(node) == (len(short), ETAG, head)
        status, headers, body = await node.ask("GET", URL)
        assert (status, body, headers["ETag"]) == (200, short, f'"{ETAG.hex()}"')
        client = NodeClient(node.url)
        found = await estimate(client, [KEY], rate_bytes_per_s=1e6)
        assert [part.size_bytes for part in found.levels] == list(ENDS[:levels])
        await client.close()

    with_node(tmp_path, test)


@pytest.mark.parametrize(
    "data",
    [
        STREAM[: ENDS[0] - 1],
        STREAM[: ENDS[1] + 1],
        STREAM[: Header.parse(STREAM).size_bytes],
        STREAM[: ENDS[0] - 1] + b"\0",
        STREAM[: ENDS[1] - 1] + bytes([STREAM[ENDS[1] - 1] ^ 1]),
        STREAM + b"\0",
    ],
    ids=["in a level", "after a level", "no level", "wrong byte", "wrong bit", "too long"],
)
def test_one_that_is_cut_elsewhere_or_wrong_is_refused(tmp_path: Path, data: bytes) -> None:
    async def test(node: Running) -> None:
        status, told = await put(node, data)
        assert (status, told["code"]) in [(422, "format_error"), (422, "checksum_mismatch")]
        assert (await node.ask("GET", URL))[0] == 404

    with_node(tmp_path, test)


def test_more_levels_of_the_same_stream_make_it_whole(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await put(node, STREAM[: ENDS[0]])
        status, told = await put(node, STREAM)
        assert (status, told["size_bytes"]) == (200, len(STREAM))
        assert (await node.ask("GET", URL))[2] == STREAM
        status, told = await put(node, STREAM[: ENDS[0]])
        assert (status, told["size_bytes"]) == (200, len(STREAM)), "and fewer do not cut it"
        status, told = await put(node, STREAM[: ENDS[0]], If_Match=f'"{ETAG.hex()}"')
        assert (status, told["size_bytes"]) == (200, len(STREAM)), "whoever names it"
        other = chunk_stream(KEY, 30_000, seed=5)
        status, told = await put(node, other)
        assert (status, told["etag"]) == (200, ETAG.hex()), "another stream changes nothing"
        assert (await node.ask("GET", URL))[2] == STREAM

    with_node(tmp_path, test)


def test_a_longer_stream_of_another_writer_takes_its_place_if_it_names_it(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        await put(node, STREAM[: ENDS[0]])
        other = chunk_stream(KEY, 30_000, seed=5)
        status, _ = await put(node, other, If_Match=f'"{ETAG.hex()}"')
        assert status == 200
        assert (await node.ask("GET", URL))[2] == other

    with_node(tmp_path, test)


def test_a_quota_holds_for_what_makes_it_whole(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        head = {"Kdn_Checksum": checksum(STREAM[: ENDS[0]]), "token": "t"}
        assert (await node.ask("PUT", URL, STREAM[: ENDS[0]], **head))[0] == 201
        head["Kdn_Checksum"] = checksum(STREAM)
        assert (await node.ask("PUT", URL, STREAM, **head))[0] == 507
        assert (await node.ask("GET", URL, token="t"))[2] == STREAM[: ENDS[0]]

    with_node(tmp_path, test, tenant("a", "t", quota_bytes=20_000))


def test_a_tenant_may_be_given_no_more_levels(tmp_path: Path) -> None:
    async def test(node: Running) -> None:
        status, _, body = await node.ask("PUT", URL, STREAM, "t", Kdn_Checksum=checksum(STREAM))
        assert (status, json.loads(body)["size_bytes"]) == (201, ENDS[1])
        assert (await node.ask("GET", URL, token="t"))[2] == STREAM[: ENDS[1]]

    with_node(tmp_path, test, tenant("a", "t", max_levels=2))


def test_what_a_full_node_cuts_is_told(tmp_path: Path) -> None:
    """Of more than it has room for, most is there, and some of that without its last level."""

    async def test(node: Running) -> None:
        streams = [await node.put_chunk(number, 30_000) for number in range(6)]
        client = NodeClient(node.url)
        store = HttpStore(client, collection="chunks")
        entries = await store.lookup([key_of(number) for number in range(6)], head_bytes=400)
        sizes: dict[int, int] = {}
        for number, (stream, entry) in enumerate(zip(streams, entries, strict=True)):
            if entry is None:
                continue
            header = Header.parse(stream)
            assert entry.etag == header.stream_id
            assert entry.size_bytes in header.level_ends[1:]
            span = await store.get(entry.key, etag=entry.etag)
            assert span is not None
            assert bytes(span.data) == stream[: entry.size_bytes]
            sizes[number] = entry.size_bytes
        assert len(sizes) >= 5, "one more than whole ones would fit"
        first = min(sizes, key=lambda number: sizes[number])
        assert sizes[first] < max(sizes.values())
        # Who began before it was cut gets less than was asked for, and no other bytes.
        whole = Header.parse(streams[first])
        asks = [Ask(key_of(first), 0, whole.stream_bytes, whole.stream_id)]
        found = Collected(1)
        await store.read_into(asks, found)
        assert found.found[0] == streams[first][: sizes[first]]
        await client.close()

    def store() -> MemoryStore:
        return MemoryStore(140_000, open_policy("graded"))

    with_node(tmp_path, test, store=store)


def test_cut_while_it_is_sent(tmp_path: Path) -> None:
    """The answer has promised bytes that are gone: it is cut, or says so; nothing wrong comes."""

    class Fading(MemoryStore):
        async def get(
            self, key: bytes, start: int = 0, end: int | None = None, *, etag: bytes | None = None
        ) -> Span | None:
            if key in self._held and not self._held[key].entry.is_cut:
                self._cut(key, ENDS[1])
            return await super().get(key, start, end, etag=etag)

    async def test(node: Running) -> None:
        await put(node, STREAM)
        client = NodeClient(node.url)
        store = HttpStore(client, collection="chunks")
        found = Collected(1)
        await store.read_into([Ask(KEY, 0, len(STREAM), ETAG)], found)
        assert found.found[0] == b"", "gone, as far as this answer goes"
        assert await store.lookup([KEY]) == [Entry(KEY, ETAG, ENDS[1])]
        await store.read_into([Ask(KEY, 0, ENDS[1], ETAG)], found)
        assert found.found[0] == STREAM[: ENDS[1]]
        await client.close()

    with_node(tmp_path, test, store=lambda: Fading(2**20, open_policy("graded")))
