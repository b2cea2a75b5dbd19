"""A place without a node: a folder, a store or an export. Can its names be read?"""

from __future__ import annotations

import asyncio
import os

from kdn.doctor.check import Finding, Situation, Skip, ok
from kdn.places.places import is_folder, is_url, open_places
from kdn.store.node_client import HttpLimits
from kdn.store.opening import without_password
from kdn.store.static_client import is_export

LIMITS = HttpLimits(connect_s=3.0, silence_s=5.0, deadline_s=8.0)
NO_LIMIT = 1 << 62
"""Bytes: looking into a folder must not make it smaller."""


def check_place(situation: Situation) -> Finding:
    url, own = situation.client.url, situation.client.credentials
    if is_url(url) and not is_export(url):
        raise Skip("the place is a node")
    if is_folder(url) and not os.path.isdir(os.path.expanduser(url)):
        return ok(f"{url} is made when something is learned")

    async def count() -> int:
        opened = open_places(
            url, token=own.token, tls_ca=own.tls_ca, limits=LIMITS, memory_bytes=0,
            disk_bytes=NO_LIMIT,
        )  # fmt: skip
        async with opened as places:
            return len([None async for _ in places.names.list("")])

    return ok(f"{without_password(url)}: {asyncio.run(count())} names")
