"""Handlers for whoever runs a node: health, metrics, and the machine-readable protocol."""

from __future__ import annotations

from functools import cache

from aiohttp import web

from kdn.node.answers import RETRY_AFTER, Refusal, dumps
from kdn.node.openapi import document
from kdn.node.state import NODE
from kdn.node.stats import CONTENT_TYPE, about_node, summed


async def get_health(request: web.Request) -> web.StreamResponse:
    if request.app[NODE].stopping:
        raise Refusal(503, "shutting_down", "this node is going away", RETRY_AFTER)
    return web.json_response({"status": "ok"}, dumps=dumps)


async def get_metrics(request: web.Request) -> web.StreamResponse:
    """Tenants' names are in it, so it takes a right of its own."""
    node = request.app[NODE]
    more = [*about_node(node.settings.data), *node.depot.metrics()]
    body = node.stats.expose(await node.depot.wait(node.depot.store.stats()), more)
    if node.others is not None:
        body = summed([body, *await node.others()])
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def get_openapi(request: web.Request) -> web.StreamResponse:
    return web.Response(body=_described(), content_type="application/json")


@cache
def _described() -> bytes:
    """Made once: anybody may ask for it."""
    return dumps(document()).encode()
