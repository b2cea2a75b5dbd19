"""Handlers of `/v1/names`: what HTTP says of names, and which changes a request allows."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from kdn.checked import NAME_EXPECTED, NAME_PART, is_name
from kdn.depot.names import Must
from kdn.node.answers import bad_request, dumps, not_found
from kdn.node.bodies import checked_length
from kdn.node.ranges import names_etag, quoted
from kdn.node.sending import Sender
from kdn.node.state import CLIENT, NODE, TENANT, query_flag, query_number
from kdn.protocol.limits import MAX_LISTED, MAX_MANIFEST_BYTES, MAX_VERSION


async def get_name(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    version = query_number(request, "version", 0, 1, MAX_VERSION)
    names = node.depot.names
    about = await node.depot.wait(names.find(tenant.name, _name(request), version or None))
    if about is None:
        raise not_found()
    headers = {"ETag": quoted(about.etag), "Kdn-Version": str(about.version)}
    if names_etag(request.headers.get("If-None-Match", ""), about.etag):
        return web.Response(status=304, headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_type = "application/json"
    response.content_length = about.size_bytes
    async with node.answers.share(tenant.name, about.size_bytes):
        manifest = await node.depot.wait(names.manifest(tenant.name, about))
        if manifest is None:  # deleted or, with 100 newer versions, forgotten meanwhile
            raise not_found()
        await response.prepare(request)
        with Sender(node, request, (tenant.name, request[CLIENT])) as sender:
            await sender.add(manifest)
            await sender.flush()
    return response


async def put_name(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    name, must = _name(request), _condition(request)
    await node.depot.check_quota(tenant, checked_length(request, MAX_MANIFEST_BYTES))
    async with node.bodies.question(request, tenant.name, MAX_MANIFEST_BYTES) as manifest:
        made = await node.depot.put_manifest(tenant, name, manifest, must)
    body = {"name": made.name, "version": made.version, "etag": made.etag}
    status = 201 if made.version == 1 else 200
    return web.json_response(body, status=status, headers={"ETag": quoted(made.etag)}, dumps=dumps)


async def delete_name(request: web.Request) -> web.StreamResponse:
    depot, tenant, name = request.app[NODE].depot, request[TENANT], _name(request)
    chunks = query_flag(request, "chunks")
    report = await depot.delete_manifest(tenant, name, _condition(request), chunks)
    if report is None:
        raise not_found()
    return web.json_response({"name": name, **report}, dumps=dumps)


async def get_history(request: web.Request) -> web.StreamResponse:
    depot, tenant = request.app[NODE].depot, request[TENANT]
    versions = await depot.wait(depot.names.history(tenant.name, _name(request)))
    if not versions:
        raise not_found()
    shown = [{k: v for k, v in asdict(item).items() if k != "name"} for item in versions]
    return web.json_response({"versions": shown}, dumps=dumps)


async def list_names(request: web.Request) -> web.StreamResponse:
    limit = query_number(request, "limit", MAX_LISTED, 1, MAX_LISTED)
    prefix, after = (request.query.get(key, "") for key in ("prefix", "after"))
    if not NAME_PART.fullmatch(prefix) or not NAME_PART.fullmatch(after):
        raise bad_request("prefix and after: expected at most 128 characters of a name")
    depot, tenant = request.app[NODE].depot, request[TENANT]
    found = await depot.wait(depot.names.page(tenant.name, prefix, after, limit + 1))
    more = found[limit - 1].name if len(found) > limit else None
    shown = [asdict(item) for item in found[:limit]]
    return web.json_response({"names": shown, "next": more}, dumps=dumps)


def _name(request: web.Request) -> str:
    name = request.match_info["name"]
    if not is_name(name):
        raise bad_request(NAME_EXPECTED)
    return name


def _condition(request: web.Request) -> Must:
    match = request.headers.get("If-Match")
    none_match = request.headers.get("If-None-Match")

    def holds(newest: str | None) -> bool:
        if match is not None and (newest is None or not names_etag(match, newest)):
            return False
        return none_match is None or newest is None or not names_etag(none_match, newest)

    return holds
