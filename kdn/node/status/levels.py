"""How many levels of quality readers ask for, found out from a few of their reads.

A read names bytes, and only a chunk's header says where its levels end. Reading the header for each
would cost more than the read. So requests leave a few samples behind (`traffic.py`), and every now
and then their headers are read here.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from contextlib import suppress

from kdn.depot.depot import Depot
from kdn.errors import KdnError
from kdn.node.estimate import HEADER_BYTES, level_ends
from kdn.node.status.traffic import Traffic

AT_ONCE = 64
WAIT_S = 2.0


async def count_levels(traffic: Traffic, depot: Depot) -> None:
    """Of the samples since the last time, as far as this machine holds their headers: nothing is
    fetched for it."""
    samples, store = traffic.take_samples(AT_ONCE), depot.store.own
    if not samples or store is None:
        return
    keys = list(dict.fromkeys(key for _, (key, _, _) in samples))
    with suppress(KdnError, OSError, TimeoutError):
        async with asyncio.timeout(WAIT_S):
            found = await store.lookup(keys, head_bytes=HEADER_BYTES)
        entries = {entry.key: entry for entry in found if entry}
        for tenant, (key, end, spans) in samples:
            ends = level_ends(entries[key]) if key in entries else None
            if ends:
                tenant.levels[min(bisect_left(ends, end), len(ends) - 1) + 1] += spans
