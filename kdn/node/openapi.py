"""The protocol for machines: an OpenAPI 3.0 document, told by the same limits the handlers use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from kdn.checked import NAME, NAME_PART
from kdn.depot.tenants import COLLECTIONS
from kdn.protocol import frames
from kdn.protocol.frames import MAX_ETAG_BYTES, MAX_KEY_BYTES
from kdn.protocol.limits import (
    MAX_HEAD_BYTES,
    MAX_LISTED,
    MAX_MANIFEST_KEYS,
    MAX_OFFSET,
    MAX_RATE,
    MAX_SAVED_S,
    MAX_SEEN,
    MAX_SPANS,
    MAX_VERSION,
)

Json = dict[str, Any]


def _hex(max_bytes: int, min_bytes: int = 1) -> Json:
    return {"type": "string", "pattern": f"^([0-9a-f]{{2}}){{{min_bytes},{max_bytes}}}$"}


def _object(properties: Json, required: list[str] | None = None, closed: bool = True) -> Json:
    required = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": not closed,
    }


def _list(items: Json, **limits: int) -> Json:
    return {"type": "array", "items": items, **limits}


KEY, ETAG, CHECKSUM = _hex(MAX_KEY_BYTES), _hex(MAX_ETAG_BYTES), _hex(8, 8)
TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
SECONDS: Json = {"type": "number", "minimum": 0}
OFFSET: Json = {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET}
COLLECTION: Json = {"type": "string", "enum": list(COLLECTIONS)}
NULLABLE_KEY: Json = {**KEY, "nullable": True}
LIMIT: Json = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}
BINARY: Json = {"type": "string", "format": "binary"}

VERSION: Json = {"version": COUNT, "etag": TEXT, "created_s": SECONDS, "size_bytes": COUNT}
CHUNKS = _list(KEY, maxItems=MAX_MANIFEST_KEYS)
MODEL = _object({"profile": KEY, "chunks": CHUNKS}, [], closed=False)
MANIFEST = _object({"models": {"type": "object", "additionalProperties": MODEL}}, [], closed=False)
# A member of `models` must be named in hex, which OpenAPI 3.0 cannot say.
SPAN = _object(
    {"key": KEY, "start": OFFSET, "end": {**OFFSET, "nullable": True},
     "etag": {**ETAG, "nullable": True}},
    ["key"],
)  # fmt: skip
ERROR = _object({"code": TEXT, "message": TEXT})


def _parameter(where: str, name: str, schema: Json, required: bool = False) -> Json:
    return {"name": name, "in": where, "required": required or where == "path", "schema": schema}


PATH_KEY = [_parameter("path", "collection", COLLECTION), _parameter("path", "key", KEY)]
PATH_NAME = [_parameter("path", "name", {"type": "string", "pattern": f"^{NAME.pattern}$"})]
PUT_HEADERS = [
    _parameter("header", "Kdn-Checksum", CHECKSUM, required=True),
    _parameter("header", "Kdn-Etag", ETAG),
    _parameter("header", "If-Match", {"type": "string", "pattern": f'^"{ETAG["pattern"][1:-1]}"$'}),
    _parameter("header", "Kdn-Parent", KEY),
    _parameter("header", "Kdn-Saved-Seconds", {**SECONDS, "maximum": MAX_SAVED_S}),
]
CONDITIONS = [_parameter("header", name, TEXT) for name in ("If-Match", "If-None-Match")]


def _content(schema: Json, kind: str = "application/json") -> Json:
    return {"content": {kind: {"schema": schema}}}


def _operation(
    summary: str,
    answers: Mapping[int, Json | None],
    errors: tuple[int, ...],
    parameters: list[Json] | None = None,
    body: Json | None = None,
    open_to_all: bool = False,
) -> Json:
    """`answers`: content of each status that is no plain error. Errors common to all are added."""
    common = (400, 405, 503) if open_to_all else (400, 401, 403, 405, 429, 503)
    responses = {
        str(status): {"description": summary, **(content or {})}
        for status, content in answers.items()
    }
    for status in sorted({*errors, *common, *((408, 411, 413, 417) if body else ())}):
        responses[str(status)] = {"description": "see docs/protocol.md", **_content(ERROR)}
    operation: Json = {"summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = parameters
    if body:
        operation["requestBody"] = {"required": True, **body}
    if open_to_all:
        operation["security"] = []
    return operation


def _objects() -> Json:
    told = {
        "key": KEY, "etag": ETAG, "size_bytes": COUNT, "parent": NULLABLE_KEY, "saved_s": SECONDS
    }  # fmt: skip
    about = _object({**told, "central": {"type": "boolean"}}, list(told))
    data = _content(BINARY, "application/octet-stream")
    reading = [*PATH_KEY, *(_parameter("header", h, TEXT) for h in ("Range", "If-Range"))]
    reading.append(_parameter("header", "If-None-Match", TEXT))
    pages = [_parameter("path", "collection", COLLECTION)]
    beginning = _hex(MAX_KEY_BYTES, 0)
    pages += [_parameter("query", name, beginning) for name in ("prefix", "after")]
    pages.append(_parameter("query", "limit", LIMIT))
    taken = _object({"code": TEXT, "message": TEXT, "object": about})
    put = {200: _content(about), 201: _content(about), 412: _content(taken)}
    page = _object({"objects": _list(about), "next": NULLABLE_KEY})
    return {
        "/v1/{collection}": {"get": _operation("List.", {200: _content(page)}, (404,), pages)},
        "/v1/{collection}/{key}": {
            "get": _operation("Read.", {200: data, 206: data, 304: None}, (404, 416), reading),
            "head": _operation("Look.", {200: None, 206: None, 304: None}, (404, 416), reading),
            "put": _operation("Store.", put, (404, 422, 507), [*PATH_KEY, *PUT_HEADERS], data),
            "delete": _operation("Delete.", {204: None}, (404,), PATH_KEY),
        },
    }


def _batches() -> Json:
    framed = _content(BINARY, frames.CONTENT_TYPE)
    head_bytes = {"type": "integer", "minimum": 0, "maximum": MAX_HEAD_BYTES, "nullable": True}
    keys = _list(KEY, minItems=1, maxItems=MAX_SPANS)
    spans = _list(SPAN, minItems=1, maxItems=MAX_SPANS)
    lookup = _object({"collection": COLLECTION, "keys": keys, "head_bytes": head_bytes}, ["keys"])
    read = _object({"collection": COLLECTION, "spans": spans}, ["spans"])
    rate = {"type": "number", "minimum": 1, "maximum": MAX_RATE, "nullable": True}
    client = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$", "nullable": True}
    asked = {"collection": COLLECTION, "keys": keys, "client": client, "rate_bytes_per_s": rate}
    estimate = _object(asked, ["keys"])
    part = {"size_bytes": COUNT, "seconds": {**SECONDS, "nullable": True}}
    told = _object(
        {"known": COUNT, **part, "rate_bytes_per_s": {**SECONDS, "nullable": True},
         "levels": _list(_object(part))}
    )  # fmt: skip
    return {
        "/v1/lookup": {
            "post": _operation("Look many up.", {200: framed}, (), None, _content(lookup))
        },
        "/v1/read": {"post": _operation("Read many.", {200: framed}, (), None, _content(read))},
        "/v1/estimate": {
            "post": _operation(
                "What loading would take.", {200: _content(told)}, (), None, _content(estimate)
            )
        },
    }


def _names() -> Json:
    made = _content(_object({"name": TEXT, "version": COUNT, "etag": TEXT}))
    keys = _list(KEY)
    gone = _object({"name": TEXT, "deleted": keys, "kept": keys, "missing": keys})
    page = _object({"names": _list(_object({"name": TEXT, **VERSION})),
                    "next": {**TEXT, "nullable": True}})  # fmt: skip
    part = {"type": "string", "pattern": f"^{NAME_PART.pattern}$"}
    pages = [_parameter("query", "prefix", part), _parameter("query", "after", part)]
    pages.append(_parameter("query", "limit", LIMIT))
    version = {"type": "integer", "minimum": 1, "maximum": MAX_VERSION}
    get = [*PATH_NAME, _parameter("query", "version", version)]
    get.append(_parameter("header", "If-None-Match", TEXT))
    flag = {"type": "string", "enum": ["true", "false"]}
    get += [_parameter("header", name, flag) for name in ("Kdn-Latest", "Kdn-Stale-Ok")]
    seen = {"type": "integer", "minimum": 0, "maximum": MAX_SEEN}
    get.append(_parameter("header", "Kdn-Seen", seen))
    chunks = _parameter("query", "chunks", {"type": "boolean"})
    history = _object({"versions": _list(_object(VERSION))})
    return {
        "/v1/names": {"get": _operation("List names.", {200: _content(page)}, (), pages)},
        "/v1/names/{name}": {
            "get": _operation("Manifest.", {200: _content(MANIFEST), 304: None}, (404,), get),
            "put": _operation(
                "Next version.", {200: made, 201: made}, (404, 412, 507), [*PATH_NAME, *CONDITIONS],
                _content(MANIFEST),
            ),
            "delete": _operation(
                "Forget.", {200: _content(gone)}, (404, 412), [*PATH_NAME, *CONDITIONS, chunks]
            ),
        },
        "/v1/names/{name}/history": {
            "get": _operation("Versions.", {200: _content(history)}, (404,), PATH_NAME)
        },
    }  # fmt: skip


def _service() -> Json:
    health = _content(_object({"status": TEXT}))
    counts = ("objects", "size_bytes", "quota_bytes", "waiting_objects", "waiting_bytes")
    stats = _content(_object(dict.fromkeys(counts, COUNT)))
    anything = _content({"type": "object"})
    metrics = _content(TEXT, "text/plain")
    return {
        "/v1/stats": {"get": _operation("This tenant's use.", {200: stats}, ())},
        "/v1/openapi.json": {
            "get": _operation("This document.", {200: anything}, (), open_to_all=True)
        },
        "/healthz": {"get": _operation("Health.", {200: health}, (), open_to_all=True)},
        "/metrics": {"get": _operation("Prometheus.", {200: metrics}, ())},
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
        "paths": {**_objects(), **_batches(), **_names(), **_service()},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }
