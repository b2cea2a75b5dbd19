"""Pieces that were learned apart, put one after another.

A piece is an ordinary context: a head, which all pieces share (a system prompt, a template's
beginning), and its own tokens behind it. A join holds the head once and then the own tokens of each
piece. The first piece stands where it was learned; the others move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kdn.cache.keys import Chunk, TokenIds
from kdn.cache.spec import ModelSpec
from kdn.errors import MismatchError, UnsupportedError


def check_joinable(spec: ModelSpec) -> None:
    """UnsupportedError for models whose pieces cannot be joined."""
    if any(window is not None for window in spec.windows):
        raise UnsupportedError(
            "pieces cannot be joined: this model has layers with a sliding window, which hold only "
            "the end of a piece"
        )
    if spec.has_states:
        raise UnsupportedError(
            "pieces cannot be joined: this model has recurrent layers, whose state is of all that "
            "was read before"
        )
    if not any(spec.ropes):
        raise UnsupportedError(
            "pieces cannot be joined: this model does not turn its keys by their positions (RoPE), "
            "so they cannot be moved"
        )


@dataclass(frozen=True)
class Piece:
    """`chunks` hold all of `tokens` (`cut` with `whole`), of which the first `head` are the shared
    ones."""

    tokens: TokenIds
    head: int
    chunks: tuple[Chunk, ...]
    name: str = ""

    def __post_init__(self) -> None:
        held = self.chunks[-1].end if self.chunks else 0
        if held != len(self.tokens):
            raise MismatchError(f"{self}: its chunks end at {held}, not at {len(self.tokens)}")
        if not 0 <= self.head < len(self.tokens):
            raise MismatchError(f"{self}: no token of its own comes after a head of {self.head}")

    def __str__(self) -> str:
        return repr(self.name) if self.name else "a piece"

    @property
    def num_own(self) -> int:
        return len(self.tokens) - self.head


class Place(NamedTuple):
    """Where a chunk comes to stand: its tokens from the number `skipped` on, moved by `shift`."""

    piece: int
    """The number of the piece in the join."""
    skipped: int
    """Tokens of the head, which the join has from its first piece."""
    shift: int

    def start(self, chunk: Chunk) -> int:
        """Position of the chunk's first token, skipped or not."""
        return chunk.start + self.shift


@dataclass(frozen=True)
class Join:
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not self.pieces:
            raise MismatchError("expected at least one piece to join")
        first = self.pieces[0]
        for piece in self.pieces[1:]:
            same = np.array_equal(piece.tokens[: piece.head], first.tokens[: first.head])
            if not same:
                raise MismatchError(
                    f"{piece} was learned behind another head than {first}: learn both behind one"
                )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the own tokens of each piece begin."""
        ends = np.cumsum([piece.num_own for piece in self.pieces])
        return tuple(int(end) for end in self.pieces[0].head + np.array([0, *ends[:-1]]))

    @property
    def num_tokens(self) -> int:
        return self.starts[-1] + self.pieces[-1].num_own

    @cached_property
    def tokens(self) -> TokenIds:
        """As one reader of everything would read them."""
        own = [piece.tokens[piece.head :] for piece in self.pieces]
        return np.concatenate([self.pieces[0].tokens[: self.pieces[0].head], *own])

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """What is to be loaded, each once, though a piece may stand in several places."""
        return tuple({chunk.key: chunk for chunk, _ in self._placed()}.values())

    @cached_property
    def places(self) -> dict[bytes, list[Place]]:
        """By the key of each chunk. A chunk of nothing but head stands in the first piece only."""
        found: dict[bytes, list[Place]] = {}
        for chunk, place in self._placed():
            found.setdefault(chunk.key, []).append(place)
        return found

    def _placed(self) -> Iterator[tuple[Chunk, Place]]:
        for number, (piece, start) in enumerate(zip(self.pieces, self.starts, strict=True)):
            for chunk in piece.chunks:
                skipped = max(0, piece.head - chunk.start) if number else 0
                if skipped < chunk.num_tokens:
                    yield chunk, Place(number, skipped, start - piece.head)

    def moved(self) -> Sequence[int]:
        """Numbers of the pieces that stand elsewhere than learned: the seams repair these."""
        return range(1, len(self.pieces))
