"""Seams for a model, that somebody fitted and shared: found by the model and by a tag.

They lie beside profiles, under the digest of their bytes, and a name points to them:
`seams-FINGERPRINT-KEY-TAG`, one for each secret, sealed. What arrives is verified, checked for the
model, and only then kept on this machine, for this user alone. The place says which seams are the
newest; what is kept here spares fetching them, and serves while nobody is there to ask.
"""

from __future__ import annotations

import asyncio
import logging
import re
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from kdn.blend.seams import MAX_SEAMS_BYTES, Seams
from kdn.cache.folder import cache_folder, write_private
from kdn.checked import shown
from kdn.errors import (
    ChecksumError,
    FormatError,
    KdnError,
    MismatchError,
    StoreError,
    UnsupportedError,
)
from kdn.places.manifests import entry_of, with_entry

if TYPE_CHECKING:
    from kdn.cache.spec import ModelSpec
    from kdn.session.session import Session

logger = logging.getLogger(__name__)

ID_BYTES = 16
FIND_S = 60.0
SHARE_S = 300.0
_TAG = re.compile(r"[A-Za-z0-9._-]{0,64}")


def checked_tag(tag: str) -> str:
    """A tag keeps seams for one kind of text apart from others of the model. It may be empty."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise UnsupportedError(
            f"tag: expected up to 64 letters, digits, '.', '_', '-', found {shown(tag)}"
        )
    return tag


async def find_seams(session: Session, tag: str = "") -> Seams | None:
    """Those that were shared last under this tag; None if there are none. What is there and is
    wrong raises: FormatError or MismatchError."""
    name = _name(session, checked_tag(tag))
    path = _local(session, name)
    held = await asyncio.to_thread(_read, path)
    try:
        async with asyncio.timeout(FIND_S):
            shared_id = await _shared_id(session, name)
            if shared_id is None and not session.is_read_only:
                return None  # or not any more: those of this machine are no newer
            if shared_id is None or _digest(held) == shared_id:
                return await asyncio.to_thread(_own, held, session.spec, path)
            data = await _fetch(session, shared_id)
    except (StoreError, TimeoutError) as error:  # nobody there to ask
        logger.warning("which seams are the newest cannot be known: %s", error)
        return await asyncio.to_thread(_own, held, session.spec, path)
    if data is None:
        return None
    return await asyncio.to_thread(_kept, data, shared_id, session.spec, path)


async def share_seams(session: Session, seams: Seams, tag: str = "") -> None:
    """Keep them here, and put them where others find them, unless all places are only read."""
    name = _name(session, checked_tag(tag))
    seams.check_for(session.spec)
    data = await asyncio.to_thread(seams.to_bytes)
    seams_id = _digest(data)
    await asyncio.to_thread(_kept, data, seams_id, session.spec, _local(session, name))
    if session.is_read_only:
        return
    try:
        async with asyncio.timeout(SHARE_S):
            await _put(session, seams_id, data, name)
    except TimeoutError:
        place = session.places.publish_to.name
        raise StoreError(f"{place} takes too long to store the seams") from None


async def _put(session: Session, seams_id: bytes, data: bytes, name: str) -> None:
    store = session.places.profiles[0]
    [found] = await store.lookup([seams_id])
    if found is None:
        await store.put(seams_id, data, etag=seams_id, checksum=xxh3_64_intdigest(data))
    # "profile", because that is where it lies: exports carry whatever their names call so
    entry, key = {"profile": seams_id.hex()}, session.namespace.seal_key
    told = with_entry({}, name, session.spec.fingerprint, entry, key)
    await session.places.names.change(name, lambda _: told)


async def _shared_id(session: Session, name: str) -> bytes | None:
    named = await session.places.names.get(name)
    key, model = session.namespace.seal_key, session.spec.fingerprint
    entry = named and entry_of(named.manifest, name, model, key)
    try:
        found = bytes.fromhex((entry or {})["profile"])
    except (KeyError, TypeError, ValueError):
        return None
    return found if len(found) == ID_BYTES else None


async def _fetch(session: Session, seams_id: bytes) -> bytes | None:
    """From the first place that has the right bytes; None if none has any."""
    trouble: KdnError | None = None
    for store in session.places.profiles:
        try:
            span = await store.get(seams_id, 0, MAX_SEAMS_BYTES + 1)
        except StoreError as error:
            trouble = error
            continue
        if span is None:
            continue
        data = bytes(span.data)
        if _digest(data) == seams_id:
            return data
        trouble = ChecksumError(f"the seams {seams_id.hex()} arrived with other bytes")
    if trouble is not None:
        raise trouble
    return None


def _kept(data: bytes, seams_id: bytes, spec: ModelSpec, path: Path) -> Seams:
    """Checked before they are written: what lies here is used by every later start."""
    try:
        seams = Seams.from_bytes(data)
        seams.check_for(spec)
    except (FormatError, MismatchError) as error:
        raise type(error)(f"the seams {seams_id.hex()} cannot be used: {error}") from error
    try:
        write_private(path, data)
    except OSError as error:
        logger.warning("the seams are fetched again next time, %s is not written: %s", path, error)
    return seams


def _own(data: bytes, spec: ModelSpec, path: Path) -> Seams | None:
    """Of this machine: what cannot be used is passed over."""
    if not data:
        return None
    try:
        seams = Seams.from_bytes(data)
        seams.check_for(spec)
    except (FormatError, MismatchError) as error:
        logger.warning("%s is not used, please delete it: %s", path, error)
        return None
    return seams


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_SEAMS_BYTES + 1)
    except OSError:
        return b""


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=ID_BYTES).digest()


def _local(session: Session, name: str) -> Path:
    """One for each place and tenant there: without a secret, all of them have the same name."""
    own = (*map(str, session.settings.where), session.settings.credentials.token or "")
    place = blake2b(repr(own).encode(), digest_size=8, person=b"kdn-seams").hexdigest()
    return cache_folder() / "seams" / f"{name}-{place}.safetensors"


def _name(session: Session, tag: str) -> str:
    """One for each secret, as of profiles."""
    key = session.namespace.seal_key
    own = blake2b(digest_size=8, key=key, person=b"kdn-seams").hexdigest()
    return f"seams-{session.spec.fingerprint.hex()}-{own}-{tag}"
