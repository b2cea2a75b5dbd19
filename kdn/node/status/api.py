"""Handlers of `/v1/status` and what is below it. All take the right `operate`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from aiohttp import web

from kdn.checked import NAME_PART
from kdn.depot.tenants import Tenant
from kdn.node.answers import bad_request, dumps, not_found
from kdn.node.state import NODE, TENANT, Node, query_number
from kdn.node.status.details import name_details
from kdn.node.status.live import Status
from kdn.node.status.traffic import Json
from kdn.protocol.limits import MAX_LISTED

PAGE = 100
NO_STORE = {"Cache-Control": "no-store"}


def _status(node: Node) -> Status:
    assert node.status is not None, "a worker relays these requests"
    return node.status


async def get_status(request: web.Request) -> web.StreamResponse:
    return _answer(request, await _status(request.app[NODE]).snapshot())


async def get_events(request: web.Request) -> web.StreamResponse:
    """A snapshot every second, as server-sent events, until one side has enough of it."""
    node, tenant = request.app[NODE], request[TENANT].name
    status = _status(node)
    with status.listener(), node.waiting():
        headers = {"Content-Type": "text/event-stream", **NO_STORE, "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        await _write(node, tenant, response, await status.snapshot())
        number = status.number
        while (made := await status.next(number)) is not None:
            number, told = made
            await _write(node, tenant, response, told)
    return response


async def _write(node: Node, tenant: str, response: web.StreamResponse, told: Json) -> None:
    """A reader that does not take it is cut."""
    data = f"event: status\ndata: {dumps(told)}\n\n".encode()
    try:
        async with asyncio.timeout(node.settings.write_timeout_s):
            await response.write(data)
    except TimeoutError:
        node.stats.cut_readers.inc()
        raise ConnectionResetError("a listener takes nothing") from None
    node.stats.sent(tenant, len(data), 0.0)
    node.traffic.of(tenant).status_bytes += len(data)


async def list_tenants(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    limit = query_number(request, "limit", PAGE, 1, MAX_LISTED)
    after = _part(request, "after")
    some = sorted((one for one in node.tenants if one.name > after), key=lambda one: one.name)
    more = some[limit - 1].name if len(some) > limit else None
    return _answer(request, {"tenants": await _status(node).tenants(some[:limit]), "next": more})


async def get_tenant(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    return _answer(
        request, await _status(node).tenant(_tenant(request, request.match_info["tenant"]))
    )


async def list_tenants_names(request: web.Request) -> web.StreamResponse:
    """Of one tenant."""
    node = request.app[NODE]
    tenant = _tenant(request, request.query.get("tenant", next(iter(node.tenants)).name))
    limit = query_number(request, "limit", PAGE, 1, MAX_LISTED)
    prefix, after = _part(request, "prefix"), _part(request, "after")
    found = await node.depot.wait(node.depot.names.page(tenant.name, prefix, after, limit + 1))
    more = found[limit - 1].name if len(found) > limit else None
    shown = [asdict(one) for one in found[:limit]]
    return _answer(request, {"tenant": tenant.name, "names": shown, "next": more})


async def get_names_status(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], _tenant(request, request.match_info["tenant"])
    found = await name_details(node, request[TENANT], tenant, request.match_info["name"])
    if found is None:
        raise not_found()
    return _answer(request, found)


def _tenant(request: web.Request, name: str) -> Tenant:
    for tenant in request.app[NODE].tenants:
        if tenant.name == name:
            return tenant
    raise not_found()


def _part(request: web.Request, name: str) -> str:
    text = request.query.get(name, "")
    if not NAME_PART.fullmatch(text):
        raise bad_request(f"{name}: expected at most 128 characters of a name")
    return text


def _answer(request: web.Request, told: Json) -> web.StreamResponse:
    body = dumps(told).encode()
    request.app[NODE].traffic.of(request[TENANT].name).status_bytes += len(body)
    return web.Response(body=body, content_type="application/json", headers=NO_STORE)
