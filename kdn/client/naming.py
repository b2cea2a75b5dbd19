"""What a name says of a context: its token ids, its chunks, and how to ask about it."""

from __future__ import annotations

from collections.abc import Sequence

from kdn.cache.keys import Chunk
from kdn.engines.prompts import PLAIN
from kdn.errors import FormatError, MismatchError, StoreError
from kdn.places.manifests import Manifest, entry_of, with_entry
from kdn.session.session import Session


async def find_name(
    session: Session, name: str, *, latest: bool = False, stale_ok: bool = False
) -> tuple[list[int], str, float | None]:
    """Token ids that a name points to, and how to ask about them. The third is None, or how many
    seconds old this may be, where that was asked for."""
    found = await session.places.names.get(name, latest=latest, stale_ok=stale_ok)
    if found is None:
        raise StoreError(f"there is no name {name!r} at {session.places.publish_to.name}")
    model, seal_key = session.spec.fingerprint, session.namespace.seal_key
    entry = entry_of(found.manifest, name, model, seal_key)
    if entry is None:
        raise MismatchError(f"{name!r} was learned with another model: learn it with this one")
    try:
        tokens = [int(token) for token in entry["tokens"]]
        return tokens, str(entry.get("style", PLAIN)), found.stale_s
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the manifest of {name!r} has no token ids") from error


async def give_name(
    session: Session, name: str, tokens: Sequence[int], style: str, chunks: Sequence[Chunk]
) -> None:
    """Point `name` at this context for this model. Entries of other models stay."""
    entry = {
        "profile": session.codec.profile_id.hex(),
        "chunks": [chunk.key.hex() for chunk in chunks],
        "tokens": list(tokens),
        "style": style,
    }
    model, seal_key = session.spec.fingerprint, session.namespace.seal_key

    def updated(manifest: Manifest) -> Manifest:
        return with_entry(manifest, name, model, entry, seal_key)

    await session.places.names.change(name, updated)
