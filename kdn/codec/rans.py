"""Interleaved rANS with static tables: the readable reference, and the tables both coders share.

Symbols come in steps. At step `s` the lanes `[0, width_of_step[s])` each code one symbol, all with
the table `table_of_step[s]`: the shape that suits SIMD and GPUs, as one table serves all lanes at a
time. The symbols of all steps lie one after the other in one flat array.

Invariant: between two symbols every lane's state x is in [2^16, 2^32). With a symbol of frequency f
and cumulative frequency c (out of M = 2^14) the encoder first emits the low 16 bits of x if
x >= f * 2^18, which leaves x < f * 2^18, and then sets x = (x // f) * M + c + x % f < 2^32. The
decoder inverts both, in reverse order, so it knows by x < 2^16 alone that a word was emitted here;
one word always suffices, since x >= 4 before it is read. At each step the lanes that need a word
take the next ones in lane order: a prefix sum tells each lane its place.

The encoder runs backwards from x = 2^16 in all lanes; its final states open the stream:

    bytes = state of each lane (u32) | words in the order the decoder reads them (u16)

So a valid stream ends with every lane at 2^16 and every word used: the decoder checks both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kdn.codec.format import Buffer
from kdn.errors import FormatError, TruncatedError

PROB_BITS = 14
PROB_TOTAL = 1 << PROB_BITS
WORD_BITS = 16
STATE_LOW = 1 << 16
MAX_ALPHABET = 256
START_BITS = 8

Symbols = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Tables:
    """Static tables. Row t of `cdf` ([tables, alphabet + 1]) holds cumulative frequencies: symbol s
    owns the slots [cdf[t, s], cdf[t, s + 1]). `start[t, slot >> 6]` is the first symbol that can
    own the slot: where a search for it begins."""

    cdf: npt.NDArray[np.uint16]
    start: npt.NDArray[np.uint8]

    @classmethod
    def from_freqs(cls, freqs: npt.NDArray[np.integer]) -> Tables:
        """Of frequencies [tables, alphabet] from anywhere, each row summing to PROB_TOTAL."""
        if freqs.ndim != 2 or not 1 <= freqs.shape[1] <= MAX_ALPHABET:
            raise FormatError(
                f"expected tables of 1 to {MAX_ALPHABET} symbols, found shape {freqs.shape}"
            )
        wide = freqs.astype(np.int32)
        if wide.size and (wide.min() < 0 or wide.max() > PROB_TOTAL):
            raise FormatError(f"expected frequencies of 0 to {PROB_TOTAL}")
        cdf = np.zeros((len(wide), wide.shape[1] + 1), dtype=np.int32)
        np.cumsum(wide, axis=1, out=cdf[:, 1:])
        if np.any(cdf[:, -1] != PROB_TOTAL):
            raise FormatError(f"expected frequencies that sum to {PROB_TOTAL}")
        return cls(cdf.astype(np.uint16), _starts(cdf))


def _starts(cdf: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """First symbol of each block of 2^(14-8) slots: one less than the bounds at or below it."""
    num_tables, shift = len(cdf), PROB_BITS - START_BITS
    # The block from which on a bound counts; bounds at PROB_TOTAL fall off the end.
    block = np.minimum((cdf[:, 1:] + (1 << shift) - 1) >> shift, 1 << START_BITS)
    hits = np.zeros((num_tables, (1 << START_BITS) + 1), dtype=np.int32)
    np.add.at(hits, (np.arange(num_tables)[:, None], block), 1)
    return np.cumsum(hits[:, :-1], axis=1).astype(np.uint8)


def normalise(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.uint16]:
    """Frequencies summing to PROB_TOTAL, in integer arithmetic only, equal on every machine.

    A symbol is possible if its count is not zero; it then gets at least 1. Works on the last axis.
    """
    rows = np.ascontiguousarray(counts, dtype=np.int64).reshape(-1, counts.shape[-1])
    freqs = np.stack([_normalise_row(row) for row in rows])
    return freqs.reshape(counts.shape).astype(np.uint16)


def _normalise_row(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    total = int(counts.sum())
    assert counts.min() >= 0
    assert 0 < total < 2**48
    possible = counts > 0
    assert possible.sum() <= PROB_TOTAL
    scaled = counts * PROB_TOTAL
    freqs = np.where(possible, np.maximum(scaled // total, 1), 0)
    missing = PROB_TOTAL - int(freqs.sum())
    if missing > 0:  # to the largest remainders, ties to the lower symbol
        remainder = np.where(scaled >= total, scaled % total, 0)
        freqs[np.argsort(-remainder, kind="stable")[:missing]] += 1
    for _ in range(-missing):  # a slot less costs about the same anywhere: the largest feels least
        freqs[np.argmax(freqs)] -= 1
    return freqs


def even_widths(num_symbols: int, lanes: int) -> Ints:
    """Widths of steps for so many symbols: full steps, and a last one with what is left."""
    full, rest = divmod(num_symbols, lanes)
    return np.array([lanes] * full + [rest] * bool(rest), dtype=np.int32)


def check_steps(tables: Tables, table_of_step: Ints, width_of_step: Ints) -> None:
    """The steps are ours, never read from a stream: a mistake in them is a bug."""
    assert table_of_step.shape == width_of_step.shape == (len(table_of_step),)
    assert np.all((table_of_step >= 0) & (table_of_step < len(tables.cdf)))
    assert np.all(width_of_step >= 0)


def encode(symbols: Symbols, tables: Tables, table_of_step: Ints, width_of_step: Ints) -> bytes:
    """The stream of these symbols. Each must be possible in its step's table."""
    check_steps(tables, table_of_step, width_of_step)
    assert len(symbols) == width_of_step.sum()
    states = np.full(width_of_step.max(initial=0), STATE_LOW, dtype=np.uint64)
    words: list[npt.NDArray[np.uint16]] = []
    end = len(symbols)
    for table, width in zip(table_of_step[::-1], width_of_step[::-1], strict=True):
        cdf = tables.cdf[table].astype(np.uint64)
        symbol = symbols[end - width : end].astype(np.intp)
        low, freq = cdf[symbol], cdf[symbol + 1] - cdf[symbol]
        assert np.all(freq > 0), "a symbol that its table rules out"
        x = states[:width]
        full = x >= freq << np.uint64(32 - PROB_BITS)
        words.append((x[full] & np.uint64(0xFFFF)).astype(np.uint16))
        x[full] >>= np.uint64(WORD_BITS)
        states[:width] = (x // freq << np.uint64(PROB_BITS)) + low + x % freq
        end -= width
    body = np.concatenate(words[::-1]) if words else np.zeros(0, np.uint16)
    return states.astype("<u4").tobytes() + body.astype("<u2").tobytes()


def decode(data: Buffer, tables: Tables, table_of_step: Ints, width_of_step: Ints) -> Symbols:
    """The symbols of a stream from anywhere, with the steps it was made with."""
    check_steps(tables, table_of_step, width_of_step)
    first, words = split_stream(data, int(width_of_step.max(initial=0)))
    states = first.astype(np.uint64)
    parts: list[Symbols] = []
    used = 0
    for table, width in zip(table_of_step, width_of_step, strict=True):
        cdf = tables.cdf[table].astype(np.uint64)
        x = states[:width]
        slot = x & np.uint64(PROB_TOTAL - 1)
        symbol = np.searchsorted(cdf, slot, side="right") - 1
        x = (cdf[symbol + 1] - cdf[symbol]) * (x >> np.uint64(PROB_BITS)) + slot - cdf[symbol]
        hungry = x < STATE_LOW
        place = used + np.cumsum(hungry) - 1
        used += int(hungry.sum())
        if used > len(words):
            raise TruncatedError(f"expected more than the {len(words)} words of this rANS stream")
        x[hungry] = x[hungry] << np.uint64(WORD_BITS) | words[place[hungry]]
        states[:width] = x
        parts.append(symbol.astype(np.uint8))
    check_end(used, len(words), states.astype(np.uint32))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def split_stream(data: Buffer, lanes: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """First states (a copy) and words (a view) of a stream from anywhere."""
    if len(data) < 4 * lanes:
        raise TruncatedError(
            f"expected {lanes} rANS states in {4 * lanes} bytes, found {len(data)}"
        )
    if len(data) % 2:
        raise FormatError(f"expected a rANS stream of whole 16-bit words, found {len(data)} bytes")
    states = np.frombuffer(data, dtype="<u4", count=lanes).astype(np.uint32)
    if np.any(states < STATE_LOW):
        raise FormatError(f"expected rANS states of at least {STATE_LOW}, found {states.min()}")
    return states, np.frombuffer(data, dtype="<u2", offset=4 * lanes).astype(np.uint16, copy=False)


def check_end(used: int, num_words: int, states: npt.NDArray[np.uint32]) -> None:
    """A whole and sound stream ends with all words used and all lanes where the encoder began."""
    if used != num_words:
        raise FormatError(f"expected a rANS stream of {used} words, found {num_words}")
    if np.any(states != STATE_LOW):
        raise FormatError(f"expected every rANS lane to end at {STATE_LOW}")
