"""The protocol for machines: an OpenAPI 3.0 document, told by the same limits the handlers use."""

from __future__ import annotations

from functools import cache

from kdn.checked import NAME, NAME_PART
from kdn.node.schema import (
    BINARY,
    CHECKSUM,
    COLLECTION,
    COUNT,
    ETAG,
    KEY,
    LIMIT,
    NULLABLE_KEY,
    OFFSET,
    SECONDS,
    TEXT,
    VERSION,
    Json,
    content_of,
    hex_of,
    list_of,
    object_of,
    operation,
    parameter,
)
from kdn.node.status.document import status_paths
from kdn.protocol import frames
from kdn.protocol.frames import MAX_KEY_BYTES
from kdn.protocol.limits import (
    MAX_HEAD_BYTES,
    MAX_MANIFEST_KEYS,
    MAX_RATE,
    MAX_SAVED_S,
    MAX_SEEN,
    MAX_SPANS,
    MAX_VERSION,
)

CHUNKS = list_of(KEY, maxItems=MAX_MANIFEST_KEYS)
MODEL = object_of({"profile": KEY, "chunks": CHUNKS}, [], closed=False)
MANIFEST = object_of(
    {"models": {"type": "object", "additionalProperties": MODEL}}, [], closed=False
)
# A member of `models` must be named in hex, which OpenAPI 3.0 cannot say.
SPAN = object_of(
    {"key": KEY, "start": OFFSET, "end": {**OFFSET, "nullable": True},
     "etag": {**ETAG, "nullable": True}},
    ["key"],
)  # fmt: skip
PATH_KEY = [parameter("path", "collection", COLLECTION), parameter("path", "key", KEY)]
PATH_NAME = [parameter("path", "name", {"type": "string", "pattern": f"^{NAME.pattern}$"})]
PUT_HEADERS = [
    parameter("header", "Kdn-Checksum", CHECKSUM, required=True),
    parameter("header", "Kdn-Etag", ETAG),
    parameter("header", "If-Match", {"type": "string", "pattern": f'^"{ETAG["pattern"][1:-1]}"$'}),
    parameter("header", "Kdn-Parent", KEY),
    parameter("header", "Kdn-Saved-Seconds", {**SECONDS, "maximum": MAX_SAVED_S}),
]
CONDITIONS = [parameter("header", name, TEXT) for name in ("If-Match", "If-None-Match")]


def _objects() -> Json:
    told = {
        "key": KEY, "etag": ETAG, "size_bytes": COUNT, "parent": NULLABLE_KEY, "saved_s": SECONDS
    }  # fmt: skip
    about = object_of({**told, "central": {"type": "boolean"}}, list(told))
    data = content_of(BINARY, "application/octet-stream")
    reading = [*PATH_KEY, *(parameter("header", h, TEXT) for h in ("Range", "If-Range"))]
    reading.append(parameter("header", "If-None-Match", TEXT))
    pages = [parameter("path", "collection", COLLECTION)]
    beginning = hex_of(MAX_KEY_BYTES, 0)
    pages += [parameter("query", name, beginning) for name in ("prefix", "after")]
    pages.append(parameter("query", "limit", LIMIT))
    taken = object_of({"code": TEXT, "message": TEXT, "object": about})
    put = {200: content_of(about), 201: content_of(about), 412: content_of(taken)}
    page = object_of({"objects": list_of(about), "next": NULLABLE_KEY})
    return {
        "/v1/{collection}": {"get": operation("List.", {200: content_of(page)}, (404,), pages)},
        "/v1/{collection}/{key}": {
            "get": operation("Read.", {200: data, 206: data, 304: None}, (404, 416), reading),
            "head": operation("Look.", {200: None, 206: None, 304: None}, (404, 416), reading),
            "put": operation("Store.", put, (404, 422, 507), [*PATH_KEY, *PUT_HEADERS], data),
            "delete": operation("Delete.", {204: None}, (404,), PATH_KEY),
        },
    }


def _batches() -> Json:
    framed = content_of(BINARY, frames.CONTENT_TYPE)
    head_bytes = {"type": "integer", "minimum": 0, "maximum": MAX_HEAD_BYTES, "nullable": True}
    keys = list_of(KEY, minItems=1, maxItems=MAX_SPANS)
    spans = list_of(SPAN, minItems=1, maxItems=MAX_SPANS)
    lookup = object_of({"collection": COLLECTION, "keys": keys, "head_bytes": head_bytes}, ["keys"])
    read = object_of({"collection": COLLECTION, "spans": spans}, ["spans"])
    rate = {"type": "number", "minimum": 1, "maximum": MAX_RATE, "nullable": True}
    client = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$", "nullable": True}
    asked = {"collection": COLLECTION, "keys": keys, "client": client, "rate_bytes_per_s": rate}
    estimate = object_of(asked, ["keys"])
    part = {"size_bytes": COUNT, "seconds": {**SECONDS, "nullable": True}}
    told = object_of(
        {"known": COUNT, **part, "rate_bytes_per_s": {**SECONDS, "nullable": True},
         "levels": list_of(object_of(part))}
    )  # fmt: skip
    return {
        "/v1/lookup": {
            "post": operation("Look many up.", {200: framed}, (), None, content_of(lookup))
        },
        "/v1/read": {"post": operation("Read many.", {200: framed}, (), None, content_of(read))},
        "/v1/estimate": {
            "post": operation(
                "What loading would take.", {200: content_of(told)}, (), None, content_of(estimate)
            )
        },
    }


def _names() -> Json:
    made = content_of(object_of({"name": TEXT, "version": COUNT, "etag": TEXT}))
    keys = list_of(KEY)
    gone = object_of({"name": TEXT, "deleted": keys, "kept": keys, "missing": keys})
    page = object_of({"names": list_of(object_of({"name": TEXT, **VERSION})),
                    "next": {**TEXT, "nullable": True}})  # fmt: skip
    part = {"type": "string", "pattern": f"^{NAME_PART.pattern}$"}
    pages = [parameter("query", "prefix", part), parameter("query", "after", part)]
    pages.append(parameter("query", "limit", LIMIT))
    version = {"type": "integer", "minimum": 1, "maximum": MAX_VERSION}
    get = [*PATH_NAME, parameter("query", "version", version)]
    get.append(parameter("header", "If-None-Match", TEXT))
    flag = {"type": "string", "enum": ["true", "false"]}
    get += [parameter("header", name, flag) for name in ("Kdn-Latest", "Kdn-Stale-Ok")]
    seen = {"type": "integer", "minimum": 0, "maximum": MAX_SEEN}
    get.append(parameter("header", "Kdn-Seen", seen))
    chunks = parameter("query", "chunks", {"type": "boolean"})
    history = object_of({"versions": list_of(object_of(VERSION))})
    return {
        "/v1/names": {"get": operation("List names.", {200: content_of(page)}, (), pages)},
        "/v1/names/{name}": {
            "get": operation("Manifest.", {200: content_of(MANIFEST), 304: None}, (404,), get),
            "put": operation(
                "Next version.", {200: made, 201: made}, (404, 412, 507), [*PATH_NAME, *CONDITIONS],
                content_of(MANIFEST),
            ),
            "delete": operation(
                "Forget.", {200: content_of(gone)}, (404, 412), [*PATH_NAME, *CONDITIONS, chunks]
            ),
        },
        "/v1/names/{name}/history": {
            "get": operation("Versions.", {200: content_of(history)}, (404,), PATH_NAME)
        },
    }  # fmt: skip


def _service() -> Json:
    health = content_of(object_of({"status": TEXT}))
    counts = ("objects", "size_bytes", "quota_bytes", "waiting_objects", "waiting_bytes")
    stats = content_of(object_of(dict.fromkeys(counts, COUNT)))
    anything = content_of({"type": "object"})
    metrics = content_of(TEXT, "text/plain")
    return {
        "/v1/stats": {"get": operation("This tenant's use.", {200: stats}, ())},
        "/v1/openapi.json": {
            "get": operation("This document.", {200: anything}, (), open_to_all=True)
        },
        "/healthz": {"get": operation("Health.", {200: health}, (), open_to_all=True)},
        "/metrics": {"get": operation("Prometheus.", {200: metrics}, ())},
    }


@cache
def document() -> Json:
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "kdn node",
            "version": "1",
            "description": "docs/protocol.md is the authority; frames are described there.",
        },
        "paths": {**_objects(), **_batches(), **_names(), **_service(), **status_paths()},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }
