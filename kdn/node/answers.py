"""What goes wrong in a request, as a status, a stable code and a sentence (`docs/protocol.md`).

Handlers raise `Refusal`; errors of depots and formats become one here; whatever else escapes is a
fault of ours, logged, and answered without a word about it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from aiohttp import web

from kdn.errors import (
    CentreAwayError,
    ChecksumError,
    ConditionError,
    FormatError,
    KdnError,
    MalformedError,
    MismatchError,
    NoSpaceError,
    QuotaError,
    StoreError,
)

RETRY_AFTER = {"Retry-After": "1"}

_CODES = {
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    411: "length_required",
    413: "too_large",
    417: "bad_request",
}


_MEANINGS: tuple[tuple[type[KdnError], int, str], ...] = (
    (MalformedError, 400, "bad_request"),
    (QuotaError, 507, "quota_exceeded"),
    (NoSpaceError, 507, "no_space"),
    (ChecksumError, 422, "checksum_mismatch"),
    (MismatchError, 422, "mismatch"),
    (FormatError, 422, "format_error"),
    (CentreAwayError, 503, "centre_unreachable"),
)
"""Errors that are told as they are; of those that fit, the first counts."""


class Refusal(Exception):
    """Ends a request with an error answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, object] | None = None,
    ):
        """`members`: of the answer, besides code and message."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})
        self.members = dict(members or {})


def bad_request(message: str) -> Refusal:
    return Refusal(400, "bad_request", message)


def not_found(headers: Mapping[str, str] | None = None) -> Refusal:
    """The same words for what is not there and what is another's."""
    return Refusal(404, "not_found", "there is no such thing here", headers)


def refusal_of(error: KdnError) -> Refusal:
    """What an error of a depot, a store or a format means to the client."""
    if isinstance(error, ConditionError):
        headers = {} if error.newest is None else {"ETag": f'"{error.newest}"'}
        return Refusal(412, "precondition_failed", str(error), headers)
    for kind, status, code in _MEANINGS:
        if isinstance(error, kind):
            return Refusal(status, code, str(error))
    if isinstance(error, StoreError):
        return Refusal(503, "store_error", "the store failed; try again", RETRY_AFTER)
    return Refusal(503, "store_error", "the node cannot do this now", RETRY_AFTER)


def refusal_of_http(error: web.HTTPException) -> Refusal:
    """What the HTTP layer itself refuses: no route, wrong method, a strange expectation."""
    kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    return Refusal(error.status, _CODES.get(error.status, "bad_request"), error.reason, kept)


def answer(refusal: Refusal) -> web.Response:
    body = {"code": refusal.code, "message": str(refusal), **refusal.members}
    return web.json_response(body, status=refusal.status, headers=refusal.headers, dumps=dumps)


def dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
