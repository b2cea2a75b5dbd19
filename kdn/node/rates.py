"""How fast this node's clients have been taking what it sends.

The kernel measures that for each connection, by what the reader has acknowledged: what lies in a
socket's buffer does not count as sent. It is looked at when a response has gone out. Where the
kernel does not tell, nothing is known.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from statistics import median
from typing import Any

MAX_CLIENTS = 1024
"""Of all tenants, that are remembered."""
STALE_S = 600.0
LEAST_BYTES = 64 << 10
"""A response of less says little of a link."""
OLD_SHARE = 0.5
"""Of what was seen before, in what is remembered."""
_INFO_BYTES = 192
_RATE_AT = struct.Struct("=160xQ")

Flow = tuple[str, str]
"""Tenant and client."""


class Rates:
    """Of one node."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[Flow, tuple[float, float]] = OrderedDict()  # bytes/s, when
        self.sending = 0
        """Responses that are going out."""

    def note(self, flow: Flow, num_bytes: int, rate: float | None) -> None:
        """A response of so many bytes has gone out to this client, on a connection of that rate."""
        if rate is None or num_bytes < LEAST_BYTES:
            return
        before = self._seen.pop(flow, None)
        now_s = self._clock()
        if before is not None and now_s - before[1] < STALE_S:
            rate = OLD_SHARE * before[0] + (1 - OLD_SHARE) * rate
        self._seen[flow] = rate, now_s
        if len(self._seen) > MAX_CLIENTS:
            self._seen.popitem(last=False)

    def of(self, tenant: str, client: str) -> float | None:
        """Bytes a second: of this client, else what its tenant's others usually get."""
        since_s = self._clock() - STALE_S
        fresh = {flow: rate for flow, (rate, at_s) in self._seen.items() if at_s >= since_s}
        if (own := fresh.get((tenant, client))) is not None:
            return own
        others = [rate for flow, rate in fresh.items() if flow[0] == tenant]
        return median(others) if others else None


def delivery_rate(transport: Any) -> float | None:
    """Bytes a second that a connection's reader has acknowledged lately, as Linux measures it."""
    found = transport.get_extra_info("socket") if transport is not None else None
    if found is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        [rate] = _RATE_AT.unpack_from(info)
    except (OSError, struct.error, NotImplementedError, TypeError):
        return None
    return float(rate) if 0 < rate < math.inf else None
