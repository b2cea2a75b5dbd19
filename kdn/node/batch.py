"""Handlers of `/v1/lookup` and `/v1/read`: many keys or spans, one streamed answer of frames.

All sizes are looked up first, so the answer's length is known before its first byte; what vanishes
afterwards is answered with frames of padding and its own status, and nothing else moves. The heads
that a lookup found are held until they are sent: they count as memory, which is shared fairly. The
event loop is, too: thousands of keys are gone through in slices (`turns.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, NamedTuple

from aiohttp import web
from xxhash import xxh3_64_intdigest

from kdn.codec.header import PROBE_BYTES, header_size
from kdn.depot.tenants import COLLECTIONS, Tenant
from kdn.depot.turns import Work
from kdn.errors import FormatError, KdnError
from kdn.node.answers import bad_request
from kdn.node.sending import Data, Sender
from kdn.node.state import CLIENT, NODE, TENANT, Node
from kdn.protocol import frames
from kdn.protocol.frames import FIXED_BYTES, MAX_DATA_BYTES, MAX_ETAG_BYTES, Frame
from kdn.protocol.limits import (
    MAX_HEAD_BYTES,
    MAX_HEADS_BYTES,
    MAX_OFFSET,
    MAX_QUESTION_BYTES,
    MAX_SAVED_S,
    MAX_SPANS,
)
from kdn.protocol.strict import parse_hex, parse_object
from kdn.store.base import Entry, clip
from kdn.store.streaming import Ask

log = logging.getLogger(__name__)

SMALL_BYTES = 16 << 10
"""Of a request that is parsed at once."""
LOOKED_UP = 64
"""Keys that the store is asked for at once: a fifth of a millisecond."""
LOOKUP_SLICE_S = 0.0001
READ_SLICE_S = 0.001
"""A turn costs about 15 microseconds; what a read sends has its turns in `egress.py`, too."""
READ_S = 0.001
"""A lookup that takes longer read files."""
RESTS = 3
MAX_REST_S = 0.05
SEEN = 16
"""Keys between two looks at the clock: some 20 us."""
SENT = 64
"""Answers between two rests while they are sent: of large ones, sending them is rest enough."""
SPAN_MEMBERS = frozenset({"key", "start", "end", "etag"})
USUAL_HEADER_BYTES = 4096
"""A lookup without `head_bytes` reads so much first, and more only for longer headers."""
ANSWER_BYTES = 1024
"""Memory of one answer besides its data: keys, entry, what is remembered of it."""


class Span(NamedTuple):
    """Bytes [start, end) of an object; None: to its end. `etag`: only of the object it names."""

    key: bytes
    start: int = 0
    end: int | None = None
    etag: bytes | None = None


class Found(NamedTuple):
    """One key or span and what will be answered: [start, end) of `entry` if the status is 200."""

    key: bytes
    status: int
    entry: Entry | None
    parent: bytes = b""
    start: int = 0
    end: int = 0


async def lookup(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    async with node.bodies.question(request, tenant.name, MAX_QUESTION_BYTES) as data:
        work = Work(node.depot.turns, tenant.name, LOOKUP_SLICE_S)
        body = await parse_body(work, data)
        collection, keys = await asked_keys(work, body, {"collection", "keys", "head_bytes"})
        head_bytes = _number(body.get("head_bytes"), "head_bytes", MAX_HEAD_BYTES)
        wanted = head_bytes
        if wanted is None:
            wanted = USUAL_HEADER_BYTES if collection == "chunks" else 0
        if len(keys) * wanted > MAX_HEADS_BYTES:
            raise bad_request(f"keys times head_bytes: expected at most {MAX_HEADS_BYTES}")
        async with node.answers.share(tenant.name, len(keys) * (ANSWER_BYTES + wanted)):
            store_keys = [tenant.store_key(collection, key) for key in keys]
            entries = await look_up(node, tenant, work, store_keys, wanted)
            whole_header = head_bytes is None and collection == "chunks"
            answers = await _heads(tenant, work, keys, entries, whole_header)
            counting = node.traffic.of(tenant.name).looked_up
            return await _send(node, request, work, answers, counting)


async def parse_body(work: Work, data: bytes) -> dict[str, Any]:
    """JSON is read in one go: 11 ms a MiB."""
    if len(data) > SMALL_BYTES:
        await work.rest()
    return parse_object(data)


async def asked_keys(
    work: Work, body: dict[str, Any], members: set[str]
) -> tuple[str, list[bytes]]:
    """A collection, and keys of it. `members`: what the question may have."""
    collection = _collection(body, members)
    keys = []
    for number, key in enumerate(_items(body, "keys")):
        keys.append(parse_hex("a key", key))
        if number % SEEN == SEEN - 1 and work.is_over:
            await work.rest()
    return collection, keys


async def look_up(
    node: Node, tenant: Tenant, work: Work, store_keys: list[bytes], head_bytes: int = 0
) -> list[Entry | None]:
    entries: list[Entry | None] = []
    for at in range(0, len(store_keys), LOOKED_UP):
        some = node.depot.store.lookup(store_keys[at : at + LOOKED_UP], head_bytes=head_bytes)
        if len(store_keys) > LOOKED_UP:
            some = _one_at_a_time(node, tenant, some)
        entries += await node.depot.wait(some)
        if work.is_over:
            await work.rest()
    return entries


async def _one_at_a_time(
    node: Node, tenant: Tenant, lookup: Awaitable[list[Entry | None]]
) -> list[Entry | None]:
    """A part of a long lookup. The threads that read files for it keep the event loop waiting, so
    each tenant has one of them at a time, and none most of the time while others want something."""
    async with node.lookups[tenant.name]:
        began_s = perf_counter()
        entries = await lookup
        took_s = perf_counter() - began_s
        if took_s > READ_S and not node.is_alone(tenant):
            await asyncio.sleep(min(RESTS * took_s, MAX_REST_S))
        return entries


async def _heads(
    tenant: Tenant, work: Work, keys: list[bytes], entries: list[Entry | None], whole_header: bool
) -> list[Found]:
    """`whole_header`: exactly the header of each chunk, instead of all that was looked up."""
    answers: list[Found] = []
    for key, entry in zip(keys, entries, strict=True):
        if len(answers) % SEEN == SEEN - 1 and work.is_over:
            await work.rest()
        end = 0
        if entry is not None:
            end = len(entry.head)
            if whole_header:
                end = _header_bytes(entry)
        status = frames.MISS if entry is None else frames.OK
        answers.append(Found(key, status, entry, _parent(tenant, entry), 0, end))
    return answers


async def read(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    async with node.bodies.question(request, tenant.name, MAX_QUESTION_BYTES) as data:
        work = Work(node.depot.turns, tenant.name, READ_SLICE_S)
        body = await parse_body(work, data)
        collection = _collection(body, {"collection", "spans"})
        spans = []
        for number, item in enumerate(_items(body, "spans")):
            spans.append(_span(item))
            if number % SEEN == SEEN - 1 and work.is_over:
                await work.rest()
        async with node.answers.share(tenant.name, len(spans) * ANSWER_BYTES):
            store_keys = [tenant.store_key(collection, span[0]) for span in spans]
            entries = await look_up(node, tenant, work, list(dict.fromkeys(store_keys)))
            found = {entry.key: entry for entry in entries if entry}
            answers = await _spans(tenant, work, spans, [found.get(key) for key in store_keys])
            traffic = node.traffic.of(tenant.name)
            # One of the spans stands for all: readers ask for the same levels of most chunks.
            middle = answers[len(answers) // 2]
            if middle.status == frames.OK and collection == "chunks":
                traffic.asked(store_keys[len(answers) // 2], middle.end, len(answers))
            return await _send(node, request, work, answers, traffic.read)


async def _spans(
    tenant: Tenant, work: Work, spans: list[Span], entries: list[Entry | None]
) -> list[Found]:
    answers: list[Found] = []
    for (key, start, end, etag), entry in zip(spans, entries, strict=True):
        if len(answers) % SEEN == SEEN - 1 and work.is_over:
            await work.rest()
        if entry is None:
            answers.append(Found(key, frames.MISS, None))
        elif etag not in (None, entry.etag):
            answers.append(Found(key, frames.OTHER_ETAG, entry, _parent(tenant, entry)))
        else:
            parent, span = _parent(tenant, entry), clip(start, end, entry.size_bytes)
            answers.append(Found(key, frames.OK, entry, parent, *span))
    return answers


async def _send(
    node: Node,
    request: web.Request,
    work: Work,
    answers: list[Found],
    count: Callable[[int, int], None],
) -> web.StreamResponse:
    """`count` is told how many were found, and how many were not."""
    tenant = request[TENANT]
    hits = num_bytes = 0
    for number, answer in enumerate(answers):
        hits += answer.status == frames.OK
        num_bytes += _answer_bytes(answer)
        if number % SEEN == SEEN - 1 and work.is_over:
            await work.rest()
    node.stats.hits.inc(hits)
    node.stats.misses.inc(len(answers) - hits)
    count(hits, len(answers) - hits)
    response = web.StreamResponse(headers={"Content-Type": frames.CONTENT_TYPE})
    response.content_length = num_bytes
    await response.prepare(request)
    asks = (
        Ask(entry.key, start, end, entry.etag)
        for _, status, entry, _, start, end in answers
        if status == frames.OK and entry is not None and end > len(entry.head)
    )
    with (
        node.depot.store.expecting(asks),
        Sender(node, request, (tenant.name, request[CLIENT]), num_bytes) as sender,
    ):
        for index, answer in enumerate(answers):
            if index % SENT == SENT - 1 and work.is_over:
                await work.rest()
            await _send_answer(node, sender, index, answer)
        await sender.flush()
    return response


async def _send_answer(node: Node, sender: Sender, index: int, answer: Found) -> None:
    """The frames of one answer. Their number and sizes are those of `_answer_bytes`."""
    key, status, entry, parent, start, last = answer
    etag, size_bytes, saved_s = b"", 0, 0.0
    if entry is not None:
        etag, size_bytes = entry.etag, entry.size_bytes
        saved_s = min(entry.hints.saved_s, MAX_SAVED_S)
    while True:
        end = min(last, start + MAX_DATA_BYTES)
        data: Data | None = None
        if status == frames.OK and entry is not None and start < end:
            status, data = await _read(sender, entry, start, end)
        if data is None:
            data = bytes(end - start)
        if status == frames.OK and entry is not None:
            checksum = node.checksums.of(entry.key, etag, start, data)
        else:
            checksum = xxh3_64_intdigest(data)
        frame = Frame(
            index, status, key, etag, parent, size_bytes, start, end - start, saved_s, checksum,
            end == last,
        )  # fmt: skip
        await sender.add(frames.pack(frame), data)
        start = end
        if start >= last:
            return


async def _read(sender: Sender, entry: Entry, start: int, end: int) -> tuple[int, Data | None]:
    if end <= len(entry.head):
        return frames.OK, memoryview(entry.head)[start:end]
    try:
        data = await sender.read(entry, start, end)
    except KdnError as error:
        log.error("a span could not be read", extra={"error": str(error)})
        return frames.FAILED, None
    return (frames.GONE, None) if data is None else (frames.OK, data)


def _answer_bytes(answer: Found) -> int:
    etag = b"" if answer.entry is None else answer.entry.etag
    head_bytes = FIXED_BYTES + len(answer.key) + len(etag) + len(answer.parent)
    num_bytes = answer.end - answer.start
    return head_bytes * max(1, -(-num_bytes // MAX_DATA_BYTES)) + num_bytes


def _parent(tenant: Tenant, entry: Entry | None) -> bytes:
    if entry is None or entry.hints.parent is None:
        return b""
    return tenant.public_key(entry.hints.parent)


def _header_bytes(entry: Entry) -> int:
    """Size of a chunk's header: it was verified on the way in."""
    try:
        return header_size(entry.head) if len(entry.head) >= PROBE_BYTES else 0
    except FormatError:
        return 0


def _collection(body: dict[str, Any], members: set[str]) -> str:
    if not body.keys() <= members:
        raise bad_request(f"expected no other members than {', '.join(sorted(members))}")
    collection = body.get("collection", "chunks")
    if not isinstance(collection, str) or collection not in COLLECTIONS:
        raise bad_request(f"collection: expected one of {', '.join(COLLECTIONS)}")
    return collection


def _items(body: dict[str, Any], name: str) -> list[Any]:
    items = body.get(name)
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_SPANS:
        raise bad_request(f"{name}: expected a list of 1 to {MAX_SPANS}")
    return items


def _span(item: Any) -> Span:
    if not isinstance(item, dict) or not item.keys() <= SPAN_MEMBERS:
        raise bad_request("a span: expected an object of key, start, end and etag")
    key = parse_hex("key of a span", item.get("key"))
    if len(item) == 1:  # the whole object, the usual case
        return Span(key)
    start = _number(item.get("start", 0), "start of a span", MAX_OFFSET)
    end = _number(item.get("end"), "end of a span", MAX_OFFSET)
    etag = item.get("etag")
    if start is None or (end is not None and end < start):
        raise bad_request("a span: expected 0 <= start <= end")
    told = None if etag is None else parse_hex("etag", etag, MAX_ETAG_BYTES)
    return Span(key, start, end, told)


def _number(value: Any, what: str, high: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise bad_request(f"{what}: expected a whole number from 0 to {high}")
    return value
