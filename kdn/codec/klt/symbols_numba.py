"""The coder of `symbols.py` as Numba kernels: the same bytes, the same symbols.

Kernels release the GIL and allocate a few arrays of a chunk's size; callers run sections in
parallel. A decoder never reads outside its buffer: it returns -1 where words run out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from kdn.codec import rans
from kdn.codec.format import Buffer
from kdn.codec.klt.symbols import (
    BLOCK,
    ESCAPE,
    LARGEST_PLAIN,
    NUM_ACTIVITIES,
    NUM_NEIGHBOURS,
    NUM_SCALES,
    ZERO_TABLES,
    Ints,
    Model,
)
from kdn.errors import TruncatedError

_BITS = rans.PROB_BITS
_MASK = rans.PROB_TOTAL - 1
_LOW = rans.STATE_LOW


def encode(model: Model, values: Ints, coarse: Ints | None) -> bytes:
    """See symbols.encode."""
    tables, symbols = contexts(model, values, coarse)
    return _push_all(tables, symbols, values, model.cdf, model.num_lanes, coarse is None)


def contexts(
    model: Model, values: Ints, coarse: Ints | None
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """Table and symbol of every value, [components, tokens]: for encoding and for statistics."""
    tables = np.empty(values.shape, dtype=np.uint16)
    symbols = np.empty(values.shape, dtype=np.uint8)
    if coarse is None:
        _base_contexts(values, model.scales, model.shifts, model.thresholds, tables, symbols)
    else:
        _digit_contexts(
            values, coarse, model.scales, model.shifts, model.thresholds, tables, symbols
        )
    return tables, symbols


def activity_sums(values: Ints) -> Ints:
    """The activity of every token on entering each block, [blocks, tokens]: for calibration."""
    sums = np.empty((-(-values.shape[0] // BLOCK), values.shape[1]), dtype=np.int32)
    _activity_sums(values, sums)
    return sums


def decode(model: Model, data: Buffer, coarse: Ints | None) -> Ints:
    """See symbols.decode."""
    states, words = rans.split_stream(data, model.num_lanes)
    values = np.empty(model.shape, dtype=np.int32)
    common = (states, words, model.scales, model.shifts, model.thresholds, model.cdf, values)
    used = _decode_base(*common) if coarse is None else _decode_digits(*common, coarse)
    if used < 0:
        raise TruncatedError(f"expected more than {len(words)} words in a section")
    rans.check_end(used, len(words), states)
    return values


def _push_all(
    tables: npt.NDArray[np.uint16],
    symbols: npt.NDArray[np.uint8],
    values: Ints,
    cdf: npt.NDArray[np.uint16],
    num_lanes: int,
    has_escapes: bool,
) -> bytes:
    # At most one word per symbol and one per escape.
    escapes = int(np.count_nonzero(symbols == ESCAPE)) if has_escapes else 0
    words = np.empty(symbols.size + escapes, dtype=np.uint16)
    states = np.full(num_lanes, _LOW, dtype=np.uint32)
    first = _push(tables, symbols, values, cdf, states, words, has_escapes)
    data: bytes = states.astype("<u4").tobytes() + words[first:].astype("<u2").tobytes()
    return data


@njit(nogil=True, cache=True)
def _classify(sums, block, bounds, classes):  # type: ignore[no-untyped-def]
    for t in range(len(sums)):
        total = sums[t] + 16 * block[t] - (sums[t] >> 3)
        sums[t] = total
        block[t] = 0
        found = 0
        for j in range(NUM_ACTIVITIES - 1):
            found += total >= bounds[j]
        classes[t] = found


@njit(nogil=True, cache=True)
def _activity_sums(values, out):  # type: ignore[no-untyped-def]
    num_components, num_tokens = values.shape
    for t in range(num_tokens):
        total, block = 0, 0
        for c in range(num_components):
            if c % BLOCK == 0:
                total += 16 * block - (total >> 3)
                block = 0
                out[c // BLOCK, t] = total
            block += min(abs(values[c, t]), 3)


@njit(nogil=True, cache=True)
def _base_contexts(values, scales, shifts, thresholds, tables, symbols):  # type: ignore[no-untyped-def]
    num_components, num_tokens = values.shape
    sums, block = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    classes = np.zeros(num_tokens, np.int32)
    for c in range(num_components):
        if c % BLOCK == 0:
            _classify(sums, block, thresholds[c // BLOCK], classes)
        for t in range(num_tokens):
            q = values[c, t]
            scale = min(max(np.int32(scales[c]) + shifts[t], 0), NUM_SCALES - 1)
            tables[c, t] = scale * NUM_ACTIVITIES + classes[t]
            size = abs(q)
            if size > LARGEST_PLAIN:
                symbols[c, t] = ESCAPE
            else:
                symbols[c, t] = 2 * size - (q < 0)
            block[t] += min(size, 3)


@njit(nogil=True, cache=True)
def _digit_contexts(values, coarse, scales, shifts, thresholds, tables, symbols):  # type: ignore[no-untyped-def]
    num_components, num_tokens = values.shape
    sums, block = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    classes = np.zeros(num_tokens, np.int32)
    for c in range(num_components):
        if c % BLOCK == 0:
            _classify(sums, block, thresholds[c // BLOCK], classes)
        for t in range(num_tokens):
            own = coarse[c, t]
            scale = min(max(np.int32(scales[c]) + shifts[t], 0), NUM_SCALES - 1)
            digit = values[c, t] - 3 * own
            if own == 0:
                near = 0
                if t > 0 and coarse[c, t - 1] != 0:
                    near += 1
                if t + 1 < num_tokens and coarse[c, t + 1] != 0:
                    near += 1
                tables[c, t] = (scale * NUM_ACTIVITIES + classes[t]) * NUM_NEIGHBOURS + near
            else:
                tables[c, t] = ZERO_TABLES + scale * 2 + (abs(own) > 1)
                if own < 0:
                    digit = -digit
            symbols[c, t] = 0 if digit == 0 else (1 if digit < 0 else 2)
            block[t] += min(abs(values[c, t]), 3)


@njit(nogil=True, cache=True)
def _push(tables, symbols, values, cdf, states, words, has_escapes):  # type: ignore[no-untyped-def]
    """Codes backwards, filling `words` from its end; returns where they begin."""
    num_components, num_tokens = symbols.shape
    num_lanes = len(states)
    place = len(words)
    for c in range(num_components - 1, -1, -1):
        for t in range(num_tokens - 1, -1, -1):
            symbol = symbols[c, t]
            if has_escapes and symbol == ESCAPE:
                place -= 1
                words[place] = np.uint16(values[c, t] & 0xFFFF)
            low = np.uint32(cdf[tables[c, t], symbol])
            freq = np.uint32(cdf[tables[c, t], symbol + 1]) - low
            x = states[t % num_lanes]
            if np.uint64(x) >= np.uint64(freq) << np.uint64(18):
                place -= 1
                words[place] = np.uint16(x & np.uint32(0xFFFF))
                x = np.uint32(x >> np.uint32(16))
            states[t % num_lanes] = ((x // freq) << np.uint32(_BITS)) + low + x % freq
    return place


@njit(nogil=True, cache=True)
def _rows_of(scale, shifts, classes, num_near, rows):  # type: ignore[no-untyped-def]
    """First table of every token; a component's scale is mostly that of the one before."""
    for t in range(len(rows)):
        found = min(max(np.int64(scale) + shifts[t], 0), NUM_SCALES - 1)
        rows[t] = (found * NUM_ACTIVITIES + classes[t]) * num_near


@njit(nogil=True, cache=True)
def _decode_base(states_in, words, scales, shifts, thresholds, cdf, values):  # type: ignore[no-untyped-def]
    num_components, num_tokens = values.shape
    num_lanes, num_words, used = len(states_in), len(words), 0
    states = states_in.astype(np.int64)
    sums, block = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    classes, rows = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    for c in range(num_components):
        if c % BLOCK == 0:
            _classify(sums, block, thresholds[c // BLOCK], classes)
        if c % BLOCK == 0 or scales[c] != scales[c - 1]:
            _rows_of(scales[c], shifts, classes, 1, rows)
        lane = 0
        for t in range(num_tokens):
            x = states[lane]
            slot = x & _MASK
            high = np.int64(cdf[rows[t], 1])
            if slot < high:
                x = high * (x >> _BITS) + slot
                values[c, t] = 0
                if x < _LOW:
                    if used == num_words:
                        return -1
                    x = (x << 16) | np.int64(words[used])
                    used += 1
                states[lane] = x
            else:
                symbol = 1
                while slot >= cdf[rows[t], symbol + 1]:
                    symbol += 1
                low = np.int64(cdf[rows[t], symbol])
                x = (np.int64(cdf[rows[t], symbol + 1]) - low) * (x >> _BITS) + slot - low
                if x < _LOW:
                    if used == num_words:
                        return -1
                    x = (x << 16) | np.int64(words[used])
                    used += 1
                states[lane] = x
                size = (symbol + 1) >> 1
                values[c, t] = -size if symbol & 1 else size
                if symbol == ESCAPE:
                    if used == num_words:
                        return -1
                    values[c, t] = np.int16(words[used])
                    used += 1
                size = abs(values[c, t])
                block[t] += min(size, 3)
            lane += 1
            if lane == num_lanes:
                lane = 0
    states_in[:] = states.astype(np.uint32)
    return used


@njit(nogil=True, cache=True)
def _decode_digits(states_in, words, scales, shifts, thresholds, cdf, values, coarse):  # type: ignore[no-untyped-def]
    num_components, num_tokens = values.shape
    num_lanes, num_words, used = len(states_in), len(words), 0
    states = states_in.astype(np.int64)
    sums, block = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    classes, rows = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    for c in range(num_components):
        if c % BLOCK == 0:
            _classify(sums, block, thresholds[c // BLOCK], classes)
        if c % BLOCK == 0 or scales[c] != scales[c - 1]:
            _rows_of(scales[c], shifts, classes, NUM_NEIGHBOURS, rows)
        lane, before = 0, False
        own = np.int64(coarse[c, 0])
        for t in range(num_tokens):
            after = np.int64(coarse[c, t + 1]) if t + 1 < num_tokens else np.int64(0)
            if own == 0:
                row = rows[t] + before + (after != 0)
            else:
                scale = min(max(np.int64(scales[c]) + shifts[t], 0), NUM_SCALES - 1)
                row = ZERO_TABLES + scale * 2 + (abs(own) > 1)
            x = states[lane]
            slot = x & _MASK
            high = np.int64(cdf[row, 1])
            q = 3 * own
            if slot < high:
                x = high * (x >> _BITS) + slot
            else:
                low, digit = high, -1
                high = np.int64(cdf[row, 2])
                if slot >= high:
                    low, digit = high, 1
                    high = np.int64(cdf[row, 3])
                x = (high - low) * (x >> _BITS) + slot - low
                q += -digit if own < 0 else digit
            if x < _LOW:
                if used == num_words:
                    return -1
                x = (x << 16) | np.int64(words[used])
                used += 1
            states[lane] = x
            values[c, t] = q
            if q != 0:
                block[t] += min(abs(q), 3)
            before, own = own != 0, after
            lane += 1
            if lane == num_lanes:
                lane = 0
    states_in[:] = states.astype(np.uint32)
    return used
