"""Places with chunks in trees, exported, and the web server of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kdn.bench.web_server import nginx_program
from kdn.codec.header import Header
from kdn.places.export import Exported, export
from kdn.places.places import Places, open_places
from kdn.session.exporting import STREAMS
from kdn.store.base import Hints
from tests.node.harness import chunk_stream, key_of

needs_nginx = pytest.mark.skipif(nginx_program() is None, reason="nginx is not installed")

Chain = Sequence[int]


async def put_chain(places: Places, chain: Chain, size_bytes: int = 5000) -> None:
    """Chunks by numbers, each after the one before."""
    parent = None
    for number in chain:
        data = chunk_stream(key_of(number), size_bytes, seed=number)
        await places.publish_to.store.put(
            key_of(number), data, etag=Header.parse(data).stream_id,
            checksum=xxh3_64_intdigest(data), hints=Hints(parent, 2.0),
        )  # fmt: skip
        parent = key_of(number)


def manifest_of(chain: Chain) -> dict[str, object]:
    return {"models": {"00" * 16: {"chunks": [key_of(number).hex() for number in chain]}}}


async def exported(
    folder: Path,
    target: Path,
    chains: Sequence[Chain] = (),
    named: dict[str, Chain] | None = None,
    *,
    names: Sequence[str] = (),
    prune: bool = False,
) -> Exported:
    """These chains, those of which that have a name in `named`, put into a folder and exported."""
    async with open_places(folder) as places:
        for chain in chains:
            await put_chain(places, chain)
        for name, chain in (named or {}).items():
            found = await places.names.get(name)
            etag = found.etag if found else None
            assert await places.names.put(name, manifest_of(chain), etag)
        return await export(places, target, STREAMS, names=names, prune=prune)
