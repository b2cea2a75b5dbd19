"""Handlers of `/v1/{collection}/{key}`: GET with ranges, HEAD, verified PUT, DELETE, and lists.

Nothing becomes visible before it was verified, and nothing is sent before it was found: a read that
fails later cuts the connection, so fewer bytes than promised arrive and never wrong ones.
"""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from typing import Any

import xxhash
from aiohttp import web

from kdn.codec.format import Bitstream
from kdn.codec.header import PROFILE_ID_BYTES
from kdn.depot.depot import Depot
from kdn.depot.tenants import Tenant
from kdn.depot.turns import Work
from kdn.errors import ChecksumError, KdnError, MismatchError
from kdn.node.answers import Refusal, bad_request, dumps, not_found
from kdn.node.bodies import checked_length
from kdn.node.ranges import names_etag, parse_range, quoted
from kdn.node.sending import Data, Sender
from kdn.node.state import CLIENT, NODE, TENANT, Node, query_number
from kdn.protocol.frames import MAX_DATA_BYTES, MAX_ETAG_BYTES, MAX_KEY_BYTES
from kdn.protocol.limits import MAX_LISTED, MAX_SAVED_S
from kdn.protocol.strict import parse_hex
from kdn.store.base import Entry, Hints
from kdn.store.streaming import Ask

LIST_SLICE_S = 0.001
Range = tuple[int, int]
IN_THREAD_BYTES = 256 * 2**10
"""Bodies beyond this are hashed in a thread: the hashes let others run meanwhile."""


async def get_object(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    _, store_key = _keys(request)
    (entry,) = await node.depot.wait(node.depot.store.lookup([store_key]))
    (node.stats.misses if entry is None else node.stats.hits).inc()
    node.traffic.of(tenant.name).read(int(entry is not None), int(entry is None))
    if entry is None:
        raise not_found()
    headers = {"ETag": quoted(entry.etag), "Accept-Ranges": "bytes", **hint_headers(tenant, entry)}
    if not node.depot.is_central(store_key):
        headers["Kdn-Central"] = "false"
    if names_etag(request.headers.get("If-None-Match", ""), entry.etag):
        return web.Response(status=304, headers=headers)
    start, end, status = wanted(
        request.headers.get("Range"), request.headers.get("If-Range"), entry
    )
    if status == 206:
        headers["Content-Range"] = content_range(start, end, entry)
    response = web.StreamResponse(status=status, headers=headers)
    response.content_type = "application/octet-stream"
    response.content_length = end - start
    if request.method != "HEAD":
        if request.match_info["collection"] == "chunks":
            node.traffic.of(tenant.name).asked(store_key, end, 1)
        await _send_span(node, request, response, entry, (start, end))
    return response


def wanted(asked: str | None, condition: str | None, entry: Entry) -> tuple[int, int, int]:
    """[start, end) and the status, of what `Range` and `If-Range` say. Refusal if there is no such
    range."""
    span = None
    if asked is not None and condition in (None, quoted(entry.etag)):
        span = parse_range(asked, entry.size_bytes)
    return (0, entry.size_bytes, 200) if span is None else (*span, 206)


def content_range(start: int, end: int, entry: Entry) -> str:
    return f"bytes {start}-{end - 1}/{entry.size_bytes}"


async def _send_span(
    node: Node, request: web.Request, response: web.StreamResponse, entry: Entry, span: Range
) -> None:
    with node.depot.store.expecting([Ask(entry.key, *span, entry.etag)]):
        await _send_expected(node, request, response, entry, span)


async def _send_expected(
    node: Node, request: web.Request, response: web.StreamResponse, entry: Entry, span: Range
) -> None:
    """The first part is read before anything is said: until then it can still be a miss."""
    start, end = span
    first_end = min(end, start + MAX_DATA_BYTES)
    data: Data | None = b""
    if start < end:
        reading = node.depot.store.get(entry.key, start, first_end, etag=entry.etag)
        found = await node.depot.wait(reading)
        data = found.data if found and len(found.data) == first_end - start else None
    if data is None:
        raise not_found()
    if first_end == end:
        response.headers["Kdn-Checksum"] = f"{xxhash.xxh3_64_intdigest(data):016x}"
    await response.prepare(request)
    flow = (request[TENANT].name, request[CLIENT])
    with Sender(node, request, flow, end - start) as sender:
        await sender.add(data)
        for start in range(first_end, end, MAX_DATA_BYTES):
            data = await sender.read(entry, start, min(end, start + MAX_DATA_BYTES))
            if data is None:
                raise ConnectionResetError("the object is gone, and its size was promised")
            await sender.add(data)
        await sender.flush()


async def put_object(request: web.Request) -> web.StreamResponse:
    node, tenant, collection = request.app[NODE], request[TENANT], request.match_info["collection"]
    key, store_key = _keys(request)
    told = _told_headers(request, collection)
    replacing = _replacing(request)
    hints = _hints(request, tenant, collection)
    settings = node.settings
    limit = settings.max_profile_bytes if collection == "profiles" else settings.max_chunk_bytes
    size_bytes = checked_length(request, limit)
    if tenant.settings.quota_bytes:  # before a byte of the body is read
        await node.depot.check_room(tenant, store_key, size_bytes, replacing)
    async with node.bodies.upload(request, tenant.name, limit) as data:
        node.stats.received_bytes.labels(tenant.name).inc(len(data))
        await node.depot.turns.wait(tenant.name)
        try:
            if len(data) > IN_THREAD_BYTES:
                etag, cuts = await asyncio.to_thread(_verify, collection, key, data, told)
            else:
                etag, cuts = _verify(collection, key, data, told)
        except KdnError:
            node.stats.refused_puts.inc()
            raise
        checksum, most = told[0], tenant.settings.max_levels
        if most and len(cuts) > most and len(data) > cuts[most - 1]:
            data = data[: cuts[most - 1]]
            checksum = xxhash.xxh3_64_intdigest(data)
        entry = Entry(store_key, etag, len(data), replace(hints, cuts=cuts))
        entry, created = await node.depot.put(tenant, entry, data, checksum, replacing)
    headers, told_back = {"ETag": quoted(entry.etag)}, _describe(node.depot, tenant, entry)
    if not node.depot.is_central(store_key):
        headers["Kdn-Central"] = "false"
    if replacing is not None and entry.etag != etag:
        message = "the object here is another one"
        raise Refusal(412, "precondition_failed", message, headers, {"object": told_back})
    status = 201 if created else 200
    return web.json_response(told_back, status=status, headers=headers, dumps=dumps)


async def delete_object(request: web.Request) -> web.StreamResponse:
    _, store_key = _keys(request)
    if not await request.app[NODE].depot.delete(store_key):
        raise not_found()
    return web.Response(status=204)


async def list_objects(request: web.Request) -> web.StreamResponse:
    node, tenant, collection = request.app[NODE], request[TENANT], request.match_info["collection"]
    limit = query_number(request, "limit", MAX_LISTED, 1, MAX_LISTED)
    prefix, after = (
        parse_hex(name, request.query[name]) if request.query.get(name) else b""
        for name in ("prefix", "after")
    )
    found = await node.depot.wait(
        _collect(node.depot, tenant, tenant.store_key(collection, prefix),
                 tenant.store_key(collection, after), limit + 1)
    )  # fmt: skip
    shown = [_describe(node.depot, tenant, entry) for entry in islice(found, limit)]
    more = shown[-1]["key"] if len(found) > limit else None
    return web.json_response({"objects": shown, "next": more}, dumps=dumps)


async def _collect(
    depot: Depot, tenant: Tenant, prefix: bytes, after: bytes, limit: int
) -> list[Entry]:
    found: list[Entry] = []
    # Stores in memory never wait themselves.
    work = Work(depot.turns, tenant.name, LIST_SLICE_S)
    async with aclosing(depot.store.list(prefix)) as entries:
        async for entry in entries:
            if work.is_over:
                await work.rest()
            if entry.key > after:
                found.append(entry)
                if len(found) == limit:
                    break
    return found


async def get_stats(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    held = await node.depot.held(tenant)
    shown = {
        "objects": held.objects,
        "size_bytes": held.size_bytes,
        "quota_bytes": tenant.settings.quota_bytes,
        "waiting_objects": (waiting := node.depot.waiting(tenant)).objects,
        "waiting_bytes": waiting.size_bytes,
    }
    return web.json_response(shown, dumps=dumps)


def _describe(depot: Depot, tenant: Tenant, entry: Entry) -> dict[str, Any]:
    parent = entry.hints.parent
    only_here = {} if depot.is_central(entry.key) else {"central": False}
    return {
        "key": tenant.public_key(entry.key).hex(),
        "etag": entry.etag.hex(),
        "size_bytes": entry.size_bytes,
        "parent": None if parent is None else tenant.public_key(parent).hex(),
        "saved_s": entry.hints.saved_s,
        **only_here,
    }


def _keys(request: web.Request) -> tuple[bytes, bytes]:
    """The key as the tenant says it, and as the store knows it."""
    collection = request.match_info["collection"]
    key = parse_hex("key", request.match_info["key"])
    if collection == "profiles" and len(key) != PROFILE_ID_BYTES:
        raise bad_request(f"a profile id has {PROFILE_ID_BYTES} bytes, found {len(key)}")
    return key, request[TENANT].store_key(collection, key)


def _told_headers(request: web.Request, collection: str) -> tuple[int, bytes | None]:
    """(checksum, etag) that the writer says its body has."""
    checksum = parse_hex("Kdn-Checksum", request.headers.get("Kdn-Checksum"), 8)
    if len(checksum) != 8:
        raise bad_request("Kdn-Checksum: expected 16 hex digits")
    etag = request.headers.get("Kdn-Etag")
    if etag is None and collection == "objects":
        raise bad_request("Kdn-Etag is needed")
    told = None if etag is None else parse_hex("Kdn-Etag", etag, MAX_ETAG_BYTES)
    return int.from_bytes(checksum, "big"), told


def _replacing(request: web.Request) -> bytes | None:
    """The etag of the object that this one is to take the place of."""
    told = request.headers.get("If-Match")
    if told is None:
        return None
    match = re.fullmatch(r'"([0-9a-f]+)"', told.strip())
    if match is None:
        raise bad_request("If-Match: expected one etag in double quotes")
    return parse_hex("If-Match", match[1], MAX_ETAG_BYTES)


def _hints(request: web.Request, tenant: Tenant, collection: str) -> Hints:
    parent = request.headers.get("Kdn-Parent")
    try:
        saved_s = float(request.headers.get("Kdn-Saved-Seconds", "0"))
    except ValueError:
        saved_s = math.nan
    if not 0 <= saved_s <= MAX_SAVED_S:
        raise bad_request(f"Kdn-Saved-Seconds: expected a number from 0 to {MAX_SAVED_S:g}")
    if parent is None:
        return Hints(None, saved_s)
    key = parse_hex("Kdn-Parent", parent, MAX_KEY_BYTES)
    return Hints(tenant.store_key(collection, key), saved_s)


def hint_headers(tenant: Tenant, entry: Entry) -> dict[str, str]:
    headers = {}
    if entry.hints.parent is not None:
        headers["Kdn-Parent"] = tenant.public_key(entry.hints.parent).hex()
    if entry.hints.saved_s:
        headers["Kdn-Saved-Seconds"] = repr(entry.hints.saved_s)
    return headers


def _verify(
    collection: str, key: bytes, data: bytes, told: tuple[int, bytes | None]
) -> tuple[bytes, tuple[int, ...]]:
    """The etag of a body that is what it claims to be, and where it may be cut."""
    checksum, etag = told
    found = xxhash.xxh3_64_intdigest(data)
    if found != checksum:
        raise ChecksumError(f"body: expected the checksum {checksum:016x}, found {found:016x}")
    if collection == "objects":
        assert etag is not None
        return etag, ()
    cuts: tuple[int, ...] = ()
    if collection == "chunks":
        stream = Bitstream.parse_stored(data)
        cuts = tuple(dict.fromkeys(stream.header.level_ends))  # a level may be empty
        if stream.info.chunk_key != key:
            raise MismatchError(
                f"expected the chunk {key.hex()}, found {stream.info.chunk_key.hex()}"
            )
        own = stream.stream_id
    else:
        own = blake2b(data, digest_size=PROFILE_ID_BYTES).digest()
        if own != key:
            raise MismatchError(f"expected the profile {key.hex()}, found {own.hex()}")
    if etag not in (None, own):
        raise MismatchError(f"expected the etag {own.hex()}, found {etag.hex() if etag else ''}")
    return own, cuts
