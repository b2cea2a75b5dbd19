"""Handlers of `/v1/names`: conditions, manifests, and deletion with what only this name used."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict

from aiohttp import web

from kdn.errors import StoreError
from kdn.node.answers import Refusal, bad_request, dumps, not_found
from kdn.node.bodies import checked_length, parse_object
from kdn.node.names import ConditionError, Must, TooManyError, Totals, Version
from kdn.node.ranges import names_etag, quoted
from kdn.node.sending import Sender
from kdn.node.state import CLIENT, NODE, TENANT, Node, parse_hex, query_flag, query_number
from kdn.node.tenants import Tenant
from kdn.node.turns import Work
from kdn.protocol.limits import (
    MAX_LISTED,
    MAX_MANIFEST_BYTES,
    MAX_MANIFEST_KEYS,
    MAX_VERSION,
)

DELETES_AT_ONCE = 32
SLICE_S = 0.0005
IN_THREAD_BYTES = 256 * 2**10
"""Manifests beyond this are parsed in a thread: others may run while their keys are read."""
_PART = re.compile(r"[A-Za-z0-9._-]{0,128}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


async def get_name(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    version = query_number(request, "version", 0, 1, MAX_VERSION)
    about = await node.wait(node.names.find(tenant.name, _name(request), version or None))
    if about is None:
        raise not_found()
    headers = {"ETag": quoted(about.etag), "Kdn-Version": str(about.version)}
    if names_etag(request.headers.get("If-None-Match", ""), about.etag):
        return web.Response(status=304, headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_type = "application/json"
    response.content_length = about.size_bytes
    async with node.answers.share(tenant.name, about.size_bytes):
        manifest = await node.wait(node.names.manifest(tenant.name, about))
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
    await node.wait(_check_quota(node, tenant, checked_length(request, MAX_MANIFEST_BYTES)))
    async with node.bodies.question(request, tenant.name, MAX_MANIFEST_BYTES) as manifest:
        made = await node.wait(put_manifest(node, tenant, name, manifest, must))
    body = {"name": made.name, "version": made.version, "etag": made.etag}
    status = 201 if made.version == 1 else 200
    return web.json_response(body, status=status, headers={"ETag": quoted(made.etag)}, dumps=dumps)


async def put_manifest(
    node: Node, tenant: Tenant, name: str, manifest: bytes, must: Must
) -> Version:
    """Make a name's next version, and hold what it uses. Refusals: 400, 412 if `must` does not
    hold, 507."""
    settings = tenant.settings
    most = Totals(settings.max_names, settings.max_names_bytes, settings.max_named_chunks)
    async with tenant.changes:  # so that of each tenant one manifest at a time is parsed
        if len(manifest) > IN_THREAD_BYTES:
            async with node.parsing:
                chunks = await asyncio.to_thread(chunks_of, manifest)
        else:
            chunks = chunks_of(manifest)
        await _check_quota(node, tenant, len(manifest))
        try:
            made = await node.names.put(tenant.name, name, manifest, chunks, must, most)
        except ConditionError as error:
            raise _failed(error) from None
        except TooManyError as error:
            raise Refusal(507, "quota_exceeded", str(error)) from None
        await node.retainer.retain(tenant, name, chunks, _work(node, tenant))
    return made


def _work(node: Node, tenant: Tenant) -> Work:
    return Work(node.turns, tenant.name, SLICE_S)


async def _check_quota(node: Node, tenant: Tenant, size_bytes: int) -> None:
    if tenant.settings.quota_bytes:
        tenant.quota.check(size_bytes, await node.held_bytes(tenant))


async def delete_name(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    name, must = _name(request), _condition(request)
    report = await node.wait(
        delete_manifest(node, tenant, name, must, query_flag(request, "chunks"))
    )
    return web.json_response({"name": name, **report}, dumps=dumps)


async def delete_manifest(
    node: Node, tenant: Tenant, name: str, must: Must, chunks: bool
) -> dict[str, list[str]]:
    """Forget a name, and the chunks that only it used if `chunks`. Refusals: 404, 412."""
    report: dict[str, list[str]] = {"deleted": [], "kept": [], "missing": []}
    async with tenant.changes:
        newest = await node.names.find(tenant.name, name)
        if newest is None:
            raise not_found()
        if not must(newest.etag):
            raise _failed(ConditionError(newest.etag))
        if chunks:
            report = await _delete_chunks(node, tenant, name)
        # Only now: after a crash the name still knows what is to be deleted.
        await node.names.delete(tenant.name, name, must)
        await node.retainer.retain(tenant, name, (), _work(node, tenant))
    return report


async def get_history(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    versions = await node.wait(node.names.history(request[TENANT].name, _name(request)))
    if not versions:
        raise not_found()
    shown = [{k: v for k, v in asdict(item).items() if k != "name"} for item in versions]
    return web.json_response({"versions": shown}, dumps=dumps)


async def list_names(request: web.Request) -> web.StreamResponse:
    limit = query_number(request, "limit", MAX_LISTED, 1, MAX_LISTED)
    prefix, after = (request.query.get(key, "") for key in ("prefix", "after"))
    if not _PART.fullmatch(prefix) or not _PART.fullmatch(after):
        raise bad_request("prefix and after: expected at most 128 characters of a name")
    node = request.app[NODE]
    found = await node.wait(node.names.page(request[TENANT].name, prefix, after, limit + 1))
    more = found[limit - 1].name if len(found) > limit else None
    shown = [asdict(item) for item in found[:limit]]
    return web.json_response({"names": shown, "next": more}, dumps=dumps)


def chunks_of(manifest: bytes) -> set[bytes]:
    """The chunk keys a manifest names, the one thing that is read of it. Refusal: 400."""
    models = parse_object(manifest).get("models", {})
    if not isinstance(models, dict):
        raise bad_request("models: expected an object")
    chunks: list[bytes] = []
    for fingerprint, model in models.items():
        parse_hex("models: a fingerprint", fingerprint)
        if not isinstance(model, dict) or not isinstance(model.get("chunks", []), list):
            raise bad_request(f"models.{fingerprint}: expected an object with a list of chunks")
        if "profile" in model:
            parse_hex(f"models.{fingerprint}.profile", model["profile"])
        keys = model.get("chunks", [])
        if len(chunks) + len(keys) > MAX_MANIFEST_KEYS:
            raise bad_request(f"expected at most {MAX_MANIFEST_KEYS} chunks in a manifest")
        chunks += (parse_hex("a chunk key", key) for key in keys)
    return set(chunks)


async def _delete_chunks(node: Node, tenant: Tenant, name: str) -> dict[str, list[str]]:
    """Delete what only this name uses, and look again whether it is gone."""
    own, shared = await node.names.chunks_of(tenant.name, name)
    keys = [tenant.store_key("chunks", chunk) for chunk in own]
    entries = await node.store.lookup(keys)
    deleted = [chunk.hex() for chunk, entry in zip(own, entries, strict=True) if entry]
    missing = [chunk.hex() for chunk, entry in zip(own, entries, strict=True) if not entry]
    for first in range(0, len(keys), DELETES_AT_ONCE):
        # Even those that were not found: a damaged object may still lie there.
        batch = keys[first : first + DELETES_AT_ONCE]
        await asyncio.gather(*(node.store.delete(key) for key in batch))
    for entry in filter(None, entries):
        node.checksums.forget(entry.key, entry.etag)
    left = await node.store.lookup(keys)
    if any(left):
        raise StoreError(f"{sum(map(bool, left))} chunks are still there after deletion")
    return {"deleted": deleted, "kept": [chunk.hex() for chunk in shared], "missing": missing}


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _name(request: web.Request) -> str:
    name = request.match_info["name"]
    if not is_name(name):
        raise bad_request("expected a name of 1 to 128 letters, digits, '.', '_', '-'")
    return name


def _condition(request: web.Request) -> Must:
    match = request.headers.get("If-Match")
    none_match = request.headers.get("If-None-Match")

    def holds(newest: str | None) -> bool:
        if match is not None and (newest is None or not names_etag(match, newest)):
            return False
        return none_match is None or newest is None or not names_etag(none_match, newest)

    return holds


def _failed(error: ConditionError) -> Refusal:
    headers = {} if error.newest is None else {"ETag": quoted(error.newest)}
    return Refusal(412, "precondition_failed", "the newest version is another one", headers)
