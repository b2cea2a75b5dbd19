"""The rANS coder of `rans.py` as Numba kernels: same bytes, same symbols, same errors.

The kernels release the GIL and use one core each; callers run sections on threads. They trust the
steps and tables (checked by their callers) and nothing of the stream: at each step the decoder
makes sure that enough words for all lanes remain, or else looks before each read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kdn.codec.format import Buffer
from kdn.codec.rans import (
    PROB_BITS,
    PROB_TOTAL,
    START_BITS,
    STATE_LOW,
    Ints,
    Symbols,
    Tables,
    check_end,
    check_steps,
    split_stream,
)
from kdn.errors import TruncatedError

_START_SHIFT = PROB_BITS - START_BITS
_SLOT_MASK = np.uint32(PROB_TOTAL - 1)
_LOW = np.uint32(STATE_LOW)


def encode(symbols: Symbols, tables: Tables, table_of_step: Ints, width_of_step: Ints) -> bytes:
    """See rans.encode."""
    check_steps(tables, table_of_step, width_of_step)
    assert len(symbols) == width_of_step.sum()
    states = np.full(width_of_step.max(initial=0), STATE_LOW, dtype=np.uint32)
    words = np.empty(len(symbols), dtype=np.uint16)  # at most one word a symbol
    first = _encode(symbols, tables.cdf, table_of_step, width_of_step, states, words)
    assert first >= 0, "a symbol that its table rules out"
    return states.astype("<u4", copy=False).tobytes() + words[first:].astype("<u2").tobytes()


@njit(nogil=True, cache=True)
def _encode(symbols: Any, cdf: Any, table_of_step: Any, width_of_step: Any, states: Any,
            words: Any) -> int:  # fmt: skip
    """Fills `words` from its end; returns where they begin, or -1 for an impossible symbol."""
    alphabet = cdf.shape[1] - 1
    at = len(symbols)
    free = len(words)
    for step in range(len(table_of_step) - 1, -1, -1):
        row = cdf[table_of_step[step]]
        for lane in range(width_of_step[step] - 1, -1, -1):
            at -= 1
            symbol = symbols[at]
            if symbol >= alphabet:
                return -1
            low = np.uint32(row[symbol])
            freq = np.uint32(row[symbol + 1]) - low
            if freq == 0:
                return -1
            x = states[lane]
            # x >= freq << 18 without leaving 32 bits, where freq may be 2^14
            if x >> np.uint32(32 - PROB_BITS) >= freq:
                free -= 1
                words[free] = x & np.uint32(0xFFFF)
                x >>= np.uint32(16)
            quotient = x // freq
            states[lane] = (quotient << np.uint32(PROB_BITS)) + low + (x - quotient * freq)
    return free


def decode(
    data: Buffer,
    tables: Tables,
    table_of_step: Ints,
    width_of_step: Ints,
    out: Symbols | None = None,
) -> Symbols:
    """See rans.decode. Writes into `out` if given: flat, contiguous, of the right length."""
    check_steps(tables, table_of_step, width_of_step)
    states, words = split_stream(data, int(width_of_step.max(initial=0)))
    num_symbols = int(width_of_step.sum())
    out = np.empty(num_symbols, dtype=np.uint8) if out is None else out
    assert out.shape == (num_symbols,)
    used = _decode(words, states, tables.cdf, tables.start, table_of_step, width_of_step, out)
    if used < 0:
        raise TruncatedError(f"expected more than the {len(words)} words of this rANS stream")
    check_end(used, len(words), states)
    return out


@njit(nogil=True, cache=True)
def _decode(words: Any, states: Any, cdf: Any, start: Any, table_of_step: Any,
            width_of_step: Any, out: Any) -> int:  # fmt: skip
    """Returns how many words were used, or -1 if there were too few."""
    at = 0
    used = 0
    num_words = len(words)
    for step in range(len(table_of_step)):
        row = cdf[table_of_step[step]]
        starts = start[table_of_step[step]]
        width = width_of_step[step]
        scarce = used + width > num_words
        for lane in range(width):
            x = states[lane]
            slot = x & _SLOT_MASK
            symbol = np.uint32(starts[slot >> np.uint32(_START_SHIFT)])
            while row[symbol + 1] <= slot:
                symbol += 1
            low = np.uint32(row[symbol])
            x = (np.uint32(row[symbol + 1]) - low) * (x >> np.uint32(PROB_BITS)) + slot - low
            if x < _LOW:
                if scarce and used >= num_words:
                    return -1
                x = x << np.uint32(16) | np.uint32(words[used])
                used += 1
            states[lane] = x
            out[at] = symbol
            at += 1
    return used
