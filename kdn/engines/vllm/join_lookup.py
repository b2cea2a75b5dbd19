"""What is known of a prompt's pieces: one lookup for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from kdn.background import fault
from kdn.blend.pieces import Join, Piece
from kdn.cache.keys import Namespace, TokenIds, Tokens, cut, token_ids
from kdn.delivery.known import Known
from kdn.engines.vllm.messages import JoinOrder
from kdn.engines.vllm.piece_ranges import Range, checked_ranges
from kdn.engines.vllm.seam_source import SeamSource
from kdn.engines.vllm.settings import Settings
from kdn.errors import KdnError, UnsupportedError
from kdn.session.anchors import find_pieces
from kdn.session.session import Session


@dataclass(frozen=True)
class KnownJoin(Known):
    """What is known of a prompt as it is, and of the join of its pieces."""

    join: Join | None = None
    """Of its first pieces, as many as are known; None: less than two."""
    parts: Known = field(default_factory=Known)
    """The chunks of the join."""
    seams: bytes = b""
    """Which repair it; none if it is empty."""
    refusal: str = ""
    """Why nothing is joined, where that is not for want of pieces."""

    def order(self) -> JoinOrder:
        assert self.join is not None
        numbers = {chunk.key: number for number, chunk in enumerate(self.parts.chunks)}
        pieces = tuple(tuple(numbers[c.key] for c in p.chunks) for p in self.join.pieces)
        return JoinOrder(self.join.pieces[0].head, pieces, self.seams)


@dataclass(frozen=True)
class Wanted:
    """What a request's join must be like."""

    pieces: tuple[Range, ...] | None
    """None: they are to be found."""
    repaired: bool
    """By seams."""
    join_kld: float
    """What they may leave, as they expect it."""
    enough_kld: float
    limit_s: float

    @classmethod
    def of(cls, pieces: tuple[Range, ...] | None, settings: Settings, limit_s: float) -> Wanted:
        return cls(pieces, settings.seams is not None, settings.join_kld, settings.quality, limit_s)


async def know_join(
    session: Session, source: SeamSource, tokens: Tokens, namespace: Namespace, wanted: Wanted
) -> KnownJoin:
    """The join of the pieces that are known; where it is one, it is an ordinary beginning of the
    prompt. Whatever is wrong with pieces costs no more than the join."""
    try:
        async with asyncio.timeout(wanted.limit_s or None):
            return await _know_join(session, source, token_ids(tokens), namespace, wanted)
    except TimeoutError:
        return KnownJoin()
    except KdnError as error:
        return KnownJoin(refusal=str(error))
    except Exception as error:
        fault("looking up a join", error)
        return KnownJoin(refusal=repr(error))


def with_join(plain: Known, found: KnownJoin) -> Known:
    """What is known of a prompt, of both lookups."""
    longest = found if found.end > plain.end else plain
    if found.join is None and not found.refusal:
        return longest.packed()
    return replace(
        found,
        chunks=longest.chunks,
        streams={},
        is_late=plain.is_late,
        _packed=longest.packed()._packed,
    )


async def _know_join(
    session: Session, source: SeamSource, ids: TokenIds, namespace: Namespace, wanted: Wanted
) -> KnownJoin:
    ranges = wanted.pieces
    if ranges is None:
        found = await find_pieces(session, namespace, ids, limit_s=wanted.limit_s)
        ranges = checked_ranges(found, len(ids)) if found else ()
    pieces = [_piece(ids, one, ranges[0][0], namespace) for one in ranges]
    chunks = {chunk.key: chunk for piece in pieces for chunk in piece.chunks}
    parts = await session.know_each(
        tuple(chunks.values()), enough_kld=wanted.enough_kld, limit_s=wanted.limit_s
    )
    first = _first_known(pieces, parts)
    if len(first) < 2:  # it stands where it was learned
        own = replace(parts, chunks=first[0].chunks).packed() if first else Known()
        return KnownJoin(own.chunks, _packed=own._packed)
    join = Join(tuple(first))
    seams = await _seams_for(source, wanted)
    return KnownJoin(join=join, parts=replace(parts, chunks=join.chunks).packed(), seams=seams)


def _piece(ids: TokenIds, own: Range, head: int, namespace: Namespace) -> Piece:
    """As it was learned: its own tokens directly behind the head."""
    tokens = np.concatenate([ids[:head], ids[slice(*own)]])
    return Piece(tokens, head, tuple(cut(tokens, namespace, whole=True)))


def _first_known(pieces: Sequence[Piece], parts: Known) -> list[Piece]:
    """As far as all their chunks are known."""
    keys = {chunk.key for chunk in parts.chunks}
    return list(takewhile(lambda piece: all(c.key in keys for c in piece.chunks), pieces))


async def _seams_for(source: SeamSource, wanted: Wanted) -> bytes:
    """Which are to repair the join. UnsupportedError if none are good enough."""
    if not wanted.repaired:
        return b""
    fitted = await source.find(wanted.limit_s)
    if fitted is None:
        raise UnsupportedError("there are no seams to repair it with")
    if fitted.kld > wanted.join_kld:
        raise UnsupportedError(
            f"its seams are expected to leave {fitted.kld:.3g} nats, which is more than "
            f"{wanted.join_kld:.3g}"
        )
    return fitted.seams_id
