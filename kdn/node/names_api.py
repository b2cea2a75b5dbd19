"""Handlers of `/v1/names`: what HTTP says of names, and which changes a request allows.

Every answer tells how far the store of names is (`Kdn-Sequence`). A client that sends the highest
it has seen (`Kdn-Seen`) is never answered with something older, by whichever node.
"""

from __future__ import annotations

import re
from dataclasses import asdict

from aiohttp import web

from kdn.checked import NAME_EXPECTED, NAME_PART, is_name
from kdn.depot.names import Asked, Must
from kdn.errors import ConditionError
from kdn.node.answers import Refusal, bad_request, dumps, not_found, refusal_of
from kdn.node.bodies import checked_length
from kdn.node.changes_api import follow
from kdn.node.ranges import names_etag, quoted
from kdn.node.sending import Sender
from kdn.node.state import CLIENT, NODE, TENANT, query_flag, query_number
from kdn.protocol.limits import MAX_LISTED, MAX_MANIFEST_BYTES, MAX_SEEN, MAX_VERSION

CHANGES = "changes"
"""A name like others, but not with the query `after`."""
READS = 3
"""Of a name that changes while it is read."""


async def get_name(request: web.Request) -> web.StreamResponse:
    node, tenant, name = request.app[NODE], request[TENANT], _name(request)
    if name == CHANGES and "after" in request.query:
        return await follow(request)
    version = query_number(request, "version", 0, 1, MAX_VERSION)
    asked = _asked(request)
    for _ in range(READS):
        told = await node.depot.wait(
            node.depot.names.read(tenant.name, name, version or None, asked)
        )
        headers = {"Kdn-Sequence": str(told.sequence)}
        if told.stale_s is not None:
            headers["Kdn-Stale"] = f"{told.stale_s:.3f}"
        about = told.about
        if about is None:
            break
        headers |= {"ETag": quoted(about.etag), "Kdn-Version": str(about.version)}
        if names_etag(request.headers.get("If-None-Match", ""), about.etag):
            return web.Response(status=304, headers=headers)
        async with node.answers.share(tenant.name, about.size_bytes):
            manifest = await node.depot.wait(node.depot.names.manifest(tenant.name, about))
            if manifest is not None:
                return await _send_manifest(request, manifest, headers)
    raise not_found(headers)  # also: deleted or, with 100 newer versions, forgotten meanwhile


async def _send_manifest(
    request: web.Request, manifest: bytes, headers: dict[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    response.content_type = "application/json"
    response.content_length = len(manifest)
    await response.prepare(request)
    flow = (request[TENANT].name, request[CLIENT])
    with Sender(request.app[NODE], request, flow, len(manifest)) as sender:
        await sender.add(manifest)
        await sender.flush()
    return response


async def put_name(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    name, must = _name(request), _condition(request)
    await node.depot.check_quota(tenant, checked_length(request, MAX_MANIFEST_BYTES))
    async with node.bodies.question(request, tenant.name, MAX_MANIFEST_BYTES) as manifest:
        try:
            made = await node.depot.put_manifest(tenant, name, manifest, must)
        except ConditionError as error:
            raise await _refused(request, error) from error
    body = {"name": made.name, "version": made.version, "etag": made.etag}
    status = 201 if made.version == 1 else 200
    headers = {"ETag": quoted(made.etag), **await _sequence(request)}
    return web.json_response(body, status=status, headers=headers, dumps=dumps)


async def delete_name(request: web.Request) -> web.StreamResponse:
    node, tenant, name = request.app[NODE], request[TENANT], _name(request)
    chunks = query_flag(request, "chunks")
    try:
        report = await node.depot.delete_manifest(tenant, name, _condition(request), chunks)
    except ConditionError as error:
        raise await _refused(request, error) from error
    headers = await _sequence(request)
    if report is None:
        raise not_found(headers)
    return web.json_response({"name": name, **report}, headers=headers, dumps=dumps)


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
    node, tenant = request.app[NODE], request[TENANT]
    depot = node.depot
    found = await depot.wait(depot.names.page(tenant.name, prefix, after, limit + 1))
    more = found[limit - 1].name if len(found) > limit else None
    shown = [asdict(item) for item in found[:limit]]
    headers = await _sequence(request)
    return web.json_response({"names": shown, "next": more}, headers=headers, dumps=dumps)


def _name(request: web.Request) -> str:
    name = request.match_info["name"]
    if not is_name(name):
        raise bad_request(NAME_EXPECTED)
    return name


def _asked(request: web.Request) -> Asked:
    """How new an answer must be."""
    latest, stale_ok = (_flag(request, header) for header in ("Kdn-Latest", "Kdn-Stale-Ok"))
    seen = request.headers.get("Kdn-Seen", "0")
    if not re.fullmatch(r"\d{1,18}", seen, re.ASCII):
        raise bad_request(f"Kdn-Seen: expected a number from 0 to {MAX_SEEN}")
    return Asked(latest, stale_ok, int(seen))


def _flag(request: web.Request, header: str) -> bool:
    text = request.headers.get(header, "false")
    if text not in ("true", "false"):
        raise bad_request(f"{header}: expected true or false")
    return text == "true"


async def _sequence(request: web.Request) -> dict[str, str]:
    """Read after what it is told with: nothing of that is later."""
    depot, tenant = request.app[NODE].depot, request[TENANT]
    return {"Kdn-Sequence": str(await depot.wait(depot.names.last_change(tenant.name)))}


async def _refused(request: web.Request, error: ConditionError) -> Refusal:
    meaning = refusal_of(error)
    meaning.headers |= await _sequence(request)
    return meaning


def _condition(request: web.Request) -> Must:
    match = request.headers.get("If-Match")
    none_match = request.headers.get("If-None-Match")

    def holds(newest: str | None) -> bool:
        if match is not None and (newest is None or not names_etag(match, newest)):
            return False
        return none_match is None or newest is None or not names_etag(none_match, newest)

    return holds
