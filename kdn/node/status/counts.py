"""What one process of a node counted, as JSON; and the counts of all its processes as one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdn.background import faults
from kdn.errors import KdnError
from kdn.node.state import Node
from kdn.node.status.levels import count_levels
from kdn.node.status.traffic import MAX_SHOWN, Json
from kdn.store.base import Stats, TierReport

TIERS_S = 2.0
"""For the stores to say what they hold: a status does not wait for one that hangs."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


async def process_counts(node: Node, with_tiers: bool) -> Json:
    """Of this process. `with_tiers`: also what its stores say, some of which may be elsewhere."""
    await count_levels(node.traffic, node.depot)
    sent, received = node.stats.bytes_by_tenant()
    uploads, questions = node.bodies.held_bytes()
    told = node.traffic.told()
    for tenant in told["tenants"].keys() | sent.keys() | received.keys():
        one = told["tenants"].setdefault(tenant, node.traffic.of(tenant).told())
        one["sent_bytes"] = sent.get(tenant, 0) - one.pop("status_bytes")
        one["received_bytes"] = received.get(tenant, 0)
    return {
        **told,
        "tiers": await _tiers(node) if with_tiers else [],
        "requests_now": node.num_requests,
        "connections": int(node.stats.connections.value),
        "memory_bytes": resident_bytes(),
        "uploads_bytes": uploads,
        "questions_bytes": questions,
        "answers_bytes": node.answers.held_bytes,
        "cut_readers": int(node.stats.cut_readers.value),
        "refused_puts": int(node.stats.refused_puts.value),
        "faults": dict(faults),
    }


async def _tiers(node: Node) -> list[Json]:
    """Empty if the stores do not answer in time."""
    with suppress(KdnError, OSError, TimeoutError):
        async with asyncio.timeout(TIERS_S):
            found = await node.depot.store.tier_reports()
        # Behind workers, whatever a worker finds it counts itself.
        return [_tier(report, counts_hits=not node.behind_workers) for report in found]
    return []


def _tier(report: TierReport, counts_hits: bool) -> Json:
    stats = report.stats or Stats()
    return {
        "name": report.name,
        "answers": report.stats is not None and not report.rests,
        "objects": stats.objects,
        "size_bytes": stats.size_bytes,
        "capacity_bytes": stats.capacity_bytes,
        "hits": report.hits if counts_hits else 0,
        "owners": {o.hex(): n for o, n in report.owners.items()} if counts_hits else {},
        "errors": report.errors,
        "corruptions": stats.corruptions,
        "evictions": stats.evictions,
        "evicted": [[owner.hex(), why, n] for (owner, why), n in stats.evicted.items()],
    }


def resident_bytes() -> int:
    """Of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def merged(each: Sequence[Json]) -> Json:
    """Numbers are added, whatever holds them; deliveries are put together, the longest first."""
    tiers: dict[str, Json] = {}
    deliveries: list[Json] = []
    rest: Json = {}
    for counts in each:
        for tier in counts["tiers"]:
            tiers[tier["name"]] = _sum(tiers.get(tier["name"]), tier)
        deliveries += counts["deliveries"]
        others = {k: v for k, v in counts.items() if k not in ("tiers", "deliveries")}
        rest = _sum(rest, others)
    deliveries.sort(key=lambda one: -one["seconds"])
    return {**rest, "tiers": list(tiers.values()), "deliveries": deliveries[:MAX_SHOWN]}


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict):
        names = dict.fromkeys((*one, *other))
        return {name: _sum(one.get(name), other.get(name)) for name in names}
    if isinstance(one, bool):
        return one and other
    if isinstance(one, list):
        is_counts = len(one) == len(other) and all(isinstance(value, int) for value in one)
        return [a + b for a, b in zip(one, other, strict=True)] if is_counts else one + other
    return one if isinstance(one, str) else one + other
