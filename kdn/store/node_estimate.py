"""What a node says loading a prompt from it would take (`POST /v1/estimate`): for routers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kdn.errors import StoreError
from kdn.store.http_answers import member
from kdn.store.node_client import NodeClient


@dataclass(frozen=True)
class Part:
    """So many bytes, and the seconds that they take; None: the node knows no rate."""

    size_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Estimate:
    known: int
    """How many of the keys, from the first one on, the node has."""
    whole: Part
    """All of these."""
    levels: tuple[Part, ...]
    """The first level of all, the first two, and so on; empty if they do not tell."""
    rate_bytes_per_s: float | None


async def estimate(
    node: NodeClient,
    keys: Sequence[bytes],
    *,
    rate_bytes_per_s: float | None = None,
    client: str | None = None,
) -> Estimate:
    """What is known of a prompt whose chunks have these keys, in order. `rate_bytes_per_s`: of the
    link, if the caller knows it; else what the node has seen for `client`, or the caller."""
    asked: dict[str, Any] = {"keys": [key.hex() for key in keys]}
    if rate_bytes_per_s is not None:
        asked["rate_bytes_per_s"] = rate_bytes_per_s
    if client is not None:
        asked["client"] = client
    headers = {"Content-Type": "application/json"}
    body = json.dumps(asked).encode()
    told = (await node.ask("POST", "/v1/estimate", body, headers=headers)).json
    levels = tuple(_part(one) for one in member(told, "levels", list))
    known = member(told, "known", int)
    if not 0 <= known <= len(keys):
        raise StoreError(f"{node.url}: {known} of {len(keys)} keys are known")
    return Estimate(known, _part(told), levels, _number(told, "rate_bytes_per_s"))


def _part(told: Any) -> Part:
    size_bytes = member(told, "size_bytes", int)
    if size_bytes < 0:
        raise StoreError(f"expected a size, found {size_bytes}")
    return Part(size_bytes, _number(told, "seconds"))


def _number(told: Any, name: str) -> float | None:
    value = told.get(name) if isinstance(told, dict) else None
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise StoreError(f"{name}: expected a number, found {str(value)[:100]!r}")
    return float(value)
