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
    times_back = node.feed.times_back
    position = await _position(node, tenant.name, after)
    with node.feed.follower(tenant.name), node.waiting():
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await _follow(node, request, response, (after, position), arrived_s, times_back)
    return response


async def _position(node: Node, tenant: str, after: int) -> int:
    """Where to go on in the changes of all tenants. `after` must be a change of this one: what is
    answered to other numbers would tell how many changes others made."""
    names, wait = node.depot.names, node.depot.wait
    now = await wait(names.sequence())
    try:
        found = await wait(names.changes(max(after, 1) - 1, 1))
    except ForgottenError:
        found = []
    last = await wait(names.last_change(tenant))
    if after == last:
        return now
    if not found or (found[0].sequence, found[0].tenant) != (after, tenant):
        message = "changes after that are no longer known: list all names"
        raise Refusal(410, "forgotten", message, {"Kdn-Sequence": str(last)})
    return after


async def _follow(
    node: Node,
    request: web.Request,
    response: web.StreamResponse,
    begin: tuple[int, int],
    arrived_s: float,
    times_back: int,
) -> None:
    """From the tenant's last change that is known, and the position in those of all. A heartbeat
    comes with a change and every second, not when others change something. It ends if the store
    went back: what was told may not have happened, and numbers may come again."""
    tenant, feed, told_s, beat_s = request[TENANT].name, node.feed, arrived_s, 0.0
    told, position = begin
    while await feed.newer(told_s, position, HEARTBEAT_S if beat_s else 0.0, lambda: node.stopping):
        if feed.times_back != times_back:
            raise ConnectionResetError("the store of names has lost changes")
        sequence, told_s = feed.sequence, feed.as_of_s
        before = told
        while position < sequence:
            changes = await node.depot.wait(node.depot.names.changes(position, PAGE))
            position = changes[-1].sequence if changes else sequence
            await _write(node, request, response, _lines(tenant, changes))
            told = max([told, *(one.sequence for one in changes if one.tenant == tenant)])
        if told != before or told_s - beat_s >= HEARTBEAT_S:
            beat: dict[str, object] = {"sequence": told, "age_s": round(told_s - arrived_s, 6)}
            await _write(node, request, response, [beat])
            beat_s = told_s


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
