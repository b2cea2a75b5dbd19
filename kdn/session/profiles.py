"""The codec for a model: with a profile of this machine, or one that somebody shared.

Profiles are kept under the digest of their bytes. Which one a model's caches are coded with is told
by a name, `profile-FINGERPRINT-TAG`, whose manifest points to it; what arrives is verified, checked
for the model, and only then kept on this machine, for this user alone.
"""

from __future__ import annotations

import asyncio
import logging
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from kdn.cache.folder import write_private
from kdn.cache.spec import ModelSpec
from kdn.codec import open_codec
from kdn.codec.base import Codec
from kdn.codec.profiles import find_profile, klt_codec, local_profile
from kdn.errors import (
    ChecksumError,
    FormatError,
    KdnError,
    MismatchError,
    StoreError,
)
from kdn.places.manifests import entry_of, with_entry
from kdn.places.places import Places
from kdn.protocol.limits import MAX_PROFILE_BYTES

if TYPE_CHECKING:
    from kdn.codec.klt import Profile

logger = logging.getLogger(__name__)

ID_BYTES = 16


async def codec_for(
    name: str, spec: ModelSpec, places: Places, seal_key: bytes, profile: Path | None = None
) -> Codec:
    """`klt` takes the profile that was named, else one of this machine, else one at the places,
    where a holder of the secret must have named it."""
    if name != "klt":
        return await asyncio.to_thread(open_codec, name, spec, profile)
    found = await asyncio.to_thread(find_profile, spec, profile)
    found = found or await _fetch(spec, places, seal_key)
    return await asyncio.to_thread(klt_codec, spec, found)


async def share_profile(codec: Codec, places: Places, seal_key: bytes) -> bool:
    """Put the profile in use where others find it; False if there is nothing to do, or if it is
    one that everybody has."""
    if not codec.shares_profile:
        return False
    spec, profile_id = codec.spec, codec.profile_id
    data = await asyncio.to_thread(_read, local_profile(spec))
    if _digest(data) != profile_id:
        return False
    store = places.profiles[0]
    [found] = await store.lookup([profile_id])
    if found is None:
        await store.put(profile_id, data, etag=profile_id, checksum=xxh3_64_intdigest(data))
    if await shared_id(spec, places, seal_key) != profile_id:
        name, entry = _name(spec, seal_key), {"profile": profile_id.hex()}
        told = with_entry({}, name, spec.fingerprint, entry, seal_key)
        await places.names.change(name, lambda _: told)
    return found is None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def _fetch(spec: ModelSpec, places: Places, seal_key: bytes) -> Profile | None:
    """From the first place that has a good one; None if none has any."""
    profile_id = await shared_id(spec, places, seal_key)
    if profile_id is None:
        return None
    trouble: KdnError | None = None
    for store in places.profiles:
        try:
            span = await store.get(profile_id, 0, MAX_PROFILE_BYTES + 1)
            if span is not None:
                return await asyncio.to_thread(_kept, bytes(span.data), profile_id, spec)
        except KdnError as error:
            trouble = error
    if trouble is not None:
        raise trouble
    return None


async def shared_id(spec: ModelSpec, places: Places, seal_key: bytes) -> bytes | None:
    """Of the profile that a holder of the secret shares for this model; None if nobody does."""
    name = _name(spec, seal_key)
    try:
        named = await places.names.get(name)
    except StoreError:
        return None  # nobody there to ask
    entry = named and entry_of(named.manifest, name, spec.fingerprint, seal_key)
    try:
        found = bytes.fromhex((entry or {})["profile"])
    except (KeyError, TypeError, ValueError):
        return None
    return found if len(found) == ID_BYTES else None


def _kept(data: bytes, profile_id: bytes, spec: ModelSpec) -> Profile:
    """Checked before it is written: what lies here is used by every later start."""
    from kdn.codec.klt import Profile

    if _digest(data) != profile_id:
        raise ChecksumError(f"the profile {profile_id.hex()} arrived with other bytes")
    try:
        profile = Profile.from_bytes(data)
        profile.check_for(spec)
    except (FormatError, MismatchError) as error:
        raise type(error)(
            f"the shared profile {profile_id.hex()} cannot be used: {error}. Make another with "
            '`kdn calibrate MODEL`, or use codec="exact"'
        ) from error
    path = local_profile(spec)
    try:
        write_private(path, data)
    except OSError as error:
        logger.warning("the profile is fetched again next time, %s is not written: %s", path, error)
    return profile


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=ID_BYTES).digest()


def _name(spec: ModelSpec, seal_key: bytes) -> str:
    """One for each secret: who has another cannot read what stands under it anyway."""
    tag = blake2b(digest_size=8, key=seal_key, person=b"kdn-profile").hexdigest()
    return f"profile-{spec.fingerprint.hex()}-{tag}"
