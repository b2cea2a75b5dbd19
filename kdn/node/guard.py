"""What every request passes around its handler: bounds, tenant, rate, errors, counting."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from aiohttp import web

from kdn.depot.tenants import Tenant
from kdn.errors import KdnError, QuotaError
from kdn.node.answers import RETRY_AFTER, Refusal, answer, refusal_of, refusal_of_http
from kdn.node.connection import Connection
from kdn.node.egress import BusyError
from kdn.node.records import record
from kdn.node.state import CLIENT, NODE, TENANT, Node, client_of
from kdn.node.tenants import Right
from kdn.tracing import REQUEST_HEADER, TRACE_HEADER, Span, checked_id, received

log = logging.getLogger(__name__)

RIGHTS = web.AppKey("rights", dict[web.AbstractRoute, Right | None])
"""What each route needs, as `app.py` tells; None: nothing, not even a token."""
NO_ROUTE = "none"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    node = request.app[NODE]
    if node.behind_workers:  # which count
        return await _answer(node, request, handler)
    begin_s = time.perf_counter()
    node.num_requests += 1
    status = 0  # 0: cut
    try:
        response = await _answer(node, request, handler)
        status = response.status
        return response
    finally:
        node.num_requests -= 1
        _record(node, request, status, time.perf_counter() - begin_s)


async def _answer(node: Node, request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        # What is no route needs a token, too: strangers do not learn which those are.
        right = request.app[RIGHTS].get(request.match_info.route, Right.READ)
        if right is None:
            return await handler(request)
        with _admitted(node, request, right):
            if not node.behind_workers:
                await node.tenants.rates[request[TENANT].name].take()
            with _traced(request) as span:
                response = await _handle(node, request, handler)
                span.set(status=response.status)
                return response
    except ConnectionError:
        raise
    except Exception as error:
        return _refuse(request, _meaning(request, error))


async def _handle(node: Node, request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
        if isinstance(response, web.Response) and not node.behind_workers:
            await _pass_egress(node, request, response)
        return response
    except ConnectionError:
        raise
    except Exception as error:
        return _refuse(request, _meaning(request, error))


def _meaning(request: web.Request, error: Exception) -> Refusal:
    """What an error tells the client; what it tells the operator is logged."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, web.HTTPException):
        return refusal_of_http(error)
    if isinstance(error, BusyError):
        return Refusal(503, "overloaded", str(error), RETRY_AFTER)
    if isinstance(error, KdnError):
        meaning = refusal_of(error)
        if meaning.status >= 500 and not isinstance(error, QuotaError):
            log.error("store error", extra={"error": str(error), "path": request.path})
        return meaning
    log.error("fault", extra={"path": request.path}, exc_info=error)
    return Refusal(500, "internal", "a fault of this node; it was logged")


def _traced(request: web.Request) -> AbstractContextManager[Span]:
    """What is done for a client that has shown its token: strangers leave no spans."""
    headers = request.headers
    return received(
        f"{request.method} {_route(request)}", headers.get(REQUEST_HEADER),
        headers.get(TRACE_HEADER), tenant=request[TENANT].name,
    )  # fmt: skip


@contextmanager
def _admitted(node: Node, request: web.Request, needed: Right) -> Iterator[None]:
    """Whose request this is, whether they may ask that, and a place for it among the others."""
    if node.stopping:
        raise Refusal(503, "shutting_down", "this node is going away", RETRY_AFTER)
    tenant, right = node.tenants.authenticate(request.headers.get("Authorization"))
    request[TENANT] = tenant
    request[CLIENT] = client_of(request)
    if right < needed:
        has, needs = right.name.lower(), needed.name.lower()
        raise Refusal(403, "forbidden", f"this token may {has}; this takes one that may {needs}")
    if node.behind_workers:
        yield
        return
    _claim_connection(request, tenant)
    if not node.requests.take(tenant.name, 1):
        raise Refusal(503, "overloaded", "too many requests are in progress", RETRY_AFTER)
    try:
        yield
    finally:
        node.requests.give_back(tenant.name, 1)


def _claim_connection(request: web.Request, tenant: Tenant) -> None:
    connection = request.protocol
    assert isinstance(connection, Connection)
    if not connection.claim(tenant):
        raise Refusal(
            503, "overloaded", "too many connections are open",
            {**RETRY_AFTER, "Connection": "close"},
        )  # fmt: skip


async def _pass_egress(node: Node, request: web.Request, response: web.Response) -> None:
    """Small bodies are written by aiohttp, but count and wait as all others do."""
    left = len(response.body) if isinstance(response.body, bytes) else 0
    while left > 0:
        num_bytes = min(left, node.frame_bytes)
        turn = node.egress.turn(request[TENANT].name, request[CLIENT], num_bytes)
        async with turn:
            left -= num_bytes
        node.stats.sent(request[TENANT].name, num_bytes, turn.waited_s)


def _refuse(request: web.Request, refusal: Refusal) -> web.StreamResponse:
    """The error answer; if a response has begun already, only cutting it is honest."""
    tenant = request[TENANT].name if TENANT in request else None
    request.app[NODE].traffic.refused(tenant, refusal.code)
    if request.writer.output_size > 0:
        raise ConnectionResetError(str(refusal))
    response = answer(refusal)
    unread = request.body_exists and not request.content.is_eof()
    if unread or refusal.headers.get("Connection") == "close":
        # The rest of the body is not wanted; reading it just to answer would invite more of it.
        response.force_close()
    return response


def _record(node: Node, request: web.Request, status: int, seconds: float) -> None:
    route = _route(request)
    labels = (request.method if route != NO_ROUTE else NO_ROUTE, route, status)
    tenant = request[TENANT].name if TENANT in request else None
    called = checked_id(request.headers.get(REQUEST_HEADER)) if tenant else ""
    record(node, labels, seconds, request.path, tenant, request.get(CLIENT), called)


def _route(request: web.Request) -> str:
    """Of a few: what is no route has one name."""
    resource = request.match_info.route.resource
    return NO_ROUTE if resource is None else resource.canonical
