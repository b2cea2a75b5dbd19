"""Where the pieces of a prompt are: token ranges, one directly behind the other, after a head.

A request names them itself, or a separator of the operator's ends the head and then each piece.
What a request says is hostile until it is checked: whatever is wrong is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kdn.cache.keys import Tokens, token_ids
from kdn.checked import shown
from kdn.errors import UnsupportedError

MAX_PIECES = 256
MAX_READ_TOKENS = 1 << 18
"""Of all pieces together, each with its head: they are hashed for every lookup, in some 10 ms."""
MAX_SEPARATOR_TOKENS = 32

Range = tuple[int, int]
"""Half-open, of a prompt's tokens."""


def checked_ranges(given: Any, num_tokens: int) -> tuple[Range, ...]:
    """The pieces that a request of so many prompt tokens names."""
    if not isinstance(given, list | tuple):
        raise UnsupportedError(f"pieces: expected ranges, found {type(given).__name__}")
    if not 1 <= len(given) <= MAX_PIECES:
        raise UnsupportedError(f"pieces: expected 1 to {MAX_PIECES} ranges, found {len(given)}")
    ranges = tuple(_checked_range(one) for one in given)
    ends = [end for _, end in ranges]
    if [start for start, _ in ranges[1:]] != ends[:-1]:
        raise UnsupportedError("pieces: expected ranges that begin where the one before ends")
    if ends[-1] > num_tokens:
        raise UnsupportedError(f"pieces: they end at {ends[-1]}, the prompt at {num_tokens}")
    check_read(ranges)
    return ranges


def check_read(ranges: Sequence[Range]) -> None:
    """UnsupportedError if there are too many, or too many tokens in them."""
    if len(ranges) > MAX_PIECES:
        raise UnsupportedError(f"expected at most {MAX_PIECES} pieces, found {len(ranges)}")
    head = ranges[0][0]
    if (read := sum(head + end - start for start, end in ranges)) > MAX_READ_TOKENS:
        raise UnsupportedError(
            f"pieces: with a head of {head} tokens each they have {read}, "
            f"more than {MAX_READ_TOKENS}"
        )


def _checked_range(given: Any) -> Range:
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    if not is_pair or any(type(number) is not int for number in given):
        raise UnsupportedError(f"pieces: expected [start, end], found {shown(given)}")
    start, end = given
    if not 0 <= start < end:
        raise UnsupportedError("pieces: expected ranges of at least one token, from 0 on")
    return start, end


def separated(tokens: Tokens, separator: Sequence[int]) -> tuple[Range, ...]:
    """Between separators: the first ends the head, each other one the piece that it belongs to.
    What is behind the last is no piece. Empty where there are none."""
    ids = token_ids(tokens)
    ends = _ends_of(ids, token_ids(separator))
    ranges = tuple(pairwise(ends))
    if ranges:
        check_read(ranges)
    return ranges


def _ends_of(ids: np.ndarray, wanted: np.ndarray) -> list[int]:
    """Where it ends each time that it occurs, none within another."""
    if not len(wanted) or len(ids) < len(wanted):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(wanted))
    ends: list[int] = []
    for start in np.flatnonzero((windows == wanted).all(axis=1)).tolist():
        if not ends or start >= ends[-1]:
            ends.append(start + len(wanted))
    return ends
