"""What a node answers (`docs/protocol.md`), read with suspicion: named errors, nothing assumed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from kdn.errors import (
    CentreAwayError,
    ChecksumError,
    FormatError,
    KdnError,
    MismatchError,
    NoSpaceError,
    NotAllowedError,
    RefusedError,
    StoreError,
    UnavailableError,
)
from kdn.protocol.frames import OK, Frame
from kdn.store.base import Entry, Hints, Span, clip

T = TypeVar("T")

_ERRORS: dict[str, type[KdnError]] = {
    "checksum_mismatch": ChecksumError,
    "format_error": FormatError,
    "mismatch": MismatchError,
    "centre_unreachable": CentreAwayError,
    "quota_exceeded": NoSpaceError,
    "no_space": NoSpaceError,
    "too_large": NoSpaceError,
    "bad_request": RefusedError,
    "unauthorized": NotAllowedError,
    "forbidden": NotAllowedError,
    "not_found": RefusedError,
    "method_not_allowed": RefusedError,
}


@dataclass(frozen=True)
class Reply:
    """The whole answer to a request."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"expected JSON, found {self.body[:200]!r}") from error

    def error(self, url: str) -> KdnError:
        """What a refusal of the node at `url` means here, in its own words."""
        try:
            code, message = member(self.json, "code", str), member(self.json, "message", str)
        except StoreError:
            code, message = "unknown", repr(self.body[:200])
        kind = _ERRORS.get(code, UnavailableError if self._is_trouble(code) else StoreError)
        return kind(f"{url}: {self.status} {code}: {message}")

    def _is_trouble(self, code: str) -> bool:
        """The node's own, or whoever answers is no node: not the fault of what was asked."""
        return self.status >= 500 or code in ("timeout", "unknown")


def entry_of(frame: Frame) -> Entry:
    hints = Hints(frame.parent or None, frame.saved_s)
    return Entry(frame.key, frame.etag, frame.object_bytes, hints)


def join(
    frames: Sequence[tuple[Frame, memoryview]], key: bytes, start: int, end: int | None
) -> Span | None:
    """The span that its frames make up; None if the object is not (or no longer) there."""
    if not frames or not frames[-1][0].last:
        raise FormatError("expected frames up to a last one")
    first = frames[0][0]
    begin, stop = clip(start, end, first.object_bytes)
    position, parts = begin, []
    for frame, data in frames:
        if (frame.number, frame.key) != (0, key):
            raise FormatError(f"expected frames of span 0, {key.hex()}, found {frame.number}")
        if frame.status != OK:
            return None
        if (frame.etag, frame.start) != (first.etag, position):
            raise FormatError(f"expected bytes from {position} on, found {frame.start}")
        position += len(data)
        parts.append(data)
    if position != stop:
        raise FormatError(f"expected bytes up to {stop}, found {position}")
    return Span(entry_of(first), begin, parts[0] if len(parts) == 1 else b"".join(parts))


def told_entry(told: Any) -> Entry:
    """An object as a list, or the answer to a put, tells of it. Older nodes tell no hints."""
    if not isinstance(told, dict):
        raise StoreError(f"expected an object, found {str(told)[:200]}")
    parent = told.get("parent")
    key, etag = (unhex(member(told, name, str)) for name in ("key", "etag"))
    size_bytes = member(told, "size_bytes", int)
    saved_s = member({"saved_s": 0.0, **told}, "saved_s", float)
    if size_bytes < 0 or not 0 <= saved_s < math.inf:  # NaN, too
        raise StoreError(f"expected a size and seconds saved, found {size_bytes}, {saved_s}")
    return Entry(key, etag, size_bytes, Hints(None if parent is None else unhex(parent), saved_s))


def member(value: Any, name: str, kind: type[T]) -> T:
    """A member of a JSON object, of that type (an integer is a float, too, and no truth value)."""
    found = value.get(name) if isinstance(value, dict) else None
    with suppress(OverflowError):
        if kind is float and type(found) is int:
            return kind(found)  # type: ignore[call-arg]
    if type(found) is kind:
        return found
    raise StoreError(f"expected {name!r} of type {kind.__name__}, found {str(value)[:200]}")


def unhex(text: Any) -> bytes:
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError) as error:
        raise StoreError(f"expected hex digits, found {str(text)[:200]}") from error
