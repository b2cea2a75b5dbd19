"""The short way of a plain GET: a small range of an object that is at hand, answered at once.

Nearly all that such a request costs on the ordinary way is the machinery for requests that wait:
a task, a parser's objects, a request, a response, timers. Here nothing waits. A request that is
exactly what it usually is gets the same bytes as on the ordinary way, after the same checks, in the
call that brought it. Whatever is unusual in any respect is left alone: False, nothing counted, and
the ordinary way answers, with whatever error is due.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, NamedTuple

from aiohttp.helpers import rfc822_formatted_time

from kdn.codec.header import PROFILE_ID_BYTES
from kdn.depot.tenants import Tenant
from kdn.node.answers import Refusal
from kdn.node.objects import content_range, hint_headers, wanted
from kdn.node.ranges import quoted
from kdn.node.records import record
from kdn.node.sending import FIRST_FRAME_BYTES
from kdn.node.state import Node, client_named
from kdn.store.base import Entry, Span
from kdn.tracing import REQUEST_HEADER, TRACE_HEADER, checked_id, is_on, received

if TYPE_CHECKING:
    from kdn.node.connection import Connection

MAX_HEAD_BYTES = 4096
ROUTE = "/v1/{collection}/{key}"
_HEAD = re.compile(
    rb"GET (/v1/(chunks|profiles|objects)/((?:[0-9a-f]{2}){1,48})) HTTP/1\.1\r\n"
    rb"((?:[A-Za-z-]+:[\x20-\x7e]*\r\n)+)\r\n"
)
_REQUEST, _TRACE = REQUEST_HEADER.lower(), TRACE_HEADER.lower()
_KNOWN = frozenset(
    {"host", "user-agent", "accept", "accept-encoding", "accept-language", "cache-control"}
    | {"connection", "range", "if-range", "authorization", "kdn-client"}
    | {_REQUEST, _TRACE}
)
"""Header fields of which those of the first line change no answer. Each may come once."""
_STATUS = {200: "200 OK", 206: "206 Partial Content"}


class Plain(NamedTuple):
    """A request that may take the short way."""

    path: str
    collection: str
    key: bytes
    headers: dict[str, str]
    """By name in lower case."""


def recognise(data: bytes) -> Plain | None:
    """What is asked, if `data` is exactly one head, and every part of it is known."""
    if len(data) > MAX_HEAD_BYTES or not data.startswith(b"GET /v1/"):
        return None
    match = _HEAD.fullmatch(data)
    if match is None:
        return None
    path, collection, key, lines = match.groups()
    headers: dict[str, str] = {}
    for line in lines.decode("ascii").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name = name.lower()
        if name not in _KNOWN or name in headers:
            return None
        headers[name] = value.strip()
    if "host" not in headers or headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    if collection == b"profiles" and len(key) != 2 * PROFILE_ID_BYTES:
        return None
    return Plain(path.decode(), collection.decode(), bytes.fromhex(key.decode()), headers)


def answer(node: Node, connection: Connection, data: bytes) -> bool:
    """Whether this was a plain GET and has been answered."""
    asked = recognise(data)
    if asked is None or node.stopping or connection.writing_paused:
        return False
    begin_s = time.perf_counter()
    try:
        # Every right includes that to read.
        tenant, _ = node.tenants.authenticate(asked.headers.get("authorization"))
        client = client_named(asked.headers.get("kdn-client"), connection.remote)
        if not connection.claim(tenant) or not node.requests.take(tenant.name, 1):
            return False
        try:
            status = _send(node, connection, asked, tenant, client)
        finally:
            node.requests.give_back(tenant.name, 1)
    except Refusal:
        return False
    if status:
        seconds = time.perf_counter() - begin_s
        called = checked_id(asked.headers.get(_REQUEST))
        record(node, ("GET", ROUTE, status), seconds, asked.path, tenant.name, client, called)
        if is_on():
            _trace(asked, tenant, status, seconds)
    return bool(status)


def _trace(asked: Plain, tenant: Tenant, status: int, seconds: float) -> None:
    """The span that the ordinary way would have left, of what is already done."""
    headers = asked.headers
    with received(
        f"GET {ROUTE}", headers.get(_REQUEST), headers.get(_TRACE), seconds,
        tenant=tenant.name, status=status,
    ):  # fmt: skip
        pass


def _send(node: Node, connection: Connection, asked: Plain, tenant: Tenant, client: str) -> int:
    """The status that was answered; 0: nothing was. Refusal if that is the answer."""
    store = node.depot.store
    entry = store.peek(tenant.store_key(asked.collection, asked.key))
    if entry is None or not node.depot.is_central(entry.key):
        return 0
    start, end, status = wanted(asked.headers.get("range"), asked.headers.get("if-range"), entry)
    num_bytes = end - start
    if not 0 < num_bytes <= min(FIRST_FRAME_BYTES, node.frame_bytes) or not node.egress.is_free:
        return 0
    span = store.get_now(entry.key, start, end, entry.etag)
    if span is None or not node.tenants.rates[tenant.name].take_now():
        return 0
    node.egress.pass_by(tenant.name, client, num_bytes)
    connection.send(_head(node, tenant, span, status), span.data)
    node.stats.hits.inc()
    traffic = node.traffic.of(tenant.name)
    traffic.read(1)
    if asked.collection == "chunks":
        traffic.asked(entry.key, end, 1)
    node.stats.sent(tenant.name, num_bytes, 0.0)
    return status


def _head(node: Node, tenant: Tenant, span: Span, status: int) -> bytes:
    """As aiohttp writes it on the ordinary way."""
    entry, start, end = span.entry, span.start, span.start + len(span.data)
    checksum = node.checksums.of(entry.key, entry.etag, start, span.data)
    where = f"Content-Range: {content_range(start, end, entry)}\r\n" if status == 206 else ""
    head = (
        f"HTTP/1.1 {_STATUS[status]}\r\nETag: {quoted(entry.etag)}\r\nAccept-Ranges: bytes\r\n"
        f"{_hints(tenant, entry)}{where}"
        f"Content-Type: application/octet-stream\r\nContent-Length: {end - start}\r\n"
        f"Kdn-Checksum: {checksum:016x}\r\n"
        f"Date: {rfc822_formatted_time()}\r\nServer: kdn\r\n\r\n"
    )
    return head.encode("ascii")


def _hints(tenant: Tenant, entry: Entry) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in hint_headers(tenant, entry).items())
