"""The status of a node as one JSON document (`docs/protocol.md`), put together from running counts.

Nothing here goes through objects: what takes long to count is counted as it comes and goes.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kdn.depot.depot import RegionReport
from kdn.depot.tenants import COLLECTIONS, Tenant
from kdn.errors import KdnError
from kdn.node.state import Node
from kdn.node.status.census import Census
from kdn.node.status.history import History, Sample, found_of
from kdn.node.status.known import NONE, Known
from kdn.node.status.traffic import Json, TenantTraffic, quantile_s
from kdn.store.tally import Usage

WAIT_S = 2.0
TOP_TENANTS = 20
TOP_MODELS = 20
SHOWN_EVICTIONS = 50


class Snapshot:
    """One moment. `counts`: of all processes."""

    def __init__(
        self,
        node: Node,
        counts: Json,
        now: Sample,
        *,
        history: History,
        census: Census,
        known: Known,
    ):
        self._node, self._counts, self.now = node, counts, now
        self._history, self._census, self._known = history, census, known
        self._prefixes = {tenant.prefix: tenant.name for tenant in node.tenants}

    async def told(self, started_s: float, workers_answering: int) -> Json:
        """All but what is wrong (`problems.py`), which is found in this."""
        node = self._node
        tenants = sorted(node.tenants, key=self._sent_bytes, reverse=True)
        return {
            "node": {
                "version": _version(),
                "role": self._role(),
                "started_s": round(started_s, 3),
                "now_s": round(time.time(), 3),
                "workers": node.settings.workers,
                "workers_answering": workers_answering,
                "stopping": node.stopping,
            },
            "known": self._held(),
            "tiers": [self._tier(tier) for tier in self._counts["tiers"]],
            "rates": self._history.rates(self.now),
            "traffic": self._traffic(self._all()),
            "num_tenants": len(tenants),
            "tenants": [self.tenant(one) for one in tenants[:TOP_TENANTS]],
            "deliveries": {
                "number": self._counts["num_deliveries"],
                "longest": self._counts["deliveries"],
            },
            "evictions": self._evictions(),
            "region": await self._region(),
            "followers": node.feed.num_followers,
            "limits": await self._limits(),
            "errors": self._counts["errors"],
            "cut_readers": self._counts["cut_readers"],
            "refused_puts": self._counts["refused_puts"],
            "faults": self._counts["faults"],
        }

    def _role(self) -> str:
        settings = self._node.settings
        return "region" if settings.upstream else "shared" if settings.store else "node"

    # what is known

    def _held(self) -> Json:
        each = [self._known.names.get(one.name, NONE) for one in self._node.tenants]
        versions = [one.versions for one in each]
        held = [self._collections(one) for one in self._node.tenants]
        return {
            "names": sum(one.totals.names for one in each),
            "versions": None if None in versions else sum(filter(None, versions)),
            "manifest_bytes": sum(one.totals.size_bytes for one in each),
            "names_answer": self._known.answers,
            **{name: sum(one[name].objects for one in held) for name in COLLECTIONS},
            "size_bytes": sum(usage.size_bytes for one in held for usage in one.values()),
            "models": self._models(None)[:TOP_MODELS],
            "models_counted": round(self._census.counted, 4),
        }

    def _collections(self, tenant: Tenant) -> dict[str, Usage]:
        """Of what is in this machine."""
        store = self._node.depot.store.own
        if store is None:
            return {name: Usage() for name in COLLECTIONS}
        return {name: store.usage(tenant.prefix + letter) for name, letter in COLLECTIONS.items()}

    def _models(self, tenant: Tenant | None) -> list[Json]:
        """The largest first."""
        found: dict[bytes, Usage] = {}
        for (prefix, model), usage in self._census.usage.items():
            if tenant is None or prefix == tenant.prefix:
                one = found.setdefault(model, Usage())
                one.objects += usage.objects
                one.size_bytes += usage.size_bytes
        largest = sorted(found.items(), key=lambda item: -item[1].size_bytes)
        return [
            {"model": model.hex(), "chunks": usage.objects, "size_bytes": usage.size_bytes}
            for model, usage in largest
        ]

    # traffic

    def _all(self) -> Json:
        each = list(self._counts["tenants"].values())
        total = _no_traffic()
        for one in each:
            for name, value in one.items():
                total[name] = _added(total[name], value)
        return total

    def _traffic(self, counts: Json, tiers: dict[str, int] | None = None) -> Json:
        found, missing = found_of(counts)
        if tiers is None:
            tiers = {tier["name"]: tier["hits"] for tier in self._counts["tiers"]}
        latencies = counts["latencies"]
        return {
            "requests": counts["requests"],
            "sent_bytes": max(0, counts["sent_bytes"]),
            "received_bytes": counts["received_bytes"],
            "lookups": {"found": counts["keys_found"], "missing": counts["keys_missing"]},
            "reads": {"found": counts["reads_found"], "missing": counts["reads_missing"]},
            "hit_ratio": round(found / (found + missing), 4) if found + missing else None,
            "tier_hits": tiers,
            "p50_s": _rounded(quantile_s(latencies, 0.5)),
            "p99_s": _rounded(quantile_s(latencies, 0.99)),
            "levels": dict(sorted(counts["levels"].items())),
            "errors": counts["errors"],
        }

    def _sent_bytes(self, tenant: Tenant) -> int:
        return int(self._counts["tenants"].get(tenant.name, {}).get("sent_bytes", 0))

    def tenant(self, tenant: Tenant, models: bool = False) -> Json:
        counts = self._counts["tenants"].get(tenant.name) or _no_traffic()
        names, held = self._known.names.get(tenant.name, NONE), self._collections(tenant)
        waiting = self._node.depot.waiting(tenant)
        told = {
            "tenant": tenant.name,
            "names": names.totals.names,
            "versions": names.versions,
            "manifest_bytes": names.totals.size_bytes,
            **{name: usage.objects for name, usage in held.items()},
            "size_bytes": sum(usage.size_bytes for usage in held.values()),
            "quota_bytes": tenant.settings.quota_bytes,
            "weight": tenant.settings.weight,
            "waiting_objects": waiting.objects,
            "waiting_bytes": waiting.size_bytes,
            "rates": self._history.tenant_rates(tenant.name, counts, self.now.at_s),
            "traffic": self._traffic(counts, self._tier_hits(tenant, counts)),
        }
        return {**told, "models": self._models(tenant)} if models else told

    def _tier_hits(self, tenant: Tenant, counts: Json) -> dict[str, int]:
        tiers = self._counts["tiers"]
        if len(tiers) == 1 and not tiers[0]["owners"]:  # the store is one tier, and counts for all
            return {tiers[0]["name"]: counts["reads_found"]}
        prefix = tenant.prefix.hex()
        return {tier["name"]: tier["owners"].get(prefix, 0) for tier in tiers}

    # stores

    def _tier(self, tier: Json) -> Json:
        return {name: value for name, value in tier.items() if name not in ("owners", "evicted")}

    def _evictions(self) -> Json:
        found = [
            {
                "tier": tier["name"],
                "tenant": self._prefixes.get(bytes.fromhex(owner)),
                "why": why,
                "number": number,
            }
            for tier in self._counts["tiers"]
            for owner, why, number in tier["evicted"]
        ]
        found.sort(key=lambda one: -int(str(one["number"])))
        total = sum(tier["evictions"] for tier in self._counts["tiers"])
        return {"number": total, "by": found[:SHOWN_EVICTIONS]}

    async def _region(self) -> Json | None:
        with suppress(KdnError, OSError, TimeoutError):
            async with asyncio.timeout(WAIT_S):
                report = await self._node.depot.region_report()
            return None if report is None else _region(report, self._node.settings.max_stale_s)
        return None

    # limits

    async def _limits(self) -> list[Json]:
        """What is used of everything that can run out. `may_fill`: it is meant to be full."""
        settings, counts = self._node.settings, self._counts
        found = [
            _limit(tier["name"], "bytes", tier["size_bytes"], tier["capacity_bytes"], True)
            for tier in counts["tiers"]
        ]
        found.append(await asyncio.to_thread(_file_system, str(settings.data)))
        found.append(_limit("process_memory", "bytes", counts["memory_bytes"], 0, True))
        for name, limit in (
            ("connections", settings.max_connections),
            ("requests_now", settings.max_requests),
        ):
            found.append(_limit(name, "", counts[name], limit))
        for name, limit in (
            ("uploads_bytes", settings.max_bodies_bytes),
            ("questions_bytes", settings.max_questions_bytes),
            ("answers_bytes", settings.max_answers_bytes),
        ):
            found.append(_limit(name.removesuffix("_bytes"), "bytes", counts[name], limit))
        return found


def _limit(name: str, unit: str, used: int, limit: int, may_fill: bool = False) -> Json:
    """`limit` 0: none."""
    return {"name": name, "unit": unit, "used": used, "limit": limit, "may_fill": may_fill}


def _file_system(folder: str) -> Json:
    with suppress(OSError):
        found = os.statvfs(folder)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return _limit("file_system", "bytes", total - free, total)
    return _limit("file_system", "bytes", 0, 0)


def _region(report: RegionReport, max_stale_s: float) -> Json:
    return {
        "centre_answers": report.is_reachable,
        "waiting_objects": report.waiting_objects,
        "waiting_bytes": report.waiting_bytes,
        "outbox_bytes": report.outbox_bytes,
        "outbox_capacity_bytes": report.outbox_capacity_bytes,
        "sent_objects": report.sent_objects,
        "send_failures": report.send_failures,
        "refused_objects": report.refused_objects,
        "lost_objects": report.lost_objects,
        "pulled_bytes": report.pulled_bytes,
        "names_late": any(feed.age_s > max_stale_s for feed in report.feeds.values()),
        "feeds": [
            {"tenant": tenant, "position": feed.position, "age_s": _rounded(feed.age_s)}
            for tenant, feed in sorted(report.feeds.items())[:TOP_TENANTS]
        ],
    }


def _no_traffic() -> Json:
    told = TenantTraffic().told()
    del told["status_bytes"]
    return {**told, "sent_bytes": 0, "received_bytes": 0}


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}
    if isinstance(one, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    return one + other


def _rounded(seconds: float | None) -> float | None:
    """JSON knows no infinity."""
    return None if seconds is None or not math.isfinite(seconds) else round(seconds, 6)


@cache
def _version() -> str:
    try:
        return version("kdn")
    except PackageNotFoundError:
        return "unknown"
