"""The codec for a model: with a profile of this machine, or one that somebody shared.

Profiles are kept under the digest of their bytes. Which one a model's caches are coded with is told
by a name, `profile-FINGERPRINT`, whose manifest points to it; what arrives is verified, checked
like any profile, and kept on this machine.
"""

from __future__ import annotations

import asyncio
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from kdn.cache.spec import ModelSpec
from kdn.codec import open_codec
from kdn.codec.base import Codec
from kdn.codec.profiles import SHIPPED, find_profile, local_profile
from kdn.errors import ChecksumError, FormatError, StoreError, UnsupportedError
from kdn.places import Places

ID_BYTES = 16


async def codec_for(name: str, spec: ModelSpec, places: Places) -> Codec:
    """`klt` looks for a profile on this machine first, then at the places."""
    if name == "klt":
        try:
            find_profile(spec)
        except UnsupportedError:
            await _fetch(spec, places)
    return await asyncio.to_thread(open_codec, name, spec)


async def share_profile(spec: ModelSpec, places: Places) -> bool:
    """Put this machine's own profile where others find it; False if there is nothing to do."""
    path = find_profile(spec)
    if path.parent == SHIPPED:
        return False
    data = await asyncio.to_thread(path.read_bytes)
    profile_id = _digest(data)
    store = places.profiles[0]
    [found] = await store.lookup([profile_id])
    if found is None:
        await store.put(profile_id, data, etag=profile_id, checksum=xxh3_64_intdigest(data))
    told = {"models": {spec.fingerprint.hex(): {"profile": profile_id.hex()}}}
    await places.names.change(_name(spec), lambda _: told)
    return found is None


async def _fetch(spec: ModelSpec, places: Places) -> None:
    profile_id = await _shared_id(spec, places)
    if profile_id is not None:
        for store in places.profiles:
            span = await store.get(profile_id)
            if span is not None:
                await asyncio.to_thread(_keep, bytes(span.data), profile_id, local_profile(spec))
                return
    raise UnsupportedError(
        f"no klt profile for the model {spec.fingerprint.hex()}, neither here nor where you "
        'connected to: make one with `kdn calibrate MODEL`, or use codec="exact"'
    )


async def _shared_id(spec: ModelSpec, places: Places) -> bytes | None:
    try:
        named = await places.names.get(_name(spec))
    except StoreError:
        return None  # nobody there to ask
    models: Any = {} if named is None else named.manifest.get("models", {})
    try:
        return bytes.fromhex(models[spec.fingerprint.hex()]["profile"])
    except (KeyError, TypeError, ValueError):
        return None


def _keep(data: bytes, profile_id: bytes, path: Path) -> None:
    """Verified, and renamed into place: a reader sees all of it or nothing."""
    from kdn.codec.klt import Profile

    if _digest(data) != profile_id:
        raise ChecksumError(f"the profile {profile_id.hex()} arrived with other bytes")
    try:
        Profile.from_bytes(data)
    except FormatError as error:
        raise FormatError(f"the shared profile {profile_id.hex()}: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.part")
    aside.write_bytes(data)
    aside.replace(path)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=ID_BYTES).digest()


def _name(spec: ModelSpec) -> str:
    return f"profile-{spec.fingerprint.hex()}"
