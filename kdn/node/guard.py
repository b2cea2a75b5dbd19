"""What every request passes around its handler: bounds, tenant, rate, errors, counting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from kdn.depot.tenants import Tenant
from kdn.errors import KdnError, QuotaError
from kdn.node.answers import RETRY_AFTER, Refusal, answer, refusal_of, refusal_of_http
from kdn.node.connection import Connection
from kdn.node.egress import BusyError
from kdn.node.records import record
from kdn.node.state import CLIENT, NODE, TENANT, Node, client_of
from kdn.node.tenants import Right

log = logging.getLogger(__name__)

RIGHTS = web.AppKey("rights", dict[web.AbstractRoute, Right | None])
"""What each route needs, as `app.py` tells; None: nothing, not even a token."""
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
            response = await handler(request)
            if isinstance(response, web.Response) and not node.behind_workers:
                await _pass_egress(node, request, response)
            return response
    except Refusal as refusal:
        return _refuse(request, refusal)
    except web.HTTPException as error:
        return _refuse(request, refusal_of_http(error))
    except BusyError as error:
        return _refuse(request, Refusal(503, "overloaded", str(error), RETRY_AFTER))
    except KdnError as error:
        meaning = refusal_of(error)
        if meaning.status >= 500 and not isinstance(error, QuotaError):
            log.error("store error", extra={"error": str(error), "path": request.path})
        return _refuse(request, meaning)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("fault", extra={"path": request.path})
        return _refuse(request, Refusal(500, "internal", "a fault of this node; it was logged"))


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
    resource = request.match_info.route.resource
    route = "none" if resource is None else resource.canonical
    labels = (request.method if resource else "none", route, status)
    tenant = request[TENANT].name if TENANT in request else None
    record(node, labels, seconds, request.path, tenant, request.get(CLIENT))
