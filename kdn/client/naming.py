"""What a name says of a context: its token ids, its chunks, and how to ask about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdn.blend.pieces import Piece
from kdn.cache.keys import Chunk, Namespace, cut, token_ids
from kdn.checked import checked_tokens
from kdn.engines.prompts import PLAIN, Prompts
from kdn.errors import FormatError, MismatchError, StoreError
from kdn.places.manifests import Entry, Manifest, entry_of, with_entry
from kdn.session.session import Session


@dataclass(frozen=True)
class Named:
    """A context that was learned."""

    name: str
    tokens: list[int]
    style: str
    """How to ask about it."""
    head: int | None
    """So many of its tokens are the head that it was learned behind; None: it does not say."""
    keys: frozenset[str]
    """Of its chunks, in hexadecimal."""
    stale_s: float | None
    """None, or how many seconds old this may be, where that was asked for."""

    @property
    def trouble(self) -> str:
        """For people; empty if there is none."""
        stale_s = self.stale_s
        return "" if stale_s is None else f"{self.name!r} may be {stale_s:.0f} s out of date"

    def cut(self, namespace: Namespace) -> list[Chunk]:
        """Its chunks. What was learned before tails were stored whole ends a little earlier."""
        whole = cut(self.tokens, namespace, whole=True)
        if whole and whole[-1].key.hex() in self.keys:
            return whole
        return cut(self.tokens, namespace)


async def find_name(
    session: Session, name: str, *, latest: bool = False, stale_ok: bool = False
) -> Named:
    """What a name points to, for the model of this session."""
    found = await session.places.names.get(name, latest=latest, stale_ok=stale_ok)
    if found is None:
        raise StoreError(f"there is no name {name!r} at {session.places.publish_to.name}")
    model, seal_key = session.spec.fingerprint, session.namespace.seal_key
    entry = entry_of(found.manifest, name, model, seal_key)
    if entry is None:
        raise MismatchError(f"{name!r} was learned with another model: learn it with this one")
    try:
        tokens = [int(token) for token in entry["tokens"]]
        keys = frozenset(str(key) for key in entry.get("chunks", ()))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the manifest of {name!r} has no token ids") from error
    style = str(entry.get("style", PLAIN))
    return Named(name, tokens, style, _head(name, entry, len(tokens)), keys, found.stale_s)


def _head(name: str, entry: Entry, num_tokens: int) -> int | None:
    head = entry.get("head")
    if head is None:
        return None
    if not isinstance(head, int) or isinstance(head, bool) or not 0 <= head <= num_tokens:
        raise FormatError(f"the manifest of {name!r} has no such head")
    return head


async def piece_of(session: Session, prompts: Prompts, name: str, namespace: Namespace) -> Piece:
    """What a name points to, as a piece to join."""
    return as_piece(await find_name(session, name), session, prompts, namespace)


def as_piece(named: Named, session: Session, prompts: Prompts, namespace: Namespace) -> Piece:
    """MismatchError if it was not learned behind a head, or has nothing behind it."""
    tokens, head, begin = named.tokens, named.head, prompts.begin()
    checked_tokens(repr(named.name), tokens, session.spec.vocab_size)
    if head is None and tokens[: len(begin)] == begin:  # learned before heads were noted
        head = len(begin)
    if head is None:
        raise MismatchError(
            f"{named.name!r} cannot be joined: it was not learned as a text behind a head"
        )
    if head >= len(tokens):
        raise MismatchError(f"{named.name!r} cannot be joined: it is empty")
    chunks = cut(tokens, namespace, whole=True)
    return Piece(token_ids(tokens), head, tuple(chunks), named.name)


async def give_name(
    session: Session,
    name: str,
    tokens: Sequence[int],
    style: str,
    chunks: Sequence[Chunk],
    head: int | None,
    states: Sequence[bytes] = (),
) -> None:
    """Point `name` at this context for this model. Entries of other models stay. `states`: the keys
    of streams that belong to it beside its chunks."""
    entry: Entry = {
        "profile": session.codec.profile_id.hex(),
        "chunks": [key.hex() for key in (*(chunk.key for chunk in chunks), *states)],
        "tokens": list(tokens),
        "style": style,
    }
    if head is not None:
        entry["head"] = head
    model, seal_key = session.spec.fingerprint, session.namespace.seal_key

    def updated(manifest: Manifest) -> Manifest:
        return with_entry(manifest, name, model, entry, seal_key)

    await session.places.names.change(name, updated)
