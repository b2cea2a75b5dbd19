"""Every request leaves one count and one line in the log, whichever way it was answered."""

from __future__ import annotations

import logging

from kdn.node.state import Node

log = logging.getLogger(__name__)

MAX_PATH = 256
STATUS = "/v1/status"
"""Looking at a node is no traffic."""


def record(
    node: Node,
    labels: tuple[str, str, int],
    seconds: float,
    path: str,
    tenant: str | None,
    client: str | None,
    request: str = "",
) -> None:
    """`labels`: method, route, status. Status 0: the answer was cut. `request`: what its client
    calls the request that this one is a part of."""
    node.stats.answered(labels, seconds)
    if tenant is not None and not labels[1].startswith(STATUS):
        node.traffic.answered(tenant, labels[2], seconds)
    if log.isEnabledFor(logging.INFO):
        method, _, status = labels
        fields: dict[str, object] = {
            "method": method,
            "path": path[:MAX_PATH],
            "status": status,
            "seconds": round(seconds, 6),
            "tenant": tenant,
            "client": client,
        }
        if request:
            fields["request"] = request
        log.info("request", extra=fields)
