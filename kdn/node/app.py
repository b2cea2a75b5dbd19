"""The routes of a node, and nothing else."""

from __future__ import annotations

from aiohttp import web

from kdn.node import batch, names_api, objects, service
from kdn.node.bodies import expect_later
from kdn.node.guard import Handler, guard
from kdn.node.state import NODE, Node

_COLLECTION = "/v1/{collection:chunks|profiles|objects}"

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", _COLLECTION, objects.list_objects),
    ("GET", _COLLECTION + "/{key}", objects.get_object),
    ("HEAD", _COLLECTION + "/{key}", objects.get_object),
    ("PUT", _COLLECTION + "/{key}", objects.put_object),
    ("DELETE", _COLLECTION + "/{key}", objects.delete_object),
    ("POST", "/v1/lookup", batch.lookup),
    ("POST", "/v1/read", batch.read),
    ("GET", "/v1/names", names_api.list_names),
    ("GET", "/v1/names/{name}", names_api.get_name),
    ("PUT", "/v1/names/{name}", names_api.put_name),
    ("DELETE", "/v1/names/{name}", names_api.delete_name),
    ("GET", "/v1/names/{name}/history", names_api.get_history),
    ("GET", "/v1/stats", objects.get_stats),
    ("GET", "/v1/openapi.json", service.get_openapi),
    ("GET", "/healthz", service.get_health),
    ("GET", "/metrics", service.get_metrics),
)


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    """Without telling which versions of what are at work."""
    response.headers["Server"] = "kdn"


def make_app(node: Node) -> web.Application:
    app = web.Application(middlewares=[guard])
    app[NODE] = node
    app.on_response_prepare.append(_sign)
    for method, path, handler in ROUTES:
        app.router.add_route(method, path, handler, expect_handler=expect_later)
    return app
