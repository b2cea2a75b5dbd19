"""What seams are fitted on, in two halves, each of which is measured by what the other one says.

A map that is fitted on one half has seen no passage that the other is asked about: so every
question can be measured. Only passages that both halves are asked about are kept out of fitting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kdn.errors import UnsupportedError

LEAST_PIECES = 6
LEAST_TOKENS = 1024

Part = tuple[int, ...]
"""Own tokens of a piece, or of a part of a long one."""


@dataclass(frozen=True)
class Example:
    """A question, and the pieces (their own tokens) that it is asked about."""

    question: str
    pieces: Sequence[Sequence[int]]


@dataclass
class Half:
    examples: list[Example] = field(default_factory=list)
    asked_about: set[Part] = field(default_factory=set)
    """Pieces of these examples."""
    pieces: list[Part] = field(default_factory=list)
    """To be fitted on: nothing that the other half is asked about."""

    def is_own(self, pieces: Sequence[Sequence[int]]) -> bool:
        """Whether a join of these may be fitted on."""
        return {tuple(piece) for piece in pieces} <= set(self.pieces)


def in_halves(
    pieces: Sequence[Part], examples: Sequence[Example], random: np.random.Generator
) -> tuple[Half, Half]:
    """UnsupportedError if there is too little to fit on."""
    first, second = halves = Half(), Half()
    for index in random.permutation(len(examples)):
        half = _half_for(examples[index], halves, -(-len(examples) // 2))
        half.examples.append(examples[index])
        half.asked_about.update(map(tuple, examples[index].pieces))
    in_both = first.asked_about & second.asked_about
    for half in halves:
        half.pieces = sorted(half.asked_about - in_both)
    asked_about = first.asked_about | second.asked_about
    others = [piece for piece in dict.fromkeys(pieces) if piece not in asked_about]
    for index in random.permutation(len(others)):
        min(halves, key=lambda half: len(half.pieces)).pieces.append(others[index])
    _check([first.pieces, second.pieces])
    return halves


def _half_for(example: Example, halves: tuple[Half, Half], most: int) -> Half:
    """Where more of its pieces are already: what both halves are asked about is lost for fitting.
    Else where there are fewer questions."""
    about = set(map(tuple, example.pieces))
    free = [half for half in halves if len(half.examples) < most]
    return max(free, key=lambda half: (len(about & half.asked_about), -len(half.examples)))


def _check(found: Sequence[Sequence[Part]]) -> None:
    tokens = sum(len(piece) for pieces in found for piece in pieces)
    if tokens < LEAST_TOKENS or min(map(len, found)) < LEAST_PIECES // 2:
        both = " and ".join(str(len(pieces)) for pieces in found)
        raise UnsupportedError(
            f"seams need at least {LEAST_TOKENS:,} tokens of text in {LEAST_PIECES} pieces, half "
            "of them without passages that the other half's questions are about (long ones are cut "
            f"into several), found {tokens:,} tokens in {both} pieces: give more, or questions "
            "about fewer passages each"
        )
