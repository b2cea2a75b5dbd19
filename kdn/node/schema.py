"""Words that the OpenAPI document is written in: schemas, parameters, operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdn.depot.tenants import COLLECTIONS
from kdn.protocol.frames import MAX_ETAG_BYTES, MAX_KEY_BYTES
from kdn.protocol.limits import MAX_LISTED, MAX_OFFSET

Json = dict[str, Any]


def hex_of(max_bytes: int, min_bytes: int = 1) -> Json:
    return {"type": "string", "pattern": f"^([0-9a-f]{{2}}){{{min_bytes},{max_bytes}}}$"}


def object_of(properties: Json, required: list[str] | None = None, closed: bool = True) -> Json:
    required = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": not closed,
    }


def list_of(items: Json, **limits: int) -> Json:
    return {"type": "array", "items": items, **limits}


KEY, ETAG, CHECKSUM = hex_of(MAX_KEY_BYTES), hex_of(MAX_ETAG_BYTES), hex_of(8, 8)
TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
SECONDS: Json = {"type": "number", "minimum": 0}
OFFSET: Json = {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET}
COLLECTION: Json = {"type": "string", "enum": list(COLLECTIONS)}
NULLABLE_KEY: Json = {**KEY, "nullable": True}
LIMIT: Json = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}
BINARY: Json = {"type": "string", "format": "binary"}

VERSION: Json = {"version": COUNT, "etag": TEXT, "created_s": SECONDS, "size_bytes": COUNT}
ERROR = object_of({"code": TEXT, "message": TEXT})


def parameter(where: str, name: str, schema: Json, required: bool = False) -> Json:
    return {"name": name, "in": where, "required": required or where == "path", "schema": schema}


def content_of(schema: Json, kind: str = "application/json") -> Json:
    return {"content": {kind: {"schema": schema}}}


def operation(
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
        responses[str(status)] = {"description": "see docs/protocol.md", **content_of(ERROR)}
    told: Json = {"summary": summary, "responses": responses}
    if parameters:
        told["parameters"] = parameters
    if body:
        told["requestBody"] = {"required": True, **body}
    if open_to_all:
        told["security"] = []
    return told
