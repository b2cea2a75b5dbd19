"""The change feed of names: one long answer of lines for each region that follows this node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

from aiohttp import web

from kdn.depot.names import Change
from kdn.errors import ForgottenError
from kdn.node.answers import Refusal
from kdn.node.state import NODE, TENANT, Node, query_number
from kdn.protocol.limits import MAX_OFFSET

HEARTBEAT_S = 1.0
"""Each tells that nothing else has changed, and as of when."""
PAGE = 1000


async def follow(request: web.Request) -> web.StreamResponse:
    """Every change of the tenant's names after a sequence, and a heartbeat every second."""
    node, tenant = request.app[NODE], request[TENANT]
    after = query_number(request, "after", 0, 0, MAX_OFFSET)
    arrived_s = asyncio.get_running_loop().time()
    names = node.depot.names
    try:
        await node.depot.wait(names.changes(after, 1))
    except ForgottenError as error:
        headers = {"Kdn-Sequence": str(await node.depot.wait(names.sequence()))}
        raise Refusal(410, "forgotten", str(error), headers) from error
    with node.feed.follower(tenant.name):
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await _follow(node, request, response, after, arrived_s)
    return response


async def _follow(
    node: Node, request: web.Request, response: web.StreamResponse, after: int, arrived_s: float
) -> None:
    tenant, feed, told_s = request[TENANT].name, node.feed, arrived_s
    patience_s = 0.0  # at first: whoever begins to follow knows nothing
    while await feed.newer(told_s, after, patience_s, lambda: node.stopping):
        patience_s = HEARTBEAT_S
        sequence, told_s = feed.sequence, feed.as_of_s
        while after < sequence:
            changes = await node.depot.wait(node.depot.names.changes(after, PAGE))
            after = changes[-1].sequence if changes else sequence
            await _write(node, request, response, _lines(tenant, changes))
        beat: dict[str, object] = {"sequence": after, "age_s": round(told_s - arrived_s, 6)}
        await _write(node, request, response, [beat])


def _lines(tenant: str, changes: Iterable[Change]) -> list[dict[str, object]]:
    return [
        {"sequence": one.sequence, "name": one.name, "version": one.version, "etag": one.etag}
        for one in changes
        if one.tenant == tenant
    ]


async def _write(
    node: Node, request: web.Request, response: web.StreamResponse, lines: list[dict[str, object]]
) -> None:
    """A reader that does not take them is cut."""
    if not lines:
        return
    data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    try:
        async with asyncio.timeout(node.settings.write_timeout_s):
            await response.write(data)
    except TimeoutError:
        node.stats.cut_readers.inc()
        raise ConnectionResetError("a follower takes nothing") from None
    node.stats.sent(request[TENANT].name, len(data), 0.0)
