"""JSON and hex from outside, read strictly: MalformedError says what was expected."""

from __future__ import annotations

import json
import re
from typing import Any

from kdn.errors import MalformedError
from kdn.protocol.frames import MAX_KEY_BYTES
from kdn.protocol.limits import MAX_CONTAINERS

_HEX = re.compile(r"(?:[0-9a-f]{2})+")


def parse_hex(what: str, text: object, max_bytes: int = MAX_KEY_BYTES) -> bytes:
    if not isinstance(text, str) or len(text) > 2 * max_bytes or not _HEX.fullmatch(text):
        raise MalformedError(f"{what}: expected 1 to {max_bytes} bytes in lower-case hex")
    return bytes.fromhex(text)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object: no NaN, no repeated members, not too deep, not too many parts."""
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise MalformedError(f"expected at most {MAX_CONTAINERS} lists and objects in the body")
    try:
        value = json.loads(data.decode(), parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the body is not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise MalformedError("expected a JSON object")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a member comes twice")
    return value
