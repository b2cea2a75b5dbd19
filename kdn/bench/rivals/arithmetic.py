"""A plain arithmetic coder: 32-bit interval, 16-bit cumulative tables, one table per stream.

It is the coder of CacheGen's public code, rewritten for CPUs: renormalised bit by bit, with bits
held back while the interval straddles the middle. Streams are independent and coded in parallel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, prange

_HALF, _QUARTER, _TOP = 1 << 31, 1 << 30, (1 << 32) - 1

Symbols = npt.NDArray[np.uint8]
CdfTables = npt.NDArray[np.uint16]


def encode(symbols: Symbols, cdfs: CdfTables) -> tuple[bytes, npt.NDArray[np.int32]]:
    """Code each row of `symbols` with the same row of `cdfs`; returns the joined bytes and the
    length of each stream. A table's last bound is 65536 and stored as 0."""
    room = symbols.shape[1] * 2 + 8  # a symbol costs at most 16 bits
    buffer = np.zeros((len(symbols), room), np.uint8)
    lengths = np.zeros(len(symbols), np.int32)
    _encode_rows(symbols, cdfs, buffer, lengths)
    return b"".join(row[:n].tobytes() for row, n in zip(buffer, lengths, strict=True)), lengths


def decode(
    data: bytes, lengths: npt.NDArray[np.int32], cdfs: CdfTables, num_symbols: int
) -> Symbols:
    """The inverse of `encode`."""
    symbols = np.zeros((len(lengths), num_symbols), np.uint8)
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    _decode_rows(np.frombuffer(data, np.uint8), starts, cdfs, symbols)
    return symbols


@njit(cache=True, inline="always")
def _bounds(cdf: Any, symbol: int) -> Any:
    high = np.int64(cdf[symbol + 1])
    return np.int64(cdf[symbol]), high if high > 0 else np.int64(65536)


@njit(cache=True)
def _put(out: Any, position: int, bit: int, pending: int) -> int:
    """Write a bit and the held-back ones, which are its opposite; returns the next position."""
    if bit:
        out[position >> 3] |= 128 >> (position & 7)
    position += 1
    for _ in range(pending):
        if not bit:
            out[position >> 3] |= 128 >> (position & 7)
        position += 1
    return position


@njit(cache=True, parallel=True, nogil=True)
def _encode_rows(symbols: Any, cdfs: Any, out: Any, lengths: Any) -> None:
    for row in prange(len(symbols)):
        low, high = np.int64(0), np.int64(_TOP)
        pending, position = 0, 0
        for symbol in symbols[row]:
            first, last = _bounds(cdfs[row], symbol)
            span = high - low + 1
            high = low + (span * last >> 16) - 1
            low = low + (span * first >> 16)
            while True:
                if high < _HALF:
                    position, pending = _put(out[row], position, 0, pending), 0
                elif low >= _HALF:
                    position, pending = _put(out[row], position, 1, pending), 0
                    low, high = low - _HALF, high - _HALF
                elif low >= _QUARTER and high < _HALF + _QUARTER:
                    pending += 1
                    low, high = low - _QUARTER, high - _QUARTER
                else:
                    break
                low, high = 2 * low, 2 * high + 1
        position = _put(out[row], position, 0 if low < _QUARTER else 1, pending + 1)
        lengths[row] = (position + 7) >> 3


@njit(cache=True, parallel=True, nogil=True)
def _decode_rows(data: Any, starts: Any, cdfs: Any, symbols: Any) -> None:
    for row in prange(len(symbols)):
        stream = data[starts[row] : starts[row + 1]]
        low, high = np.int64(0), np.int64(_TOP)
        value, position = np.int64(0), 0
        for _ in range(32):
            value = 2 * value + _bit(stream, position)
            position += 1
        for i in range(symbols.shape[1]):
            span = high - low + 1
            slot = ((value - low + 1) * 65536 - 1) // span
            symbol = 0
            while _bounds(cdfs[row], symbol)[1] <= slot:
                symbol += 1
            symbols[row, i] = symbol
            first, last = _bounds(cdfs[row], symbol)
            high = low + (span * last >> 16) - 1
            low = low + (span * first >> 16)
            while True:
                if low >= _HALF:
                    low, high, value = low - _HALF, high - _HALF, value - _HALF
                elif low >= _QUARTER and high < _HALF + _QUARTER:
                    low, high, value = low - _QUARTER, high - _QUARTER, value - _QUARTER
                elif high >= _HALF:
                    break
                low, high = 2 * low, 2 * high + 1
                value = 2 * value + _bit(stream, position)
                position += 1


@njit(cache=True, inline="always")
def _bit(stream: Any, position: int) -> int:
    """Past its end a stream goes on with zeros."""
    byte = position >> 3
    return (stream[byte] >> (7 - (position & 7))) & 1 if byte < len(stream) else 0
