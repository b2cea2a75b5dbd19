"""Pieces that are found in a prompt by themselves: anchors of a piece point to it.

When a piece is learned, small objects under the keys of some of its anchors say how far before the
anchor its own tokens begin, how many there are, and digests of these and of the head that it was
learned behind. Whoever has a prompt looks all its anchors up in one batch. What is found counts
only where exactly these tokens stand in the prompt, behind exactly that head.

    magic "KDNA", version u8, number of pointers u8, zeros u16, pointers, seal 16 bytes
    pointer: before u32, length u32, head u32, digest of the head 16 bytes, of the piece 16 bytes

Integers are little-endian. All digests, keys and seals are keyed by the tenant's secret: nobody
else can ask for an anchor, or make one that counts. An anchor says nothing of values: chunks are
named by all their tokens, so one that points wrong costs a lookup and no more.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from kdn.blend.anchors import anchor_keys, anchors_of
from kdn.blend.pieces import Piece
from kdn.cache.keys import Namespace, TokenIds, Tokens, token_ids
from kdn.errors import KdnError
from kdn.protocol.limits import MAX_SPANS
from kdn.store.base import Entry, Hints, Store

if TYPE_CHECKING:
    from kdn.session.session import Session

logger = logging.getLogger(__name__)

FIND_S = 0.5
SHARE_S = 10.0
SHARED = (0, 1, 2, 4, 8, 16)
"""Which anchors of a piece point to it. The first would do, if pieces never began alike."""
ATTEMPTS = 4
"""Attempts to add a pointer while others add theirs to the same anchor."""
MAX_POINTERS = 16
"""Pieces that one anchor may point to, because they share a window. The newest stay."""
MAX_TOKENS = 1 << 20
"""Longer prompts are not searched."""
MAX_KEYS = 4 * MAX_SPANS
"""Anchors of a prompt, which are looked up: so the first 270,000 tokens are searched. Up to 67,000
tokens it is one request."""
MOST_ANCHORS = 1024
"""That are named, and one for each four tokens; texts have one in 16."""
MAX_PLACES = 64
"""Positions of one anchor in a prompt; there are several if its text repeats itself."""
MAX_MATCHES = 1 << 14
"""Candidates from all anchors together, before they are verified."""
MAX_TRIED = 16
"""Pieces that are verified at one place."""
MAX_HEADS = 16
MAX_PIECES = 256

MAGIC, VERSION = b"KDNA", 1
DIGEST_BYTES = SEAL_BYTES = 16
_HEADER = struct.Struct("<4sBBH")
_POINTER = struct.Struct("<III16s16s")
MAX_OBJECT_BYTES = _HEADER.size + MAX_POINTERS * _POINTER.size + SEAL_BYTES


class Pointer(NamedTuple):
    """From an anchor to a piece."""

    before: int
    """Own tokens of the piece before the anchor."""
    length: int
    """Own tokens of the piece."""
    head: int
    """Tokens of the head that it was learned behind."""
    head_digest: bytes
    digest: bytes
    """Digest of the piece's own tokens, without its head."""


class Match(NamedTuple):
    """A piece that an anchor of a prompt points to, not verified."""

    start: int
    end: int
    head: int
    head_digest: bytes
    digest: bytes


# finding


async def find_pieces(
    session: Session,
    namespace: Namespace,
    tokens: Tokens,
    head: int | None = None,
    limit_s: float = FIND_S,
) -> list[tuple[int, int]]:
    """Ranges of a prompt that were learned as pieces, one after another from the end of its head
    on: the longest at each place. All were learned behind that head: what stands before the first
    of them (`head`: its number of tokens, if that is known). What comes behind a gap cannot be
    joined, and is not among them. Nothing is found where nobody answers in time."""
    store, ids = session.places.objects, token_ids(tokens)
    if store is None or limit_s <= 0 or len(ids) > MAX_TOKENS:
        return []
    places = await asyncio.to_thread(_places, ids, namespace)
    if not places:
        return []
    try:
        async with asyncio.timeout(limit_s):
            found = await store.lookup(list(places), head_bytes=MAX_OBJECT_BYTES)
    except (KdnError, OSError, TimeoutError) as error:
        logger.info("no pieces are looked for in a prompt: %r", error)
        return []
    return await asyncio.to_thread(_chain, ids, namespace, places, found, head)


def _places(tokens: TokenIds, namespace: Namespace) -> dict[bytes, list[int]]:
    """Where the anchors of a prompt are, by their keys."""
    places: dict[bytes, list[int]] = {}
    # A text of one token has an anchor everywhere: naming them all would hold up others.
    every = anchors_of(tokens, namespace.secret)[: MOST_ANCHORS + len(tokens) // 4]
    for at, key in zip(every, anchor_keys(tokens, every, namespace), strict=True):
        if key not in places and len(places) == MAX_KEYS:
            break
        known = places.setdefault(key, [])
        if len(known) < MAX_PLACES:
            known.append(at)
    return places


def _chain(
    tokens: TokenIds,
    namespace: Namespace,
    places: Mapping[bytes, Sequence[int]],
    found: Iterable[Entry | None],
    head: int | None,
) -> list[tuple[int, int]]:
    """The pieces behind the head that has the most of them: the prompt may fit several heads."""
    matches = set(islice(_matches(len(tokens), namespace, places, found), MAX_MATCHES))
    heads = {(one.head, one.head_digest) for one in matches if one.start == one.head}
    best: list[tuple[int, int]] = []
    for size, digest in sorted(heads)[:MAX_HEADS]:
        if head in (None, size) and compare_digest(_digest(tokens[:size], namespace), digest):
            behind = [one for one in matches if (one.head, one.head_digest) == (size, digest)]
            chain = _verified(tokens, namespace, behind, size)
            best = max(best, chain, key=lambda one: one[-1][1] if one else 0)
    return best


def _matches(
    num_tokens: int,
    namespace: Namespace,
    places: Mapping[bytes, Sequence[int]],
    found: Iterable[Entry | None],
) -> Iterable[Match]:
    """Those that fit into the prompt."""
    for entry in found:
        if entry is None or entry.size_bytes > MAX_OBJECT_BYTES:
            continue
        for pointer in unpack(entry.key, entry.head, namespace.seal_key):
            for at in places.get(entry.key, ()):
                start = at - pointer.before
                end = start + pointer.length
                if pointer.head <= start and end <= num_tokens:
                    yield Match(start, end, *pointer[2:])


def _verified(
    tokens: TokenIds, namespace: Namespace, matches: Sequence[Match], start: int
) -> list[tuple[int, int]]:
    """One after another from `start` on, token by token those that were learned."""
    by_start: dict[int, list[Match]] = {}
    for one in matches:
        by_start.setdefault(one.start, []).append(one)
    chain: list[tuple[int, int]] = []
    while len(chain) < MAX_PIECES:
        longest = sorted(by_start.get(start, ()), key=lambda one: -one.end)[:MAX_TRIED]
        equal = (
            one.end
            for one in longest
            if compare_digest(_digest(tokens[start : one.end], namespace), one.digest)
        )
        end = next(equal, None)
        if end is None:
            break
        chain.append((start, end))
        start = end
    return chain


# sharing


async def share_anchors(
    session: Session, piece: Piece, *, namespace: Namespace | None = None, saved_s: float = 0.0
) -> int:
    """Let some anchors of a piece point to it: how many do. A piece without any is not found by
    itself, and what fails here is logged: the piece is learned all the same. `saved_s`: how long
    the model takes to read it."""
    store, namespace = session.places.objects, namespace or session.namespace
    if store is None or store.read_only:
        return 0
    pointers = await asyncio.to_thread(_pointers, piece, namespace)
    adding = _Adding(store, namespace.seal_key, Hints(saved_s=saved_s))
    try:
        async with asyncio.timeout(SHARE_S):
            return await adding.add_all(pointers)
    except (KdnError, OSError, TimeoutError) as error:
        logger.warning("%s is not found in prompts by itself: %r", piece, error)
        return 0


def _pointers(piece: Piece, namespace: Namespace) -> dict[bytes, Pointer]:
    own = token_ids(piece.tokens[piece.head :])
    head_digest = _digest(token_ids(piece.tokens[: piece.head]), namespace)
    every, digest = anchors_of(own, namespace.secret), _digest(own, namespace)
    chosen = [every[number] for number in SHARED if number < len(every)]
    pointers = [Pointer(at, len(own), piece.head, head_digest, digest) for at in chosen]
    return dict(zip(anchor_keys(own, chosen, namespace), pointers, strict=True))


@dataclass(frozen=True)
class _Adding:
    store: Store
    seal_key: bytes
    hints: Hints

    async def add_all(self, pointers: Mapping[bytes, Pointer]) -> int:
        """To those that are there: how many are, now. Others may do the same at that time."""
        left, added = dict(pointers), 0
        for _ in range(ATTEMPTS):
            if not left:
                break
            found = await self.store.lookup(list(left), head_bytes=MAX_OBJECT_BYTES)
            there = zip(list(left.items()), found, strict=True)
            done = await asyncio.gather(*(self._add(*one, entry) for one, entry in there))
            left = {key: left[key] for key, is_done in zip(left, done, strict=True) if not is_done}
            added += sum(done)
        return added

    async def _add(self, key: bytes, pointer: Pointer, found: Entry | None) -> bool:
        """An object that nobody who may has written gives way."""
        known = unpack(key, found.head, self.seal_key) if found is not None else []
        if pointer in known:
            return True
        data = pack(key, [pointer, *known][:MAX_POINTERS], self.seal_key)
        etag = blake2b(data, digest_size=DIGEST_BYTES).digest()
        kept = await self.store.put(
            key, data, etag=etag, checksum=xxh3_64_intdigest(data), hints=self.hints,
            replacing=None if found is None else found.etag,
        )  # fmt: skip
        return kept.etag == etag


# objects


def pack(key: bytes, pointers: Sequence[Pointer], seal_key: bytes) -> bytes:
    body = _HEADER.pack(MAGIC, VERSION, len(pointers), 0)
    body += b"".join(_POINTER.pack(*one) for one in pointers)
    return body + _seal(key, body, seal_key)


def unpack(key: bytes, data: bytes, seal_key: bytes) -> list[Pointer]:
    """None where the bytes are not what a holder of the secret wrote under this key."""
    if not _HEADER.size + SEAL_BYTES <= len(data) <= MAX_OBJECT_BYTES:
        return []
    body, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if not compare_digest(_seal(key, body, seal_key), seal):
        return []
    magic, version, count, _ = _HEADER.unpack_from(body)
    is_known = (magic, version) == (MAGIC, VERSION)
    if not is_known or len(body) != _HEADER.size + count * _POINTER.size:
        return []
    every = map(Pointer._make, _POINTER.iter_unpack(body[_HEADER.size :]))
    return [one for one in every if one.before < one.length]


def _seal(key: bytes, body: bytes, seal_key: bytes) -> bytes:
    digest = blake2b(key=seal_key, digest_size=SEAL_BYTES, person=b"kdn-anchor-seal")
    digest.update(len(key).to_bytes(4, "little") + key + body)
    return digest.digest()


def _digest(tokens: TokenIds, namespace: Namespace) -> bytes:
    digest = blake2b(key=namespace.secret, digest_size=DIGEST_BYTES, person=b"kdn-piece")
    digest.update(tokens.tobytes())
    return digest.digest()
