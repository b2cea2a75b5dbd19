"""Handler of `/v1/estimate`: what is known of a prompt here, and how long loading it would take.

A router asks this to compare loading with computing, and one place with another. So it is cheap:
no more is looked up than the longest known beginning, headers alone are read, and nothing is sent.
"""

from __future__ import annotations

import math
from typing import Any

from aiohttp import web

from kdn.codec.header import Header
from kdn.depot.turns import Work
from kdn.errors import FormatError, UnsupportedError
from kdn.node.answers import bad_request, dumps
from kdn.node.batch import LOOKED_UP, asked_keys, look_up, parse_body
from kdn.node.state import CLIENT, NODE, TENANT, Node, checked_client
from kdn.protocol.limits import MAX_QUESTION_BYTES, MAX_RATE
from kdn.store.base import Entry

HEADER_BYTES = 16 << 10
"""Of each chunk that are read for its levels; headers of most are much shorter."""
SLICE_S = 0.0005
MEMBERS = {"collection", "keys", "client", "rate_bytes_per_s"}


async def estimate(request: web.Request) -> web.StreamResponse:
    node, tenant = request.app[NODE], request[TENANT]
    async with node.bodies.question(request, tenant.name, MAX_QUESTION_BYTES) as data:
        work = Work(node.depot.turns, tenant.name, SLICE_S)
        body = await parse_body(work, data)
        collection, keys = await asked_keys(work, body, MEMBERS)
        rate = _rate(body)
        client = request[CLIENT] if body.get("client") is None else checked_client(body["client"])
        if rate is None:
            rate = _seen_rate(node, tenant.name, client)
        head_bytes = HEADER_BYTES if collection == "chunks" else 0
        found = Found()
        async with node.answers.share(tenant.name, min(len(keys), LOOKED_UP) * (head_bytes + 1024)):
            for at in range(0, len(keys), LOOKED_UP):
                some = [tenant.store_key(collection, key) for key in keys[at : at + LOOKED_UP]]
                entries = await look_up(node, tenant, work, some, head_bytes)
                if not await found.add(work, entries):
                    break
    return web.json_response(found.told(rate), dumps=dumps)


class Found:
    """The first chunks of a prompt."""

    def __init__(self) -> None:
        self.number = 0
        self.size_bytes = 0
        self.level_ends: list[tuple[int, ...]] | None = []
        """Of each; None: not all of them tell."""

    async def add(self, work: Work, entries: list[Entry | None]) -> bool:
        """The next ones; False if one of them is not here."""
        for entry in entries:
            if entry is None:
                return False
            self.number += 1
            self.size_bytes += entry.size_bytes
            if self.level_ends is not None:
                ends = level_ends(entry)
                if ends is None:
                    self.level_ends = None
                else:
                    self.level_ends.append(ends)
            if work.is_over:
                await work.rest()
        return True

    def told(self, rate: float | None) -> dict[str, Any]:
        def part(size_bytes: int) -> dict[str, Any]:
            seconds = None if rate is None else size_bytes / rate
            return {"size_bytes": size_bytes, "seconds": seconds}

        sizes = sum_levels(self.level_ends) if self.level_ends else []
        return {
            "known": self.number,
            **part(self.size_bytes),
            "rate_bytes_per_s": rate,
            "levels": [part(size) for size in sizes],
        }


def level_ends(entry: Entry) -> tuple[int, ...] | None:
    """Where the levels of a chunk end that are here; None if its header does not tell."""
    try:
        ends = Header.parse(entry.head).level_ends
        return tuple(end for end in ends if end <= entry.size_bytes) or None
    except (FormatError, UnsupportedError):
        return None


def sum_levels(every: list[tuple[int, ...]]) -> list[int]:
    """Bytes of the first level of all chunks, of the first two, and so on. A chunk with fewer
    levels than others counts with all that it has."""
    most = max(map(len, every))
    return [sum(ends[min(level, len(ends) - 1)] for ends in every) for level in range(most)]


def _rate(body: dict[str, Any]) -> float | None:
    value = body.get("rate_bytes_per_s")
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 1 <= value <= MAX_RATE:
        raise bad_request(f"rate_bytes_per_s: expected a number from 1 to {MAX_RATE}")
    return float(value)


def _seen_rate(node: Node, tenant: str, client: str) -> float | None:
    """What the client's link carried lately, within its share of what the node may send."""
    seen, limit = node.rates.of(tenant, client), node.settings.egress_bits_per_s / 8
    if not limit:
        return seen
    share = limit / (1 + node.rates.sending)
    return share if seen is None else min(seen, share)
