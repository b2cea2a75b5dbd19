"""Why a prompt hits, or does not: chunk by chunk.

A key hides what it was made of. So the likely reasons are tried: the same tokens under the other
codecs, models and secrets that could have been meant, and the names that point to what is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kdn.blend.pieces import Join
from kdn.cache.keys import PUBLIC_SECRET, TAIL_MULTIPLE, Chunk, Namespace, Tokens, cut
from kdn.cache.spec import ModelSpec
from kdn.client.answers import Stats
from kdn.client.asynchronous import AsyncClient
from kdn.client.contexts import Options
from kdn.client.joining import checked_pieces
from kdn.codec import open_codec
from kdn.codec.profiles import find_profile
from kdn.delivery.endpoints import Endpoints
from kdn.errors import KdnError
from kdn.places.manifests import Manifest
from kdn.session.session import LOOKUP_S, Session

MAX_NAMES = 500

KNOWN = "known"
MOVED = "known, moved by {} positions"
REPAIRED = ", repaired"
ORPHAN = "known, but of no use: a chunk before it is missing"
EVICTED = "evicted or deleted: the name {} still points to it"
OTHER_PROFILE = "known under another codec or profile: {}"
OTHER_MODEL = "known for another model: {}"
OTHER_SECRET = "known under the public secret: this client uses one of its own"
UNKNOWN = "never published here, or by another tenant (a node shows you only your own)"
SHORT = f"shorter than a chunk: fewer than {TAIL_MULTIPLE} tokens are left"


@dataclass(frozen=True, order=True)
class Finding:
    """Of the tokens [start, end) of a prompt."""

    start: int
    end: int
    known: bool
    why: str


@dataclass(frozen=True)
class Explanation:
    findings: list[Finding]
    loading_s: float
    """To deliver what is known, as far as can be told."""


@dataclass
class Suspects:
    """Other namespaces to try, by what to say on a hit, and keys that names refer to."""

    namespaces: dict[str, Namespace] = field(default_factory=dict)
    named: dict[bytes, str] = field(default_factory=dict)


async def explain(client: AsyncClient, tokens: Tokens) -> Explanation:
    session, contexts = client.session, client.contexts
    enough = contexts.enough_kld(Options())
    known = await session.know(tokens, enough_kld=enough)
    findings = [Finding(chunk.start, chunk.end, True, KNOWN) for chunk in known.chunks]
    reach = known.end
    chunks = cut(tokens, session.namespace)
    rest = [number for number, chunk in enumerate(chunks) if chunk.end > reach]
    if rest:
        suspects = await _suspects(session)
        reasons = await _reasons(session.places.endpoints, tokens, chunks, suspects)
        for number in rest:
            chunk, why = chunks[number], reasons[number]
            findings.append(Finding(max(reach, chunk.start), chunk.end, False, why))
    end = chunks[-1].end if chunks else 0
    if end < len(tokens):
        findings.append(Finding(end, len(tokens), False, SHORT))
    return Explanation(findings, session.loading_s(known, enough, contexts.speeds))


async def explain_join(client: AsyncClient, names: Sequence[str]) -> Explanation:
    """Where each part of a join comes to stand, what is done to it, and what must be read."""
    session, stats = client.session, Stats()
    join, _ = await client.joins.named(checked_pieces(names), Options(), stats)
    enough = client.contexts.enough_kld(Options())
    known = await session.know_each(join.chunks, enough_kld=enough)
    found = {chunk.key for chunk in known.chunks}
    repairing = await client.joins.repairing(join, LOOKUP_S, stats)
    reasons = {} if len(found) == len(join.chunks) else await _reasons_of(session, join)
    findings = []
    for chunk in join.chunks:
        for place in join.places[chunk.key]:
            at, is_known = place.start(chunk), chunk.key in found
            why = MOVED.format(place.shift) if place.shift else KNOWN
            why += REPAIRED if place.piece and repairing is not None else ""
            why = why if is_known else reasons[chunk.key]
            findings.append(Finding(at + place.skipped, at + chunk.num_tokens, is_known, why))
    return Explanation(sorted(findings), session.loading_s(known, enough, client.contexts.speeds))


async def _reasons_of(session: Session, join: Join) -> dict[bytes, str]:
    """By the key of each chunk of a join, as if it were missing."""
    found: dict[bytes, str] = {}
    suspects = await _suspects(session)
    for piece in join.pieces:
        told = await _reasons(session.places.endpoints, piece.tokens, piece.chunks, suspects)
        found |= dict(zip((chunk.key for chunk in piece.chunks), told, strict=True))
    return found


async def _reasons(
    endpoints: Endpoints, tokens: Tokens, chunks: Sequence[Chunk], suspects: Suspects
) -> list[str]:
    """One for each chunk, as if it were missing."""
    here = await _stored(endpoints, chunks)
    reasons = [ORPHAN if found else UNKNOWN for found in here]
    for number, chunk in enumerate(chunks):
        if not here[number] and chunk.key in suspects.named:
            reasons[number] = EVICTED.format(suspects.named[chunk.key])
    for why, namespace in suspects.namespaces.items():
        is_whole = bool(chunks) and chunks[-1].end == len(tokens)
        there = await _stored(endpoints, cut(tokens, namespace, whole=is_whole))
        for number, found in enumerate(there):
            if found and reasons[number] == UNKNOWN:
                reasons[number] = why
    return reasons


async def _stored(endpoints: Endpoints, chunks: Sequence[Chunk]) -> list[bool]:
    """Which of them some place has, of whatever model or profile; one that fails has none."""
    found = [False] * len(chunks)
    for endpoint in endpoints if chunks else ():
        try:
            entries = await endpoint.store.lookup([chunk.key for chunk in chunks])
        except (KdnError, OSError):
            continue
        found = [a or b is not None for a, b in zip(found, entries, strict=True)]
    return found


async def _suspects(session: Session) -> Suspects:
    own, suspects = session.namespace, Suspects()
    for name, profile in _own_profiles(session.spec).items():
        suspects.namespaces[OTHER_PROFILE.format(name)] = replace(own, profile=profile)
    count = 0
    async for about in session.places.names.list():
        count += 1
        if count > MAX_NAMES:
            break
        found = await session.places.names.get(about.name)
        if found is not None:
            _note(suspects, about.name, found.manifest, own)
    if own.secret != PUBLIC_SECRET:
        suspects.namespaces[OTHER_SECRET] = replace(own, secret=PUBLIC_SECRET)
    suspects.namespaces = {why: one for why, one in suspects.namespaces.items() if one != own}
    return suspects


def _own_profiles(spec: ModelSpec) -> Mapping[str, bytes]:
    """Of the codecs this client could have used."""
    profiles = {"exact": open_codec("exact", spec).profile_id}
    if (klt := find_profile(spec)) is not None:
        profiles["klt"] = klt.profile_id
    return profiles


def _note(suspects: Suspects, name: str, manifest: Manifest, own: Namespace) -> None:
    """What a manifest, which anybody may have written, tells."""
    models = manifest.get("models")
    for model, entry in models.items() if isinstance(models, dict) else ():
        try:
            fingerprint, profile = bytes.fromhex(model), bytes.fromhex(entry["profile"])
            keys = [bytes.fromhex(key) for key in entry.get("chunks", [])]
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
        suspects.named |= dict.fromkeys(keys, name)
        namespace = replace(own, model=fingerprint, profile=profile)
        if fingerprint != own.model:
            suspects.namespaces[OTHER_MODEL.format(model)] = namespace
        elif profile != own.profile:
            suspects.namespaces.setdefault(OTHER_PROFILE.format(profile.hex()), namespace)
