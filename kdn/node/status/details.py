"""One name in detail: its versions, and for each model its chunks, tokens and bytes by level."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import islice

from kdn.codec.header import Header
from kdn.depot.depot import IN_THREAD_BYTES
from kdn.depot.manifests import models_of
from kdn.depot.names import Version
from kdn.depot.tenants import Tenant
from kdn.depot.turns import Work
from kdn.errors import FormatError, UnsupportedError
from kdn.node.batch import LOOKED_UP, look_up
from kdn.node.estimate import HEADER_BYTES, sum_levels
from kdn.node.state import Node
from kdn.node.status.traffic import Json
from kdn.store.base import Entry

SLICE_S = 0.0005
MOST_MODELS = 20
"""Shown of one name: a hostile manifest may name thousands."""
ENTRY_BYTES = 1024
"""Memory of a chunk that was found, besides its head."""


async def name_details(node: Node, asker: Tenant, tenant: Tenant, name: str) -> Json | None:
    """Of a `tenant`, for an `asker` who operates the node, and whose memory and time it takes. None
    if there is no such name."""
    names, wait = node.depot.names, node.depot.wait
    versions = await wait(names.history(tenant.name, name))
    if not versions:
        return None
    async with node.answers.share(asker.name, versions[0].size_bytes):
        models = await _models(node, tenant, versions[0])
    return {
        "tenant": tenant.name,
        "name": name,
        "versions": [{k: v for k, v in asdict(one).items() if k != "name"} for one in versions],
        "num_models": len(models),
        "models": [
            {"model": model, **await _chunks(node, asker, _keys(tenant, chunks))}
            for model, chunks in islice(models.items(), MOST_MODELS)
        ],
    }


async def _models(node: Node, tenant: Tenant, newest: Version) -> dict[str, list[bytes]]:
    manifest = await node.depot.wait(node.depot.names.manifest(tenant.name, newest))
    if manifest is None:
        return {}
    if len(manifest) > IN_THREAD_BYTES:
        return await asyncio.to_thread(models_of, manifest)
    return models_of(manifest)


def _keys(tenant: Tenant, chunks: list[bytes]) -> list[bytes]:
    return [tenant.store_key("chunks", chunk) for chunk in chunks]


async def _chunks(node: Node, asker: Tenant, keys: list[bytes]) -> Json:
    """What is here of them. Bytes by level: of the first level, of the first two, and so on."""
    work = Work(node.depot.turns, asker.name, SLICE_S)
    found = size_bytes = num_tokens = 0
    ends: list[tuple[int, ...]] = []
    room_bytes = min(len(keys), LOOKED_UP) * (HEADER_BYTES + ENTRY_BYTES)
    async with node.answers.share(asker.name, room_bytes):
        for at in range(0, len(keys), LOOKED_UP):
            some = keys[at : at + LOOKED_UP]
            for entry in filter(None, await look_up(node, asker, work, some, HEADER_BYTES)):
                found, size_bytes = found + 1, size_bytes + entry.size_bytes
                header = _header(entry)
                if header is not None:
                    ends.append(header.level_ends)
                    num_tokens += header.info.num_tokens
                if work.is_over:
                    await work.rest()
    return {
        "chunks": len(keys),
        "found": found,
        "size_bytes": size_bytes,
        "tokens": num_tokens,
        "levels_bytes": sum_levels(ends) if ends else [],
    }


def _header(entry: Entry) -> Header | None:
    """None if it is longer than what was read, or of another version."""
    try:
        return Header.parse(entry.head)
    except (FormatError, UnsupportedError):
        return None
