"""`Range`, `If-Range`, ETags: the part of HTTP that is read here and nowhere else."""

from __future__ import annotations

import re

from kdn.node.answers import Refusal

_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)
_ETAG = re.compile(r'(?:W/)?"([^"]*)"')


def parse_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """[start, end) of the one interval asked for; None if there is nothing to heed: another unit,
    several intervals, or no sense in it (RFC 9110 then has the whole be sent)."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        suffix = int(last)
        if suffix == 0 or size_bytes == 0:
            raise _unsatisfiable(size_bytes)
        return max(0, size_bytes - suffix), size_bytes
    start = int(first)
    if last and int(last) < start:
        return None
    if start >= size_bytes:
        raise _unsatisfiable(size_bytes)
    return start, min(int(last) + 1, size_bytes) if last else size_bytes


def _unsatisfiable(size_bytes: int) -> Refusal:
    return Refusal(
        416,
        "range_not_satisfiable",
        f"the object has {size_bytes} bytes",
        {"Content-Range": f"bytes */{size_bytes}"},
    )


def quoted(etag: bytes | str) -> str:
    return f'"{etag.hex() if isinstance(etag, bytes) else etag}"'


def names_etag(header: str, etag: bytes | str) -> bool:
    """Whether `If-Match` or `If-None-Match` names this etag (of something that exists)."""
    if header.strip() == "*":
        return True
    wanted = etag.hex() if isinstance(etag, bytes) else etag
    return wanted in _ETAG.findall(header)
