"""The routes of a node, and nothing else."""

from __future__ import annotations

from aiohttp import web

from kdn.node import batch, estimate, names_api, objects, service
from kdn.node.bodies import expect_later
from kdn.node.guard import RIGHTS, Handler, guard
from kdn.node.state import NODE, Node
from kdn.node.status import api, page
from kdn.node.tenants import Right

_COLLECTION = "/v1/{collection:chunks|profiles|objects}"

ROUTES: tuple[tuple[str, str, Handler, Right | None], ...] = (
    ("GET", _COLLECTION, objects.list_objects, Right.READ),
    ("GET", _COLLECTION + "/{key}", objects.get_object, Right.READ),
    ("HEAD", _COLLECTION + "/{key}", objects.get_object, Right.READ),
    ("PUT", _COLLECTION + "/{key}", objects.put_object, Right.PUBLISH),
    ("DELETE", _COLLECTION + "/{key}", objects.delete_object, Right.PUBLISH),
    ("POST", "/v1/lookup", batch.lookup, Right.READ),
    ("POST", "/v1/read", batch.read, Right.READ),
    ("POST", "/v1/estimate", estimate.estimate, Right.READ),
    ("GET", "/v1/names", names_api.list_names, Right.READ),
    ("GET", "/v1/names/{name}", names_api.get_name, Right.READ),
    ("PUT", "/v1/names/{name}", names_api.put_name, Right.PUBLISH),
    ("DELETE", "/v1/names/{name}", names_api.delete_name, Right.PUBLISH),
    ("GET", "/v1/names/{name}/history", names_api.get_history, Right.READ),
    ("GET", "/v1/stats", objects.get_stats, Right.READ),
    ("GET", "/v1/status", api.get_status, Right.OPERATE),
    ("GET", "/v1/status/events", api.get_events, Right.OPERATE),
    ("GET", "/v1/status/tenants", api.list_tenants, Right.OPERATE),
    ("GET", "/v1/status/tenants/{tenant}", api.get_tenant, Right.OPERATE),
    ("GET", "/v1/status/names", api.list_tenants_names, Right.OPERATE),
    ("GET", "/v1/status/names/{tenant}/{name}", api.get_names_status, Right.OPERATE),
    ("GET", "/", page.get_dashboard, None),
    ("GET", "/v1/openapi.json", service.get_openapi, None),
    ("GET", "/healthz", service.get_health, None),
    ("GET", "/metrics", service.get_metrics, Right.OPERATE),
)
"""With the right that each needs; None: anybody may ask, without a token."""


_WORKERS = {
    objects.get_object, batch.lookup, batch.read, estimate.estimate, service.get_openapi,
    service.get_health, page.get_dashboard,
}  # fmt: skip
"""Handlers that a worker has itself; all other requests are its owner's. (Estimates: the owner
sends nothing to clients, so it has not seen how fast they are.)"""


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    """Without telling which versions of what are at work."""
    response.headers["Server"] = "kdn"


def make_app(node: Node) -> web.Application:
    app = web.Application(middlewares=[guard])
    app[NODE] = node
    app.on_response_prepare.append(_sign)
    app[RIGHTS] = {}
    for method, path, handler, right in ROUTES:
        if node.relay is not None and handler not in _WORKERS:
            handler = node.relay
        route = app.router.add_route(method, path, handler, expect_handler=expect_later)
        app[RIGHTS][route] = right
    return app
